"""What the verbs on refs share: how a ref is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import ID, REF, Output

if TYPE_CHECKING:
    from mpfs import Repository
    from mpfs.store import Ref


def ref_json(ref: Ref) -> dict[str, str]:
    """The JSON form of a ref."""
    return {"ref": ref.name, "kind": ref.kind, "commit": ref.commit}


def show_ref(out: Output, ref: Ref) -> None:
    """A ref that was just made, moved or removed."""
    if out.as_json:
        out.document(ref_json(ref))
    elif out.quiet:
        out.line(ref.commit)
    else:
        out.line((ref.name, REF), "  ", (ref.commit[:12], ID))


def list_refs(out: Output, repository: Repository, kind: str) -> None:
    """All refs of one kind, with the first lines of their commits' messages."""
    refs = [ref for ref in repository.refs() if ref.kind == kind]
    if out.as_json:
        out.document([ref_json(ref) for ref in refs])
        return
    width = max((len(ref.name) for ref in refs), default=0)
    for ref in refs:
        message = repository.show(ref.commit).commit.message.strip().split("\n")[0]
        out.line((ref.name.ljust(width), REF), "  ", (ref.commit[:12], ID), "  ", message)
