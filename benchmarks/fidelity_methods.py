"""How close the predicted fidelity comes for each method: predicted and measured, with exact figures of deltas.

What is left is the method's own: that it does something else than to add up weighted deltas. The methods that
`fidelity` has, and those that a budget cannot be given to, are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.families import BASE, Family, chgnet, synthetic, torchani
from benchmarks.measure import machine
from mpfs.objects import Budget
from mpfs.repository import Repository
from mpfs.testing.synthetic import Architecture

BUDGETS = (5.0, 20.0, 50.0)
BLOCK_SIZE = 4096
DENSITY = 0.5
SMALL = Architecture(64, 6, 4, 2, 16, 192, 1000)

SPARSE = frozenset({"breadcrumbs", "breadcrumbs_ties", "della", "della_linear"})
UNWEIGHTED = frozenset({"model_stock", "nearswap", "arcee_fusion"})
METHODS: dict[str, tuple[int, int]] = {
    "breadcrumbs": (1, 9),
    "breadcrumbs_ties": (1, 9),
    "della": (1, 9),
    "della_linear": (1, 9),
    "sce": (1, 9),
    "ram": (1, 9),
    "multislerp": (1, 9),
    "nuslerp": (2, 2),
    "model_stock": (2, 9),
    "nearswap": (1, 1),
    "arcee_fusion": (1, 1),
}
"""How few and how many models each takes besides the base."""

SHARED: dict[str, dict[str, float]] = {"nearswap": {"t": 0.001}}


def main(arguments: list[str]) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks fidelity_methods", description=__doc__)
    parser.add_argument("--method", action="append", choices=METHODS, help="only this one; may be given several times")
    options = parser.parse_args(arguments)
    print(f"{machine()}; blocks of {BLOCK_SIZE // 1024} KiB\n\nFidelity predicted → measured, with exact figures\n")
    print(f"| family | method | {' | '.join(f'{budget:g}%' for budget in BUDGETS)} | largest error |")
    print(f"|---|---|{'---:|' * (len(BUDGETS) + 1)}")
    for make in (_small, torchani, chgnet):
        with (
            tempfile.TemporaryDirectory(prefix="mpfs-fidelity-") as scratch,
            Repository.create(Path(scratch) / "repository", block_size=BLOCK_SIZE) as repository,
        ):
            family = make(repository, Path(scratch))
            repository.analyze([name for name, _ in family.experts], BASE)
            for method in options.method or METHODS:
                if len(family.experts) >= METHODS[method][0]:
                    print(_row(repository, family, method), flush=True)


def _small(repository: Repository, scratch: Path) -> Family:
    return synthetic(repository, scratch, SMALL, 3)


def _row(repository: Repository, family: Family, method: str) -> str:
    models = []
    for name, weight in family.experts[: METHODS[method][1]]:
        parameters = {} if method in UNWEIGHTED else {"weight": weight}
        models.append({"model": name, "parameters": parameters | ({"density": DENSITY} if method in SPARSE else {})})
    recipe = {
        "merge_method": method,
        "base_model": BASE,
        "models": models,
        "parameters": SHARED.get(method, {}),
    }
    cells, errors = [], []
    for budget in BUDGETS:
        report = repository.merge(recipe, "merged", budget=Budget("percent", budget), reuse=False, verify_fidelity=True)
        measured = report.figures.fidelity
        assert measured is not None
        cells.append(f"{report.fidelity_predicted:.3f} → {measured:.3f}")
        errors.append(report.fidelity_predicted - measured)
    return f"| {family.name} | {method} | {' | '.join(cells)} | {max(errors, key=abs):+.3f} |"


if __name__ == "__main__":
    main(sys.argv[1:])
