"""What the verbs on refs share: how a ref is shown, and how branches and tags are listed and made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import typer

from .output import ID, REF, Output
from .session import Session

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


def list_or_make(
    ctx: typer.Context, kind: Literal["branch", "tag"], name: str | None, revision: str | None, as_json: bool
) -> None:
    """Make a ref at a revision; without a name, list all of its kind."""
    from mpfs.errors import UsageError

    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        if name is None:
            _list_refs(out, repository, kind)
        elif revision is None:
            raise UsageError(f"{kind} {name}: at what? 'mpfs {kind} {name} COMMIT' makes it at a ref or commit")
        else:
            make = repository.branch if kind == "branch" else repository.tag
            show_ref(out, make(name, revision))


def _list_refs(out: Output, repository: Repository, kind: str) -> None:
    """All refs of one kind, with the first lines of their commits' messages."""
    refs = [ref for ref in repository.refs() if ref.kind == kind]
    if out.as_json:
        out.document([ref_json(ref) for ref in refs])
        return
    width = max((len(ref.name) for ref in refs), default=0)
    for ref in refs:
        message = repository.show(ref.commit).commit.message.strip().split("\n")[0]
        out.line((ref.name.ljust(width), REF), "  ", (ref.commit[:12], ID), "  ", message)
