"""The facade: everything that a user does with a repository, in one class.

It ties the layers together and adds no logic of its own: names become commits here, and results become reports.
"""

from __future__ import annotations

import os
import pwd
import time as clock
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mpfs.errors import BadInputError, NotFoundError, RecipeError, RefConflictError
from mpfs.history import LogEntry, ancestry, entry, resolve
from mpfs.ingest.facade import Imports
from mpfs.merge.facade import Explains
from mpfs.merge.options import DEFAULT_MEMORY, MergeOptions
from mpfs.merge.reports import MergeReport, PlanReport
from mpfs.merge.sweep.facade import Sweeps
from mpfs.objects import Budget, Commit, ObjectId, Plan, Run, Snapshot, Tensor, object_id
from mpfs.objects.ids import is_object_id
from mpfs.objects.progress import Progress
from mpfs.store import Ref, ReflogEntry, Store, StoreInfo
from mpfs.store.store import DEFAULT_BLOCK_SIZE, DEFAULT_MAP_SIZE
from mpfs.vfs.contents import Contents

if TYPE_CHECKING:
    from mpfs.history import Diff
    from mpfs.history.storage import StorageReport
    from mpfs.merge.analyze import AnalysisReport
    from mpfs.merge.naming import ModelFinder
    from mpfs.store import FsckReport, GcResult, HealReport, RepairReport, Writer
    from mpfs.store.pairs import PairRecord

PolicyName: TypeAlias = Literal["energy", "layerwise", "uniform", "random"]
MismatchPolicy: TypeAlias = Literal["error", "crop", "base"]

REPOSITORY_NAME = ".mpfs"
"""What a repository's directory is called by default."""


