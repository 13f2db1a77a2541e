"""Recipes of several documents: which branch each is merged to."""

from __future__ import annotations

from collections.abc import Sequence

from mpfs.errors import NotFoundError, RecipeError
from mpfs.merge.recipe import Recipe
from mpfs.objects import Commit
from mpfs.store import Store


def branches_of(documents: Sequence[Recipe], into: str, store: Store) -> list[tuple[str, Recipe]]:
    """The branches that documents are merged to, in order: those of their names, and for the last one `into`.

    Raises:
        RecipeError: a name is that of `into`, or of a branch that no merge has made.
    """
    problems: list[dict[str, str]] = []
    found: list[tuple[str, Recipe]] = []
    for index, document in enumerate(documents, start=1):
        name = into if index == len(documents) or document.name is None else document.name
        found.append((name, document))
        if index == len(documents):
            break
        if name == into:
            problems.append({"path": f"#{index}.name", "message": f"{name} is where the last document is merged to"})
        elif not _is_free(name, store):
            problems.append(
                {"path": f"#{index}.name", "message": f"there is a branch or tag {name} that no merge has made"}
            )
    if problems:
        raise RecipeError("; ".join(f"{item['path']}: {item['message']}" for item in problems), problems=problems)
    return found


def _is_free(name: str, store: Store) -> bool:
    try:
        ref = store.refs.get(name)
    except NotFoundError:
        return True
    return ref.kind == "branch" and store.objects.get(Commit, ref.commit).plan is not None
