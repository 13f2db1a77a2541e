"""How a recipe refers to a model: by a name, or in mergekit's long form."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mpfs.merge.recipe.problems import Problem, problem


class Strict(BaseModel):
    """A mapping without unknown keys."""

    model_config = ConfigDict(extra="forbid")


class ModelPath(Strict):
    """A path with a revision."""

    path: str
    revision: str | None = None


class ModelReference(Strict):
    """The long form of a model: `{model: {path: NAME, revision: REVISION}, lora: {path: ADAPTER}}`."""

    model: ModelPath
    lora: ModelPath | None = None
    override_architecture: str | None = None


def model_name(reference: str | ModelReference, path: str, problems: list[Problem]) -> str:
    """The name of a model in the short form, `NAME@REVISION+ADAPTER`; `path` is where it stands in the recipe."""
    if isinstance(reference, str):
        name = reference
    else:
        name = "+".join(
            part.path if part.revision is None else f"{part.path}@{part.revision}"
            for part in (reference.model, reference.lora)
            if part is not None
        )
    if not name.strip():
        problems.append(problem(path, "the name is empty"))
    elif name.count("+") > 1:
        problems.append(problem(path, f"{name}: a model takes one adapter (+)"))
    elif not all(part.strip() for part in name.split("+")):
        problems.append(problem(path, f"{name}: a model with an adapter is written MODEL+ADAPTER"))
    return name
