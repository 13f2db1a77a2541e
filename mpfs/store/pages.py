"""The pages of data.mdb, read without LMDB: whether its trees can be trusted.

LMDB keeps no checksums and follows page numbers and offsets as it finds them: a damaged page can end the process with
SIGSEGV or SIGBUS, or show an older state. So this is looked at first: a little at every open (`check_metas`), and all
of it by fsck (`verify`), with plain reads and a bounds check for every number. LMDB 0.9's format, 64-bit little-endian.

    meta page (0 and 1)  header, magic, version, address, map size, two trees (free list, main), last page, transaction
    tree                 pad, flags, depth, branch, leaf and overflow pages, entries, root
    page                 number, pad, flags, lower, upper (an overflow page: how many), then u16 offsets of its nodes
    node                 lo, hi, flags, key size, key, value (branch: lo, hi and flags are the child's number)
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mpfs.deferred import numpy as np
from mpfs.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ48s48sQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG, _SUB = 1, 2
_INTEGER_KEYS = 8
_NO_PAGE = (1 << 64) - 1
_MAX_DEPTH = 32
_MAX_KEY = 511
_MAX_PROBLEMS = 100
FREE_LIST = "free list"
MAIN = "main"


@dataclass(frozen=True, slots=True)
class Tree:
    """The record of a B-tree. Counts are of pages, `root` is a page number."""

    pad: int
    flags: int
    depth: int
    branch: int
    leaf: int
    overflow: int
    entries: int
    root: int

    @classmethod
    def unpack(cls, data: bytes) -> Tree:
        """Read a record of 48 bytes."""
        return cls(*_TREE.unpack(data))


@dataclass(frozen=True, slots=True)
class Meta:
    """A meta page: the state after one transaction. `last_page` is the greatest page number that was ever used."""

    page_size: int
    free_list: Tree
    main: Tree
    last_page: int
    transaction: int


@dataclass(frozen=True, slots=True)
class PageProblem:
    """A page that is not what it should be, and the tree that it belongs to."""

    page: int
    tree: str
    detail: str


class _BadPageError(Exception):
    """A page cannot be read as what it should be."""


def check_metas(path: Path) -> Meta:
    """Whether LMDB can open the file at `path` and will choose its newest state; that state.

    Raises:
        IntegrityError: the file is damaged.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(100):
            metas = [_read_meta(fd, number, path) for number in (0, 1)]
            newest = max(metas, key=lambda meta: meta.transaction)
            if abs(metas[0].transaction - metas[1].transaction) == 1 or newest.transaction == 0:
                break  # else a writer may have been at work between the two reads
        else:
            found = " and ".join(str(meta.transaction) for meta in metas)
            raise _damaged(path, f"its two meta pages say that they are of transactions {found}")
        reader = _Reader(fd, newest)
        problems = [problem for problem in _check_roots(reader) if problem]
    finally:
        os.close(fd)
    # A writer may have replaced the roots meanwhile; what it has published is whole.
    if problems and _transactions(path) == sorted(meta.transaction for meta in metas):
        raise _damaged(path, problems[0])
    return newest


