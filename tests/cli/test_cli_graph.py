"""The text graph of a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpfs_cli.graph import ASCII, Node, draw

P, I = True, False  # noqa: E741  # parent, input


def drawing(*nodes: tuple[str, dict[str, bool]]) -> list[str]:
    """The graph, with each node's name behind its row."""
    lines = []
    rows = draw([Node(name, tuple(origins.items())) for name, origins in nodes], ASCII)
    for (name, origins), (head, turns, below) in zip(nodes, rows, strict=True):
        lines.append(f"{head.rstrip()} {name}")
        lines += [turn.rstrip() for turn in turns] or ([below.rstrip()] if origins else [])
    return lines


def test_a_line_of_descent() -> None:
    assert drawing(("c", {"b": P}), ("b", {"a": P}), ("a", {})) == ["* c", "|", "* b", "|", "* a"]


def test_roots_that_have_nothing_to_do_with_each_other() -> None:
    assert drawing(("b", {}), ("a", {})) == ["* b", "* a"]


def test_a_merge_of_two_experts_into_their_base() -> None:
    assert drawing(
        ("merged", {"base": I, "x": I, "y": I}),
        ("y", {"base": I}),
        ("x", {"base": I}),
        ("base", {}),
    ) == [
        "* merged",
        "|-.-.",
        ": : * y",
        "|-+-'",
        ": * x",
        "|-'",
        "* base",
    ]


def test_a_second_merge_into_the_same_branch() -> None:
    assert drawing(
        ("m2", {"m1": P, "x": I}),
        ("m1", {"x": I}),
        ("x", {}),
    ) == [
        "* m2",
        "|-.",
        "* : m1",
        "`-|",
        "  * x",
    ]


def test_a_freed_lane_is_used_again() -> None:
    assert drawing(
        ("t", {"a": P, "b": P}),
        ("b", {}),
        ("u", {"a": P}),
        ("a", {}),
    ) == ["* t", "|-.", "| * b", "| * u", "|-'", "* a"]


@pytest.mark.parametrize("solid", [True, False])
def test_what_is_a_parent_of_anyone_is_drawn_solid(solid: bool) -> None:
    lines = drawing(("m2", {"x": I}), ("m1", {"x": solid}), ("x", {}))
    assert lines == ["* m2", ":", f"{':'} * m1", "|-'", "* x"]


@st.composite
def histories(draw_from: st.DrawFn) -> list[Node]:
    """Commits in an order in which none precedes one that came from it."""
    count = draw_from(st.integers(1, 12))
    nodes = []
    for index in range(count):
        older = draw_from(st.lists(st.integers(index + 1, count), unique=True, max_size=4))
        origins = tuple((str(item), draw_from(st.booleans())) for item in older if item < count)
        nodes.append(Node(str(index), origins))
    return nodes


@given(histories())
def test_every_line_leads_from_a_commit_to_what_it_came_from(nodes: list[Node]) -> None:
    """Reads the drawing: cells hold lines, and following them from each node must find its origins, and only those."""
    column: dict[str, int] = {}
    reached: dict[str, set[str]] = {node.identity: set() for node in nodes}
    carried: dict[int, set[str]] = {}  # column -> commits that a line in it comes from
    for node, (head, turns, _) in zip(nodes, draw(nodes, ASCII), strict=True):
        at = head.index("*") // 2
        assert head.count("*") == 1
        column[node.identity] = at
        for source in carried.pop(at, set()):
            reached[source].add(node.identity)
        assert {index for index in range(len(head) // 2 + 1) if head[2 * index : 2 * index + 1] in ("|", ":")} == set(
            carried
        )
        if node.origins:
            carried[at] = {node.identity}
        for turn in turns:
            assert len(turn) == len(head)
            touched = [index for index in range(len(turn) // 2 + 1) if turn[2 * index + 1 : 2 * index + 2] == "-"]
            first, last = min(touched), max(touched) + 1
            assert at in (first, last)
            assert turn[2 * at] in "|`'"
            for index in range(first, last + 1):
                if index != at and turn[2 * index] in "|.":
                    carried.setdefault(index, set()).add(node.identity)
            if turn[2 * at] in "`'":
                carried[at].discard(node.identity)
                if not carried[at]:
                    del carried[at]
    assert {key: found - {key} for key, found in reached.items()} == {
        node.identity: {origin for origin, _ in node.origins} for node in nodes
    }