class Repository(Contents, Imports, Explains, Sweeps, AbstractContextManager["Repository"]):
    """An open repository. Close it, or use it in a `with` block; it may be used from several threads.

    How to read a revision's files and tensors, check it out and mount it is in `Contents`, how to import in `Imports`,
    how to explain in `Explains`, how to sweep in `Sweeps`.
    """

    def __init__(self, store: Store, author: str | None = None) -> None:
        self._store = store
        self._author = author or _login_name()

    # -- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        map_size: int = DEFAULT_MAP_SIZE,
        allow_network_file_system: bool = False,
        author: str | None = None,
    ) -> Repository:
        """Make a repository.

        Args:
            path: its directory; must not exist, or be empty.
            block_size: bytes of a block, a power of two between 4 KiB and 64 MiB; fixed for good.
            map_size: bytes of address space for the store (sparse; the most that it can grow to).
            allow_network_file_system: do not refuse a network file system, where LMDB can lose data.
            author: who commits are by; default: the login name.

        Raises:
            UsageError: the path is taken, or the block size is not possible.
        """
        store = Store.create(
            Path(path),
            block_size=block_size,
            map_size=map_size,
            allow_network_file_system=allow_network_file_system,
        )
        return cls(store, author)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, author: str | None = None) -> Repository:
        """Open a repository: its directory, or the directory that holds a `.mpfs`.

        Raises:
            NotARepositoryError: there is none.
        """
        directory = Path(path)
        inner = directory / REPOSITORY_NAME
        if not (directory / "config.json").exists() and inner.is_dir():
            directory = inner
        return cls(Store.open(directory), author)

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(Repository.open, author=self._author), (self.path,))

    def close(self) -> None:
        """Close it."""
        self._store.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The repository's directory."""
        return self._store.path

    @property
    def info(self) -> StoreInfo:
        """Format version, block size (bytes), hash and uuid."""
        return self._store.info

    # -- merging ------------------------------------------------------------------------------------------------

    def plan(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any],
        *,
        budget: Budget | None = None,
        policy: PolicyName = "energy",
        seed: int = 0,
        on_mismatch: MismatchPolicy = "error",
        save: bool = True,
    ) -> PlanReport:
        """Compile a recipe: decide what a merge will read, compute and keep, without running it.

        Args:
            recipe: a YAML file in mergekit's grammar, or the same as a mapping. Its models are refs, commit ids, paths,
                URLs or models on the hub (what is not here is imported first, to the branch `imported/NAME`), with
                `+ADAPTER` or not.
            budget: what may be read of the experts; None: everything.
            policy: how blocks are chosen under a budget.
            seed: for methods and policies that draw random numbers.
            on_mismatch: "error"; "base" to take the base's tensor where models do not fit; or "crop" to cut
                vocabularies to the words that all models have.
            save: store the plan, so that `merge` finds it by id.

        Raises:
            RecipeError: the recipe has mistakes.
            MismatchError: the models do not fit each other.
            BudgetInfeasibleError: the method must read more than the budget allows.
            NotFoundError: a model is neither a ref, a commit, a path nor on the hub.
        """
        from mpfs.merge.documents import plan_document, read_documents

        documents, folder = read_documents(recipe)
        if len(documents) > 1:
            raise RecipeError(
                f"{recipe}: it holds {len(documents)} documents, and later ones need the results of earlier ones: merge "
                "them, or plan them one by one",
                problems=[],
            )
        finder = self._finder(folder)
        with self._store.objects.remembering():
            plan = plan_document(documents[0], finder, budget or Budget(), policy, seed, on_mismatch)
        if save:
            self._store.put_plan(plan)
        return PlanReport(object_id(plan.encode()), plan, self._seconds(plan.cost))

    def find_plan(self, plan: str | os.PathLike[str]) -> PlanReport:
        """A plan by its id (or a unique beginning of it), or out of a JSON file that `PlanReport.plan` was written to.

        Raises:
            NotFoundError: there is none.
            BadInputError: the file is not a plan.
        """
        from mpfs.store.validate import validate

        text = os.fspath(plan)
        path = Path(text)
        if path.is_file():
            try:
                loaded = Plan.decode(path.read_bytes())
                validate(loaded)
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                raise BadInputError(f"{path}: not a plan: {error}", file=str(path)) from error
            return PlanReport(object_id(loaded.encode()), loaded)
        identities = [text] if is_object_id(text) else self._plans_starting_with(text)
        if len(identities) != 1:
            raise NotFoundError(f"no plan {text}" if not identities else f"{len(identities)} plans begin with {text}")
        return PlanReport(identities[0], self._store.objects.get(Plan, identities[0]))

    def merge(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any] | Plan,
        into: str,
        *,
        budget: Budget | None = None,
        policy: PolicyName = "energy",
        seed: int = 0,
        on_mismatch: MismatchPolicy = "error",
        reuse: bool = True,
        verify_fidelity: bool = False,
        allow_nonfinite: bool = False,
        check_space: bool = True,
        memory: int = DEFAULT_MEMORY,
        threads: int | None = None,
        device: str | None = None,
        message: str | None = None,
        progress: Progress | None = None,
    ) -> MergeReport:
        """Merge, and commit the result to a branch.

        Args:
            recipe: as for `plan`; or a plan, which brings budget, policy, seed and mismatch policy with it; or a YAML
                file of several documents, which are merged in order, all but the last to branches of their names.
            into: the branch; made if it does not exist.
            budget, policy, seed, on_mismatch: as for `plan`.
            reuse: take results of earlier merges from the store instead of computing them again.
            verify_fidelity: afterwards read every expert in full and measure how close to the full merge it came.
            allow_nonfinite: publish the result even if it holds NaN or infinity.
            check_space: see first whether there is room for all that will be computed, but for what earlier merges have computed.
            memory: bound of anonymous memory, in bytes.
            threads: worker threads; default: the number of CPUs.
            device: let torch compute, on "cpu", "cuda" or "cuda:1"; default: the kernels, on the CPU, where there are some.
            message: the commit's message; default: what was merged.
            progress: told bytes of output done, of all.

        Raises:
            As `plan`; and
            UsageError: torch cannot compute on this device.
            RefConflictError: `into` is a tag, or moved meanwhile; nothing is published.
            NonFiniteError: the result holds NaN or infinity; nothing is published.
            IntegrityError: an input block is damaged.
            NoSpaceError: there is no room for the result; or the disk or the map got full. Nothing is published.
        """
        from mpfs.merge.commit import check_foreign_plan, run_plan
        from mpfs.merge.documents import branches_of, committed_note, merge_documents, read_documents

        if device is not None:
            from mpfs.merge.device import check_device

            check_device(device)
        options = MergeOptions(reuse, verify_fidelity, memory, threads, progress, allow_nonfinite, check_space, device)
        if isinstance(recipe, Plan):
            with self._store.objects.remembering():
                check_foreign_plan(self._store, recipe)
                return run_plan(self._store, recipe, into, message=message, author=self._author, options=options)
        documents, folder = read_documents(recipe)
        branches = branches_of(documents, into, self._store)
        *before, report = merge_documents(
            branches,
            self._finder(folder),
            budget or Budget(),
            policy,
            seed,
            on_mismatch,
            message=message,
            options=options,
        )
        return replace(report, notes=(*map(committed_note, before), *report.notes))

    def analyze(
        self,
        experts: Sequence[str],
        base: str,
        *,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> AnalysisReport:
        """Measure exactly how experts differ from their base and from each other, block by block, for better plans.

        Args:
            experts: revisions.
            base: the revision that they were tuned from.
            threads: worker threads; default: the number of CPUs.
            progress: told bytes compared, of all.

        Raises:
            NotFoundError: one of them names nothing.
            IntegrityError: a block is damaged.
        """
        from mpfs.merge.analyze import analyze

        commits = [self.resolve(expert) for expert in experts]
        return analyze(self._store, self.resolve(base), commits, threads=threads, progress=progress)

    # -- history ------------------------------------------------------------------------------------------------

    def resolve(self, revision: str) -> ObjectId:
        """The id of the commit that a revision names: a ref, a commit id or its beginning, with `~N` for ancestors.

        Raises:
            NotFoundError: nothing is called that.
        """
        return resolve(revision, self._store.objects, self._store.refs)

    def show(self, revision: str) -> LogEntry:
        """One commit."""
        from mpfs.history.log import ref_names

        return entry(self.resolve(revision), self._store.objects, ref_names(self._store.refs))

    def snapshot(self, revision: str) -> Snapshot:
        """The snapshot of a commit."""
        return self._store.objects.get(Snapshot, self._store.objects.get(Commit, self.resolve(revision)).snapshot)

    def log(self, revision: str | None = None, *, inputs: bool = False) -> list[LogEntry]:
        """The commits that a revision came from, newest first; without one, all commits of all refs.

        Args:
            revision: where to start.
            inputs: follow what was merged as well as parents.
        """
        starts = [ref.commit for ref in self._store.refs.all()] if revision is None else [self.resolve(revision)]
        return ancestry(starts, self._store.objects, self._store.refs, inputs=inputs)

    def run_of(self, revision: str) -> Run | None:
        """The record of the run that made a commit; None if it was imported."""
        return self._store.objects.run_of(self.resolve(revision))

    def diff(self, a: str, b: str, *, exact: bool = False, progress: Progress | None = None) -> Diff:
        """What changed from revision `a` to `b`.

        Args:
            a, b: revisions.
            exact: read the blocks that differ; otherwise nothing is read, and numbers are estimates from sketches.
            progress: told tensors done, of all.
        """
        from mpfs.history.diff import diff_snapshots

        return diff_snapshots(
            self.snapshot(a),
            self.snapshot(b),
            self._store.objects,
            self._store.blocks,
            exact=exact,
            progress=progress,
        )

    # -- refs ---------------------------------------------------------------------------------------------------

    def refs(self) -> list[Ref]:
        """Every branch and tag, by name."""
        return self._store.refs.all()

    def branch(self, name: str, revision: str) -> Ref:
        """Make a branch at a revision.

        Raises:
            RefConflictError: the name is taken.
        """
        return self._new_ref(name, revision, "branch")

    def tag(self, name: str, revision: str) -> Ref:
        """Make a tag at a revision; a tag does not move.

        Raises:
            RefConflictError: the name is taken.
        """
        return self._new_ref(name, revision, "tag")

    def reset(self, name: str, revision: str) -> Ref:
        """Move a branch to a revision. Where it was stays in its reflog.

        Raises:
            RefConflictError: it is a tag.
        """
        ref = self._store.refs.get(name)
        if ref.kind != "branch":
            raise RefConflictError(f"{name} is a tag, and tags do not move; remove it and make another", ref=name)
        commit = self.resolve(revision)
        self._move(name, commit, ref.commit, ref.kind, f"reset: to {revision}")
        return Ref(name, "branch", commit)

    def remove_ref(self, name: str) -> Ref:
        """Remove a branch or tag; its commit stays until gc, and in the reflog."""
        ref = self._store.refs.get(name)
        self._move(name, None, ref.commit, ref.kind, "rm")
        return ref

    def reflog(self, name: str | None = None) -> list[ReflogEntry]:
        """Every move of a ref, or of all of them, oldest first.

        Raises:
            NotFoundError: there never was such a ref.
        """
        entries = self._store.refs.log(name)
        if name is not None and not entries:
            raise NotFoundError(f"no ref was ever called {name}", ref=name)
        return entries

    # -- upkeep -------------------------------------------------------------------------------------------------

    def stats(self, revision: str | None = None) -> StorageReport:
        """How much a revision takes, or everything that refs reach."""
        from mpfs.history.storage import measure_storage

        commits = [self.show(revision)] if revision is not None else self.log(inputs=True)
        return measure_storage(self._store, (item.commit.snapshot for item in commits), whole=revision is None)

    def fsck(
        self,
        *,
        read_data: bool = False,
        subset: float | None = None,
        since: float | None = None,
        statistics: bool | None = None,
        progress: Progress | None = None,
    ) -> FsckReport:
        """Check the repository's structure, and with `read_data` every block.

        Args:
            read_data: read blocks and compare them with their ids.
            subset: only this share of them, other ones each time.
            since: only those of commits that are not older, in seconds since 1970, UTC.
            statistics: compute the statistics of what is read again; default: whenever data is read.
            progress: told records done, of all.
        """
        from mpfs.store.fsck import check

        stats_of = _stats_of if read_data and statistics is not False else None
        return check(
            self._store,
            read_data=read_data,
            subset=subset,
            since=since,
            stats_of=stats_of,
            pairs_of=self._compared if stats_of is not None else None,
            progress=progress,
        )

    def repair(self, *, progress: Progress | None = None) -> RepairReport:
        """Check everything, make anew what can be (statistics, indices, damaged refs), and put commits that have lost
        something under `quarantine/`. What was done and what is still wrong is in the report.

        Raises:
            IntegrityError: the store's pages are damaged, so that nothing of it can be trusted.
        """
        from mpfs.store.repair import repair

        return repair(self._store, stats_of=_stats_of, pairs_of=self._compared, author=self._author, progress=progress)

    def _compared(self, a: Tensor, b: Tensor) -> PairRecord:
        from mpfs.stats.stored import compare

        return compare(self._store.blocks, a, b, "two tensors that are compared", binned=True)

    def heal(self, source: str | os.PathLike[str], *, progress: Progress | None = None) -> HealReport:
        """Take blocks and objects that are damaged or missing from a checkpoint that still has them.

        Args:
            source: what `import_checkpoint` takes.
            progress: told records checked, of all.

        Raises:
            NotFoundError: there is nothing at `source`.
            BadInputError: it is damaged, unsafe or no checkpoint.
        """
        from mpfs.ingest.importer import ingest
        from mpfs.store.repair import heal

        def read(writer: Writer) -> list[Tensor | Snapshot]:
            found = ingest(Path(source), writer, self.info.block_size)
            return [*found.tensors, found.snapshot]

        return heal(self._store, read, stats_of=_stats_of, progress=progress)

    def gc(
        self, *, dry_run: bool = False, reflog_days: float = 30.0, grace_hours: float = 0.0, compact: bool = False
    ) -> GcResult:
        """Remove what no ref and no younger reflog entry reaches.

        Args:
            dry_run: only find it.
            reflog_days: how long what refs were at is kept.
            grace_hours: how long blocks of imports that died are kept, for the next one to go on with.
            compact: give the free space back to the file system; needs room for a copy of what is kept.

        Raises:
            LockedError: somebody is writing.
            NoSpaceError: there is no room for the copy.
        """
        from mpfs.store.gc import execute_gc

        return execute_gc(
            self._store,
            now=int(clock.time()),
            reflog_days=reflog_days,
            grace_seconds=grace_hours * 3600,
            dry_run=dry_run,
            compact=compact,
        )

    def grow_map(self, map_size: int) -> int:
        """Let the store grow to at least `map_size` bytes; how far it can grow then."""
        return self._store.grow_map(map_size)

    # -- inside -------------------------------------------------------------------------------------------------

    def _new_ref(self, name: str, revision: str, kind: Literal["branch", "tag"]) -> Ref:
        commit = self.resolve(revision)
        self._move(name, commit, None, kind, f"{kind}: at {revision}")
        return Ref(name, kind, commit)

    def _move(
        self, name: str, commit: ObjectId | None, expected: ObjectId | None, kind: Literal["branch", "tag"], reason: str
    ) -> None:
        self._store.move_ref(
            name, commit, expected=expected, kind=kind, time=int(clock.time()), author=self._author, reason=reason
        )

    def _finder(self, folder: Path | None) -> ModelFinder:
        from mpfs.merge.naming import ModelFinder

        return ModelFinder(self._store, self._author, self.resolve, self._bring_in, _is_hub_model, folder)

    def _bring_in(self, source: str | Path) -> ObjectId:
        from mpfs.merge.naming import imported_ref

        return self.import_checkpoint(source, imported_ref(source)).commit

    def _plans_starting_with(self, prefix: str) -> list[ObjectId]:
        if len(prefix) < 4 or any(digit not in "0123456789abcdef" for digit in prefix):
            return []
        return self._store.objects.ids(Plan, prefix)


def open_repository(path: str | os.PathLike[str], create: bool = False, *, author: str | None = None) -> Repository:
    """Open a repository; with `create`, make it if there is none.

    Raises:
        NotARepositoryError: there is none, and `create` is False.
    """
    directory = Path(path)
    if create and not (directory / "config.json").exists() and not (directory / REPOSITORY_NAME).is_dir():
        return Repository.create(directory, author=author)
    return Repository.open(directory, author=author)


def _is_hub_model(name: str) -> bool:
    from mpfs.ingest.hub import is_hub_model

    return is_hub_model(name)


def _stats_of(data: memoryview, dtype: str, first_element: int) -> bytes:
    from mpfs.stats import block_stats

    return block_stats(data, dtype, first_element).tobytes()


def _login_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
