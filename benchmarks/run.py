"""`make bench`: run one benchmark by name, or all of them."""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script (so that `make bench` needs no installation of this directory): its parent is the import root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import (  # after the path is set
    accuracy,
    fidelity,
    fidelity_methods,
    fidelity_scale,
    large,
    peers,
    sweeps,
    thresholds,
    throughput,
)

BENCHMARKS = {
    "throughput": throughput.main,
    "peers": peers.main,
    "fidelity": fidelity.main,
    "fidelity_methods": fidelity_methods.main,
    "fidelity_scale": fidelity_scale.main,
    "thresholds": thresholds.main,
    "sweeps": sweeps.main,
    "large": large.main,
    "accuracy": accuracy.main,
}
"""Each takes its own arguments; `peers` needs an environment with mergekit, `accuracy` scikit-learn and `large` 30 GB of disk, so that
these run by name only."""

BY_NAME_ONLY = {"peers", "accuracy", "large"}


def main(arguments: list[str]) -> int:
    """Run what was named first among the arguments; the rest goes to it."""
    names = [name for name in BENCHMARKS if name not in BY_NAME_ONLY]
    if arguments and arguments[0] in BENCHMARKS:
        names, arguments = [arguments[0]], arguments[1:]
    elif arguments and not arguments[0].startswith("-"):
        print(f"no benchmark is called {arguments[0]}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"# {name}", flush=True)
        BENCHMARKS[name](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
