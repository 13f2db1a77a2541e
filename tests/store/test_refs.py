"""Refs: names, kinds, compare-and-set, nesting, and the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import NOW, data, publish, remove

from mpfs.errors import IntegrityError, NotFoundError, RefConflictError, UsageError
from mpfs.store import Store, check_ref_name
from mpfs.store.refs import RefKind, decode_ref, decode_reflog_entry, set_ref
from mpfs.store.seal import seal

pytest_plugins = ["store_fixtures"]


def move(store: Store, name: str, commit: str | None, expected: str | None, kind: RefKind = "branch") -> None:
    store.move_ref(name, commit, expected=expected, kind=kind, time=NOW, author="t", reason="test")


@pytest.mark.parametrize("name", ["main", "a/b/c", "v1.0", "_x", "A-b_c.d", "sweep/t=0.3,k=-1", "x" * 200, "0" * 63])
def test_good_names(name: str) -> None:
    assert check_ref_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "-a",
        "=a",
        "a/,b",
        ".a",
        "a/.b",
        "a..b",
        "a.",
        "a b",
        "a:b",
        "a\n",
        "é",
        "a\0b",
        "x" * 201,
        "0" * 64,
    ],
)
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError):
        check_ref_name(name)


@given(st.text(max_size=300))
def test_a_name_that_is_accepted_is_a_plain_path(name: str) -> None:
    try:
        check_ref_name(name)
    except UsageError:
        return
    assert name.isascii()
    assert len(name.encode()) <= 200
    assert all(part not in ("", ".", "..") for part in name.split("/"))


def test_compare_and_set(store: Store) -> None:
    one = publish(store, {"w": data(1)})
    two = publish(store, {"w": data(2)}, ref="two")
    for commit, expected in ((two, None), (two, two), (None, two), (None, None)):
        with pytest.raises(RefConflictError) as caught:
            move(store, "main", commit, expected)
        assert caught.value.details["found"] == one
    with pytest.raises(RefConflictError):
        move(store, "new", one, two)
    move(store, "main", two, one)
    assert store.refs.get("main").commit == two
    move(store, "main", None, two)
    assert store.refs.find("main") is None
    with pytest.raises(NotFoundError):
        store.refs.get("main")
    with pytest.raises(NotFoundError):
        move(store, "main", None, None)


def test_a_ref_only_points_to_a_commit_that_is_there(store: Store) -> None:
    for commit in ("1" * 64, "main", ""):
        with pytest.raises(NotFoundError):
            move(store, "main", commit, None)
    assert store.refs.all() == []
    assert store.refs.log() == []


def test_kinds_do_not_mix(store: Store) -> None:
    one = publish(store, {"w": data(1)})
    move(store, "v1", one, None, "tag")
    assert store.refs.get("v1").kind == "tag"
    with pytest.raises(RefConflictError, match="is a tag"):
        move(store, "v1", one, one, "branch")
    with pytest.raises(RefConflictError, match="is a branch"):
        move(store, "main", None, one, "tag")


def test_refs_do_not_nest(store: Store) -> None:
    one = publish(store, {"w": data(1)}, ref="a/b")
    for name in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(RefConflictError, match="there is a ref a/b"):
            move(store, name, one, None)
    for name in ("a/bc", "a/c", "ab", "a-b", "a.b"):
        move(store, name, one, None)
    assert [ref.name for ref in store.refs.all()] == sorted(["a/b", "a/bc", "a/c", "ab", "a-b", "a.b"])


def test_every_move_is_logged_in_order(store: Store) -> None:
    one = publish(store, {"w": data(1)})
    two = publish(store, {"w": data(2)}, expected=one)
    publish(store, {"w": data(1)}, ref="main2")  # whose name starts alike
    remove(store, "main")
    move(store, "main", one, None)
    log = store.refs.log("main")
    assert [(entry.sequence, entry.old, entry.new) for entry in log] == [
        (0, None, one),
        (1, one, two),
        (2, two, None),
        (3, None, one),
    ]
    assert log[2].reason == "rm"
    assert log[2].time == NOW
    assert len(store.refs.log()) == 5
    with pytest.raises(RefConflictError):
        move(store, "main", one, two)
    assert len(store.refs.log()) == 5


def test_the_log_keeps_its_order_past_256_moves(store: Store) -> None:
    one = publish(store, {"w": data(1)})
    with store.environment.write() as txn:
        for _ in range(300):
            set_ref(txn, "main", one, expected=one, kind="branch", time=NOW, author="t", reason="again")
    assert [entry.sequence for entry in store.refs.log("main")] == list(range(301))


@pytest.mark.parametrize("value", [b"", b"b", b"x" + bytes(32), b"b" + bytes(33)])
def test_a_damaged_ref_is_an_integrity_error(value: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_ref(b"main", seal(b"main", value))
    with pytest.raises(IntegrityError, match="damaged"):
        decode_ref(b"main", value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"main", b"{}"),
        (b"main\0" + bytes(8), b"{}"),
        (b"main\0" + bytes(8), b"\xff"),
        (b"main\0" + bytes(7), b'{"kind":"reflog","old":null,"new":null,"time":0,"author":"","reason":""}'),
        (b"main\0" + bytes(8), b'{"kind":"reflog","old":"x","new":null,"time":0,"author":"","reason":""}'),
        (b"main\0" + bytes(8), b'{"kind":"reflog","old":null,"new":null,"time":"","author":"","reason":""}'),
        (b"\xff\0" + bytes(8), b'{"kind":"reflog","old":null,"new":null,"time":0,"author":"","reason":""}'),
    ],
)
def test_a_damaged_log_entry_is_an_integrity_error(key: bytes, value: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_reflog_entry(key, seal(key, value))
    with pytest.raises(IntegrityError, match="checksum"):
        decode_reflog_entry(key, value)
