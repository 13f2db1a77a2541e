"""`mpfs sweep`: merge one recipe with many settings, each result on a branch of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    BudgetOption,
    DeviceOption,
    FidelityOption,
    JsonOption,
    MemoryOption,
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
from .output import BAD, Column, Output
from .session import Session
from .sizes import format_count, format_seconds, format_size, parse_amount, parse_share

if TYPE_CHECKING:
    from mpfs.merge.sweep.report import SweepReport


def sweep(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file in mergekit's grammar.")],
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="PATH=VALUE,…",
            help="A key of the recipe and the values that it takes. Given several times: every combination.",
        ),
    ],
    into: Annotated[
        str,
        typer.Option(
            "--into",
            metavar="PREFIX",
            help="What the branches begin with, as in PREFIX/density=0.3; or a template, such as 'ties/d{density}'.",
        ),
    ],
    budget: BudgetOption = None,
    fidelity: FidelityOption = None,
    policy: PolicyOption = Policy.energy,
    seed: SeedOption = 0,
    on_mismatch: MismatchOption = OnMismatch.error,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="The most variants that are meant.")] = 64,
    dry_run: Annotated[bool, flag("--dry-run", help="Plan and show the variants; merge nothing.")] = False,
    no_reuse: NoReuseOption = False,
    verify_fidelity: Annotated[
        bool,
        flag(
            "--verify-fidelity",
            help="Afterwards read all experts for each variant and measure how close it came to its full merge.",
        ),
    ] = False,
    allow_nonfinite: Annotated[
        bool, flag("--allow-nonfinite", help="Commit results even if they hold NaN or infinity.")
    ] = False,
    no_space_check: NoSpaceCheckOption = False,
    memory: MemoryOption = 1 << 30,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", metavar="TEXT", help="The commits' message; their settings come before it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Merge a recipe with many settings, each to its own branch.

    All combinations are planned together: a budget holds for all of them, and what several of them read is read once.
    Each result is committed by itself. PATH is a key path: parameters.density, models.0.parameters.weight,
    models.NAME.parameters.weight, 'models.*.parameters.density'; or budget, fidelity, policy or seed, of each variant.

        mpfs sweep recipe.yml --set parameters.density=0.3,0.5,0.7 --into ties --budget 20%
        mpfs sweep recipe.yml --set merge_method=ties,dare_ties --set parameters.density=0.3,0.5 --into try --dry-run
        mpfs sweep recipe.yml --set budget=5%,10%,20% --into cheap
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    chosen = _settings(settings)
    with session.open() as repository, out.progress(f"sweep into {into}", "bytes") as progress:
        report = repository.sweep(
            recipe,
            chosen,
            into,
            budget=budget_of(budget, fidelity),
            policy=policy.value,
            seed=seed,
            on_mismatch=on_mismatch.value,
            limit=limit,
            dry_run=dry_run,
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
    for note in report.notes:
        out.note(note)
    for variant in report.failed:
        out.note(f"{variant.ref} was not committed: {variant.error}")
    if as_json:
        out.document(report.as_json())
    elif session.quiet:
        for variant in report.variants:
            if variant.error is None:
                out.line(variant.plan.identity if variant.merge is None else variant.merge.commit)
    else:
        _summary(out, report)
    if report.failed:
        raise typer.Exit(getattr(report.failed[0].error, "exit_code", 1))


def _settings(texts: list[str]) -> dict[str, tuple[Any, ...]]:
    """The values that --set gives, by key path.

    Raises:
        UsageError: one of them is no setting, or a path is there twice.
    """
    from mpfs import Budget
    from mpfs.errors import UsageError
    from mpfs.merge.sweep.settings import parse_setting

    chosen: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        path, _, values = text.partition("=")
        path = path.strip()
        try:
            if path == "budget":
                amounts = [parse_amount(item) for item in values.split(",")]
                found: tuple[Any, ...] = tuple(Budget(amount.kind, amount.value) for amount in amounts)
            elif path == "fidelity":
                found = tuple(parse_share(item) for item in values.split(","))
            else:
                setting = parse_setting(text)
                path, found = setting.path, setting.values
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        if path in chosen:
            raise UsageError(f"{path} is set twice: give all its values at once")
        chosen[path] = found
    return chosen


def _summary(out: Output, report: SweepReport) -> None:
    rows = []
    for variant in report.variants:
        plan = variant.plan.plan
        planned = plan.cost.expert_bytes_planned
        shared = f"{variant.shared_bytes / planned:.0%}" if planned else ""
        done = variant.plan.identity[:12]
        if variant.error is not None:
            done = "failed"
        elif variant.merge is not None:
            done = variant.merge.commit[:12]
        fidelity = f"{plan.fidelity_predicted:.4f}"
        if variant.merge is not None and variant.merge.figures.fidelity is not None:
            fidelity += f" ({variant.merge.figures.fidelity:.4f})"
        rows.append([variant.ref, format_size(planned), shared, fidelity, done])
    titles = [Column("branch"), Column("reads", "right"), Column("shared", "right"), Column("fidelity", "right")]
    out.table([*titles, Column("plan" if report.figures is None else "commit")], rows, name=0)
    out.line()
    nbytes = report.expert_bytes
    share = f" ({nbytes.planned / nbytes.full:.1%})" if nbytes.full else ""
    facts = [
        ("variants", f"{len(report.variants):,}"),
        (
            "expert reads",
            f"{format_size(nbytes.planned)} of {format_size(nbytes.full)}{share}; one by one {format_size(nbytes.apart)}",
        ),
    ]
    figures = report.figures
    if figures is not None:
        facts += [
            ("expert bytes read", format_size(figures.expert_bytes_read)),
            ("base bytes read", format_size(figures.base_bytes_read)),
            ("bytes written", format_size(figures.bytes_written)),
            (
                "blocks",
                f"{figures.blocks_computed:,} computed, {figures.blocks_reused:,} reused, "
                f"{figures.blocks_kept:,} kept from the base",
            ),
            ("time", format_seconds(figures.seconds)),
        ]
    out.facts(facts)
    if report.failed:
        out.line((f"{format_count(len(report.failed), 'variant')} failed", BAD))
