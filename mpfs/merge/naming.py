"""From a recipe's words for a model to a commit: refs, commits, paths, URLs, hub ids, with `@revision` and `+adapter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpfs.errors import NotFoundError
from mpfs.history import ancestry
from mpfs.merge.commit import load_model
from mpfs.objects import ObjectId
from mpfs.store import Store


@dataclass(frozen=True, slots=True)
class ModelFinder:
    """Finds the models of a recipe in a store.

    `resolve` gives the commit of a revision; `bring_in` imports a path, URL or hub id; `is_hub_id` says whether a name could
    be one; `folder` is where paths may start from, besides the working directory.
    """

    store: Store
    author: str
    resolve: Callable[[str], ObjectId]
    bring_in: Callable[[str | Path], ObjectId]
    is_hub_id: Callable[[str], bool]
    folder: Path | None

    def commit(self, name: str) -> ObjectId:
        """The commit of a model; made if it is one with an adapter.

        Raises:
            NotFoundError: a part of it is neither a ref, a commit, a path nor a model on the hub.
            BadInputError: the adapter is none, or does not fit.
        """
        base, plus, adapter = name.partition("+")
        if not plus:
            return self._plain(name)
        from mpfs.formats.peft import CONFIG_PATH
        from mpfs.merge.adapter import with_adapter

        model = load_model(self.store, base, self._plain(base))
        change = load_model(self.store, adapter, self._plain(adapter), config_path=CONFIG_PATH)
        return with_adapter(self.store, name, model, change, self.author)

    def _plain(self, name: str) -> ObjectId:
        try:
            return self.resolve(name)
        except NotFoundError as error:
            if "://" in name:
                return self.bring_in(name)
            paths = [Path(name)] if self.folder is None else [Path(name), self.folder / name]
            for path in paths:
                if path.exists():
                    return self.bring_in(path)
            model, at, revision = name.rpartition("@")
            if at and not (self.is_hub_id(name) and self._is_unknown(model)):
                return self._at(model, revision)
            if self.is_hub_id(name):
                return self.bring_in(name)
            raise NotFoundError(f"model {name}: {error.message}, and there is no such path", model=name) from error

    def _is_unknown(self, name: str) -> bool:
        try:
            self.resolve(name)
        except NotFoundError:
            return True
        return False

    def _at(self, model: str, revision: str) -> ObjectId:
        """An earlier commit of a model's history."""
        commit, tip = self.resolve(revision), self.resolve(model)
        if all(item.identity != commit for item in ancestry([tip], self.store.objects, self.store.refs)):
            raise NotFoundError(f"model {model}@{revision}: {revision} is not in the history of {model}", model=model)
        return commit


def imported_ref(source: str | Path) -> str:
    """The branch that a path, URL or hub id is imported to, where only a model was named."""
    parts = [source] if isinstance(source, str) and "://" not in source else [Path(source).resolve().name]
    clean = "/".join(_clean(part) for text in parts for part in str(text).split("/"))
    return "imported/" + (clean or "model")


def _clean(name: str) -> str:
    text = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in name)
    return text.strip(".-").replace("..", "-") or "model"
