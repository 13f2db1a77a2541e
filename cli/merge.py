"""`mpfs merge`: run a recipe or a plan, and commit the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .explained import run_facts
from .options import (
    BudgetOption,
    DeviceOption,
    FidelityOption,
    JsonOption,
    MemoryOption,
    MessageOption,
    MismatchOption,
    NoReuseOption,
    NoSpaceCheckOption,
    OnMismatch,
    Policy,
    PolicyOption,
    SeedOption,
    ThreadsOption,
    budget_of,
    flag,
)
from .output import ID, REF, Output
from .session import Session
from .sizes import format_count, format_seconds, format_size

if TYPE_CHECKING:
    from mpfs import Repository
    from mpfs.merge.reports import MergeReport
    from mpfs.objects import Plan
    from mpfs.vfs import CheckoutResult

_PLAN_OPTIONS = {
    "budget": "--budget",
    "fidelity": "--fidelity",
    "policy": "--policy",
    "seed": "--seed",
    "on_mismatch": "--on-mismatch",
}


def merge(
    ctx: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|PLAN", help="A recipe (YAML, mergekit's grammar), a plan's JSON file, or a plan's id."
        ),
    ],
    into: Annotated[str, typer.Option("--into", metavar="BRANCH", help="The branch to commit to; made if it is new.")],
    budget: BudgetOption = None,
    fidelity: FidelityOption = None,
    policy: PolicyOption = Policy.energy,
    seed: SeedOption = 0,
    on_mismatch: MismatchOption = OnMismatch.error,
    checkout: Annotated[
        Path | None,
        typer.Option("--checkout", metavar="DIR", help="Afterwards write the result's files to this directory."),
    ] = None,
    force: Annotated[bool, flag("--force", help="Let --checkout replace a directory that is not empty.")] = False,
    no_reuse: NoReuseOption = False,
    verify_fidelity: Annotated[
        bool,
        flag(
            "--verify-fidelity",
            help="Afterwards read all experts and measure how close the result came to the full merge.",
        ),
    ] = False,
    allow_nonfinite: Annotated[
        bool, flag("--allow-nonfinite", help="Commit the result even if it holds NaN or infinity.")
    ] = False,
    no_space_check: NoSpaceCheckOption = False,
    memory: MemoryOption = 1 << 30,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    message: MessageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Merge models, and commit the result to a branch.

    Without a budget everything is read, and the result is mergekit's, bit for bit. With one, the blocks that carry
    most of the change are chosen before anything is read, and the budget is never exceeded.

        mpfs merge recipe.yml --into merged
        mpfs merge recipe.yml --into merged --budget 20% --verify-fidelity
        mpfs merge plan.json --into merged

    Coming from mergekit: your file works as it is, and models may still be paths. For 'mergekit-yaml recipe.yml out/':

        mpfs init
        mpfs merge recipe.yml --into merged --checkout out/
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        if checkout is not None:
            repository.check_checkout_target(checkout, force=force)
        what = _plan_or_recipe(ctx, repository, recipe)
        with out.progress(f"merge into {into}", "bytes") as progress:
            report = repository.merge(
                what,
                into,
                budget=budget_of(budget, fidelity),
                policy=policy.value,
                seed=seed,
                on_mismatch=on_mismatch.value,
                reuse=not no_reuse,
                verify_fidelity=verify_fidelity,
                allow_nonfinite=allow_nonfinite,
                check_space=not no_space_check,
                memory=memory,
                threads=threads,
                device=device,
                message=message,
                progress=progress,
            )
        written = None if checkout is None else _check_out(repository, report, checkout, force, out)
    for note in report.notes:
        out.note(note)
    if as_json:
        document = report.as_json()
        if written is not None:
            document["checkout"] = written.as_json()
        out.document(document)
    elif session.quiet:
        out.line(report.commit)
    else:
        _summary(out, report, written)


def _plan_or_recipe(ctx: typer.Context, repository: Repository, text: str) -> str | Plan:
    """The plan that `text` names, or `text` itself if it is a recipe's path.

    Raises:
        NotFoundError: it is neither.
        UsageError: it is a plan, and options are given that a plan has fixed.
    """
    from mpfs.errors import NotFoundError, UsageError

    path = Path(text)
    if path.exists() and not _is_plan_file(path):
        return text
    try:
        plan = repository.find_plan(text).plan
    except NotFoundError as error:
        if "plans begin with" in error.message:
            raise
        raise NotFoundError(f"{text}: no such recipe or plan file, and no plan has this id", recipe=text) from error
    given = [option for name, option in _PLAN_OPTIONS.items() if _is_given(ctx, name)]
    if given:
        raise UsageError(f"{', '.join(given)}: a plan has fixed this already; make another with 'mpfs plan'")
    return plan


def _is_plan_file(path: Path) -> bool:
    """Whether a file is a plan and no recipe: JSON of that kind, or something else that is called .json."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if not file.read(64).lstrip().startswith(b"{"):
            return path.suffix == ".json"
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return path.suffix == ".json"
    return isinstance(value, dict) and "merge_method" not in value


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_out(
    repository: Repository, report: MergeReport, directory: Path, force: bool, out: Output
) -> CheckoutResult:
    """Write the result's files; if that fails, say that the merge itself is safe."""
    from mpfs.errors import MPFSError

    try:
        with out.progress("check out", "bytes") as progress:
            return repository.checkout(report.commit, directory, force=force, progress=progress)
    except MPFSError as error:
        done = f"the merge itself is committed to {report.ref} as {report.commit[:12]}"
        details = {**error.details, "commit": report.commit, "ref": report.ref}
        raise type(error)(f"{error.message} ({done})", **details) from error


def _summary(out: Output, report: MergeReport, written: CheckoutResult | None) -> None:
    what = "" if report.new_commit else "  (nothing new: the branch holds just this already)"
    out.line((report.ref, REF), "  ", (report.commit[:12], ID), what)
    facts = run_facts(report.figures, report.fidelity_predicted)
    facts.insert(-1, ("plan", report.plan[:12]))
    if written is not None:
        files = format_count(len(written.files), "file")
        facts.append(
            (
                "checked out",
                f"{written.target}: {files}, {format_size(written.bytes)}, {format_seconds(written.seconds)}",
            )
        )
    out.facts(facts)