def verify(path: Path, transaction: int | None = None) -> list[PageProblem]:
    """Walk all trees of the file at `path`: what is wrong with its pages (at most 100 problems).

    Every page must lie in the file, be what the page above says, hold nodes that fill it exactly, with keys in order
    and within the bounds that the pages above give; trees must have as many pages and entries as their records say; no
    page may be in use twice, or in use and free.

    Args:
        path: data.mdb.
        transaction: the state to look at, which a reader pins; by default the newest, which no writer may replace.

    Raises:
        IntegrityError: a meta page is damaged.
        OSError: the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if transaction is None:
            meta = max((_read_meta(fd, number, path) for number in (0, 1)), key=lambda item: item.transaction)
        else:
            meta = _read_meta(fd, transaction & 1, path)
            if meta.transaction != transaction:
                raise _damaged(path, f"its meta pages do not have transaction {transaction}, which a reader sees")
        return _Walk(_Reader(fd, meta)).run()
    finally:
        os.close(fd)


def _damaged(path: Path, detail: str) -> IntegrityError:
    return IntegrityError(f"{path}: the store is damaged: {detail}", file=str(path))


def _transactions(path: Path) -> list[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return sorted(_read_meta(fd, number, path).transaction for number in (0, 1))
    finally:
        os.close(fd)


def _read_meta(fd: int, number: int, path: Path) -> Meta:
    # The page size is in the meta pages themselves; page 1 lies one page further on.
    first = os.pread(fd, _PAGE.size + _META.size, 0)
    if len(first) < _PAGE.size + _META.size:
        raise _damaged(path, "it is cut short in its meta pages")
    page_size = Tree.unpack(_META.unpack_from(first, _PAGE.size)[4]).pad
    if page_size & (page_size - 1) or not 512 <= page_size <= 65536:
        raise _damaged(path, f"a meta page says that pages have {page_size:,} bytes")
    data = first if number == 0 else os.pread(fd, _PAGE.size + _META.size, page_size)
    if len(data) < _PAGE.size + _META.size:
        raise _damaged(path, "it is cut short in its meta pages")
    page, _, flags, _, _ = _PAGE.unpack_from(data)
    magic, version, _, _, free_list, main, last_page, transaction = _META.unpack_from(data, _PAGE.size)
    meta = Meta(page_size, Tree.unpack(free_list), Tree.unpack(main), last_page, transaction)
    if (page, flags, magic, version) != (number, _META_PAGE, _MAGIC, _VERSION):
        raise _damaged(path, f"meta page {number} is not one")
    if (meta.free_list.pad, meta.free_list.flags, meta.main.flags) != (page_size, _INTEGER_KEYS, 0):
        raise _damaged(path, f"meta page {number} has flags that this store does not use")
    if transaction & 1 != number and transaction:
        raise _damaged(path, f"meta page {number} says that it is of transaction {transaction}")
    return meta


def _check_roots(reader: _Reader) -> Iterator[str | None]:
    """What LMDB reads in order to open the databases: the main tree, and where its records say that roots are."""
    try:
        for record in (reader.meta.free_list, reader.meta.main):
            if record.root != _NO_PAGE:
                reader.page(record.root)
        walk = _Walk(reader)
        walk.tree(MAIN, reader.meta.main)
        yield from (problem.detail for problem in walk.problems)
        for name, tree in walk.databases.items():
            if name == "meta":  # which is read before anybody can ask for a check
                walk.tree(name, tree)
                yield from (problem.detail for problem in walk.problems)
            elif tree.root != _NO_PAGE:
                page = reader.page(tree.root)
                if tree.depth == 1:
                    _nodes(page, reader.size, leaf=True, name=name)
    except _BadPageError as error:
        yield str(error)


class _Reader:
    """Pages by number."""

    def __init__(self, fd: int, meta: Meta) -> None:
        self._fd = fd
        self.meta = meta
        self.size = meta.page_size

    def page(self, number: int) -> bytes:
        """A branch or leaf page."""
        data = self._read(number, self.size)
        found, _, flags, lower, upper = _PAGE.unpack_from(data)
        if found != number or flags not in (_BRANCH, _LEAF):
            raise _BadPageError(f"page {number} is not a page of a tree (number {found}, flags {flags:#x})")
        if not _PAGE.size <= lower <= upper <= self.size or lower & 1:
            raise _BadPageError(f"page {number} has impossible bounds {lower} and {upper}")
        return data

    def overflow(self, number: int) -> int:
        """How many pages an overflow page and its followers are."""
        data = self._read(number, _PAGE.size)
        found, _, flags, low, high = _PAGE.unpack_from(data)
        if found != number or flags != _OVERFLOW:
            raise _BadPageError(f"page {number} is not an overflow page (number {found}, flags {flags:#x})")
        return int(low | high << 16)

    def overflow_data(self, number: int, size: int) -> bytes:
        """The value that begins on an overflow page."""
        return os.pread(self._fd, size, number * self.size + _PAGE.size)

    def _read(self, number: int, size: int) -> bytes:
        if not 2 <= number <= self.meta.last_page:
            raise _BadPageError(f"there is no page {number}")
        data = os.pread(self._fd, size, number * self.size)
        if len(data) < size:
            raise _BadPageError(f"page {number} lies past the end of the file")
        return data


@dataclass(frozen=True, slots=True)
class _Node:
    """An entry of a page: of a branch its `child`; of a leaf a value in the page, or on overflow pages from `big`."""

    key: bytes
    child: int = 0
    value: bytes = b""
    size: int = 0
    big: int | None = None
    sub: bool = False


def _nodes(page: bytes, page_size: int, *, leaf: bool, name: str) -> list[_Node]:
    """All nodes of a page, which must fill it exactly."""
    number, _, flags, lower, upper = _PAGE.unpack_from(page)
    if flags != (_LEAF if leaf else _BRANCH):
        raise _BadPageError(f"page {number} of {name} is {'no leaf' if leaf else 'no branch'}")
    count = (lower - _PAGE.size) // 2
    nodes = []
    filled = 0
    starts = struct.unpack_from(f"<{count}H", page, _PAGE.size)
    for start in starts:
        if not upper <= start <= page_size - _NODE.size or start & 1:
            raise _BadPageError(f"page {number} of {name} has a node at {start}")
        low, high, node_flags, key_size = _NODE.unpack_from(page, start)
        begin, end = start + _NODE.size, start + _NODE.size + key_size
        if key_size > _MAX_KEY or end > page_size:
            raise _BadPageError(f"page {number} of {name} has a key of {key_size} bytes at {start}")
        key = page[begin:end]
        if not leaf:
            nodes.append(_Node(key, low | high << 16 | node_flags << 32))
            filled += _even(_NODE.size + key_size)
            continue
        size = low | high << 16
        inside = 8 if node_flags & _BIG else size
        if end + inside > page_size or node_flags not in (0, _BIG, _SUB):
            raise _BadPageError(f"page {number} of {name} has a value of {size} bytes, flags {node_flags}, at {start}")
        value = page[end : end + inside]
        big = int.from_bytes(value, "little") if node_flags & _BIG else None
        nodes.append(_Node(key, 0, value, size, big, bool(node_flags & _SUB)))
        filled += _even(_NODE.size + key_size + inside)
    if len(set(starts)) != count or filled != page_size - upper:
        raise _BadPageError(f"the {count} nodes of page {number} of {name} do not fill it")
    return nodes


def _even(size: int) -> int:
    return size + (size & 1)


@dataclass
class _Walk:
    """A walk over all trees of one state."""

    reader: _Reader
    problems: list[PageProblem] = field(default_factory=list)
    databases: dict[str, Tree] = field(default_factory=dict)
    used: array[int] = field(default_factory=lambda: array("Q"))
    """Runs of pages that trees use: first page, count."""
    free: list[NDArray[np.uint64]] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def run(self) -> list[PageProblem]:
        """All trees, and what is free."""
        meta = self.reader.meta
        self.tree(FREE_LIST, meta.free_list)
        self.tree(MAIN, meta.main)
        for name, record in sorted(self.databases.items()):
            if record.flags or record.pad:
                self._problem(record.root, name, f"the record of {name} has flags that this store does not use")
            self.tree(name, record)
        self._once()
        return self.problems[:_MAX_PROBLEMS]

    def _once(self) -> None:
        """No page may be used twice, be free twice, or be both."""
        free = np.concatenate([np.zeros(0, np.uint64), *self.free])
        used = np.frombuffer(self.used, np.uint64).reshape(-1, 2)
        starts = np.concatenate([used[:, 0], free])
        ends = starts + np.concatenate([used[:, 1], np.ones(len(free), np.uint64)])
        order = np.argsort(starts, kind="stable")
        for index in np.flatnonzero(starts[order][1:] < ends[order][:-1])[:10]:
            page = int(starts[order[index + 1]])
            self._problem(page, "", f"page {page} is in use twice, or in use and in the free list")

    def _problem(self, page: int, tree: str, detail: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(PageProblem(page, tree, detail))

    def tree(self, name: str, record: Tree) -> None:
        """One tree."""
        self.counts = [0, 0, 0, 0]
        known = len(self.problems)
        if record.depth > _MAX_DEPTH:
            self._problem(record.root, name, f"the tree is said to be {record.depth} pages deep")
        elif record.root != _NO_PAGE:
            self._visit(name, record.root, record.depth, None, None)
        found = tuple(self.counts)
        if known == len(self.problems) and found != (record.branch, record.leaf, record.overflow, record.entries):
            said = (record.branch, record.leaf, record.overflow, record.entries)
            self._problem(
                record.root, name, f"has {found} branch, leaf and overflow pages and entries, its record says {said}"
            )

    def _visit(self, name: str, number: int, depth: int, low: bytes | None, high: bytes | None) -> None:
        """A page and what is below it: all keys must be in [low, high)."""
        if len(self.problems) >= _MAX_PROBLEMS:
            return
        try:
            if depth < 1:
                raise _BadPageError(f"{name} goes deeper than its record says, at page {number}")
            self._use(number, 1)
            nodes = _nodes(self.reader.page(number), self.reader.size, leaf=depth == 1, name=name)
            if depth > 1:
                self.counts[0] += 1
                self._branch(name, number, nodes, depth, low, high)
            else:
                self.counts[1] += 1
                self._leaf(name, number, nodes, low, high)
        except _BadPageError as error:
            self._problem(number, name, f"{error}{_range_text(low, high)}")

    def _branch(
        self, name: str, number: int, nodes: list[_Node], depth: int, low: bytes | None, high: bytes | None
    ) -> None:
        if len(nodes) < 2:
            raise _BadPageError(f"branch page {number} has {len(nodes)} children")
        # The first key of a branch is never looked at: it stands for whatever is smallest.
        self._in_order(name, number, [node.key for node in nodes[1:]], low, high)
        for index, node in enumerate(nodes):
            least = node.key if index else low
            most = nodes[index + 1].key if index + 1 < len(nodes) else high
            self._visit(name, node.child, depth - 1, least, most)

    def _leaf(self, name: str, number: int, nodes: list[_Node], low: bytes | None, high: bytes | None) -> None:
        if not nodes:
            raise _BadPageError(f"leaf page {number} is empty")
        self._in_order(name, number, [node.key for node in nodes], low, high)
        self.counts[3] += len(nodes)
        for node in nodes:
            value = node.value
            if node.big is not None:
                pages = self.reader.overflow(node.big)
                if pages != -(-(_PAGE.size + node.size) // self.reader.size):
                    raise _BadPageError(f"{pages} overflow pages from {node.big} hold a value of {node.size:,} bytes")
                if node.big + pages - 1 > self.reader.meta.last_page:
                    raise _BadPageError(f"overflow page {node.big} runs past the last page")
                self._use(node.big, pages)
                self.counts[2] += pages
                if name == FREE_LIST:
                    value = self.reader.overflow_data(node.big, node.size)
            if node.sub != (name == MAIN):
                raise _BadPageError(f"page {number} has an entry {node.key!r} of the wrong kind")
            if name == MAIN:
                self._database(node)
            elif name == FREE_LIST:
                self._free_pages(node.key, value)

    def _database(self, node: _Node) -> None:
        if len(node.value) != _TREE.size:
            raise _BadPageError(f"the record of database {node.key!r} has {len(node.value)} bytes")
        self.databases[node.key.decode(errors="replace")] = Tree.unpack(node.value)

    def _free_pages(self, key: bytes, value: bytes) -> None:
        count = int.from_bytes(value[:8], "little")
        if len(key) != 8 or int.from_bytes(key, "little") > self.reader.meta.transaction or len(value) < 8 * count + 8:
            raise _BadPageError(
                f"entry {key.hex()} of the free list makes no sense ({count} pages in {len(value)} bytes, after "
                f"transaction {self.reader.meta.transaction})"
            )
        pages = struct.unpack_from(f"<{count}Q", value, 8)
        if any(not 2 <= page <= self.reader.meta.last_page for page in pages):
            raise _BadPageError(f"entry {key.hex()} of the free list has impossible pages")
        if any(earlier <= later for earlier, later in pairwise(pages)):
            raise _BadPageError(f"entry {key.hex()} of the free list is not in order")
        self.free.append(np.array(pages, np.uint64))

    def _use(self, number: int, count: int) -> None:
        self.used.extend((number, count))

    def _in_order(self, name: str, number: int, keys: list[bytes], low: bytes | None, high: bytes | None) -> None:
        numbers = name == FREE_LIST
        ordered = [_rank(key, numbers) for key in keys]
        if any(a >= b for a, b in pairwise(ordered)):
            raise _BadPageError(f"the keys of page {number} are not in order")
        if ordered and (
            (low is not None and ordered[0] < _rank(low, numbers))
            or (high is not None and ordered[-1] >= _rank(high, numbers))
        ):
            raise _BadPageError(f"page {number} has keys that belong elsewhere")


def _rank(key: bytes, number: bool) -> bytes:
    return key[::-1] if number else key


def _range_text(low: bytes | None, high: bytes | None) -> str:
    if low is None and high is None:
        return ""
    start = "the first" if low is None else low[:16].hex()
    stop = "the last" if high is None else high[:16].hex()
    return f"; keys from {start} to {stop} are affected"
