"""A process that checks repositories in whose data.mdb one bit is flipped: it may die, and its parent sees that.

It reads lines `OFFSET BIT`, flips that bit in its copy, runs what a user would, flips it back, and writes one line of
JSON: the outcome, as `fsck` and the reads report it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "format"))
import decoder

from mpfs.errors import MPFSError
from mpfs.repository import Repository


def contents(path: Path) -> dict[str, object]:
    """Everything that a user can see, read by the independent decoder."""
    found = decoder.Repository(path)
    files = {
        ref: [kind, commit, [[name, hashlib.sha256(data).hexdigest()] for name, data in found.files(commit)]]
        for ref, (kind, commit) in found.refs.items()
    }
    # When the last collection was is for whoever is curious: nothing reads it, and nothing is lost with it. With the states of
    # pairs only plans that were remembered are forgotten.
    lost = ("last_gc", "pairs_distances", "pairs_histograms")
    meta = {key: value for key, value in found.meta.items() if key not in lost}
    return {"files": files, "reflog": found.reflog, "commits": found.objects["commits"], "meta": meta}


def examine(path: Path) -> dict[str, object]:
    """Check first, and look only if the check finds nothing: the order that the documentation asks for."""
    try:
        with Repository.open(path) as repository:
            report = repository.fsck(read_data=True)
            if not report.ok:
                return {"outcome": "reported", "kinds": sorted({problem.kind for problem in report.problems})}
        return {"outcome": "clean", "contents": contents(path)}
    except MPFSError as error:
        return {"outcome": "refused", "kinds": [error.kind]}


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def main() -> None:
    """Serve."""
    path = Path(sys.argv[1])
    data = path / json.loads((path / "config.json").read_text())["store"] / "data.mdb"
    original = data.read_bytes()
    for line in sys.stdin:
        offset, bit = map(int, line.split())
        if offset >= 0:
            flip(data, offset, bit)
        found = examine(path)
        print(json.dumps(found), flush=True)
        if data.read_bytes() != original:
            data.write_bytes(original)


if __name__ == "__main__":
    main()
