"""Objects: one encoding per value, ids that never change, and nothing that cannot be meant."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from math import inf, nan, prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.objects import (
    BlobFile,
    Budget,
    Commit,
    Cost,
    Figures,
    Input,
    ModelRef,
    Plan,
    PlanTensor,
    Run,
    SafetensorsFile,
    Selection,
    Snapshot,
    Tensor,
    block_id,
    object_id,
)
from mpfs.objects.dtypes import BITS, CODES, MERGEABLE, itemsize, nbytes
from mpfs.objects.encoding import decode, encode
from mpfs.objects.ids import is_object_id
from mpfs.objects.snapshot import check_path

A, B, C = "a" * 64, "b" * 64, "c" * 64

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.text("0123456789abcdef", min_size=64, max_size=64)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(st.booleans(), st.integers(), floats)
json_values = st.recursive(
    st.one_of(st.none(), scalars, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
json_objects = st.dictionaries(texts, json_values, max_size=5)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = tuple(draw(st.lists(st.integers(0, 50), max_size=3)))
    if BITS[dtype] % 8:
        shape = (*shape, 4)
    block_size = draw(st.sampled_from([4096, 8192]))
    count = -(-nbytes(dtype, shape) // block_size)
    blocks = draw(st.lists(st.binary(min_size=16, max_size=16), min_size=count, max_size=count))
    return Tensor(dtype, shape, block_size, tuple(blocks))


commits = st.builds(
    Commit,
    snapshot=ids,
    parents=st.lists(ids, max_size=3).map(tuple),
    inputs=st.lists(st.builds(Input, st.sampled_from(["base", "expert"]), texts, ids), max_size=3).map(tuple),
    plan=st.none() | ids,
    message=texts,
    author=texts,
    time=st.integers(0, 1 << 40),
    source=st.none() | texts,
)
runs = st.builds(
    Run,
    ids,
    ids,
    st.integers(0, 1 << 40),
    st.builds(Figures, expert_bytes_read=st.integers(0, 1 << 60), seconds=floats, fidelity=st.none() | floats),
)
names = st.lists(
    st.text("abc.é-", min_size=1, max_size=3).filter(lambda part: part not in (".", "..")), min_size=1, max_size=3
)
paths = names.map("/".join)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    files: list[BlobFile | SafetensorsFile] = []
    taken: set[str] = set()
    for number, path in enumerate(sorted({f"{part}x" for part in draw(st.lists(paths, max_size=4))})):
        if path in taken or any(path.startswith(f"{other}/") for other in taken):
            continue
        taken.add(path)
        if draw(st.booleans()):
            files.append(BlobFile(path, draw(st.integers(0, 1 << 50)), draw(ids)))
        else:
            held = draw(st.dictionaries(texts, ids, max_size=4))
            files.append(
                SafetensorsFile(path, draw(st.integers(0, 1 << 50)), draw(ids), f"{number}:", tuple(held.items()))
            )
    return Snapshot(tuple(files))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        columns = sorted(draw(st.sets(st.integers(0, 30), max_size=8)))
        count = draw(st.integers(0, 2))
        parts.append(
            PlanTensor(
                name=draw(texts),
                action=draw(st.sampled_from(["keep", "compute"])),
                dtype="BF16",
                shape=(3, 4),
                column_elements=2048,
                base=draw(st.none() | ids),
                experts=tuple((index, draw(ids)) for index in range(count)),
                selections=tuple(Selection.of(columns) for _ in range(count)),
                columns=Selection.of(columns),
                shared=draw(st.dictionaries(texts, scalars, max_size=2)),
                parameters=tuple(draw(st.dictionaries(texts, scalars, max_size=2)) for _ in range(count)),
                energy=draw(floats),
                energy_left_out=draw(floats),
                note=draw(st.none() | texts),
            )
        )
    return Plan(
        method=draw(texts),
        compat=draw(texts),
        recipe=draw(json_objects),
        models=tuple(draw(st.lists(st.builds(ModelRef, texts, ids, ids), max_size=3))),
        base=draw(st.none() | st.integers(0, 2)),
        template=0,
        work_dtype=draw(st.none() | st.just("F32")),
        out_dtype=None,
        seed=draw(st.integers(0, 1 << 63)),
        block_size=4096,
        budget=Budget(draw(st.sampled_from(["none", "bytes"])), draw(floats)),
        policy="energy",
        tensors=tuple(parts),
        cost=Cost(*draw(st.lists(st.integers(0, 1 << 60), min_size=6, max_size=6))),
        fidelity_predicted=draw(floats),
        notes=tuple(draw(st.lists(texts, max_size=2))),
    )


def shuffled(value: Any) -> Any:
    """The same value with the keys of every object in the opposite order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(json_objects)
def test_one_encoding_per_value(value: dict[str, Any]) -> None:
    value = {**value, "kind": "test"}
    encoded = encode(value)
    assert encode(shuffled(value)) == encoded
    assert decode(encoded, "test") == value
    assert encode(decode(encoded, "test")) == encoded
    assert b"\n" not in encoded


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"JSON|float"):
        encode({"x": [value]})
    with pytest.raises(ValueError, match=r"JSON|float"):
        Run(A, B, 0, Figures(seconds=value)).encode()


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        encode({"x": "\ud800"})


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b'{"kind":"other"}', b"{}", b"[" * 100_000, b'{"kind":["test"]}']
)
def test_what_is_no_object_of_the_kind_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(data, "test")


@given(st.one_of(tensors(), commits, runs, snapshots(), plans()))
def test_objects_come_back_equal(item: Tensor | Commit | Run | Snapshot | Plan) -> None:
    encoded = item.encode()
    again = type(item).decode(encoded)
    assert again == item
    assert again.encode() == encoded
    reordered = json.dumps(shuffled(json.loads(encoded)), indent=1).encode()
    assert type(item).decode(reordered).encode() == encoded


@given(st.one_of(tensors(), commits, runs, snapshots(), plans()), st.data())
def test_a_part_that_is_gone_or_odd_is_a_value_error(
    item: Tensor | Commit | Run | Snapshot | Plan, data: st.DataObject
) -> None:
    """No other exception leaves `decode`, whatever a field holds."""
    value = json.loads(item.encode())
    key = data.draw(st.sampled_from(sorted(value)))
    if data.draw(st.booleans()):
        del value[key]
    else:
        value[key] = data.draw(json_values)
    with suppress(ValueError):
        type(item).decode(encode(value))


TENSOR = Tensor("BF16", (3, 2048), 8192, (block_id(b"one"), block_id(b"two")))
SNAPSHOT = Snapshot((BlobFile("config.json", 2, A), SafetensorsFile("model.safetensors", 99, B, "", (("w", C),))))
COMMIT = Commit(A, (B,), (Input("base", "origin/main", B), Input("expert", "é", C)), C, "merge", "me", 1_700_000_000)
RUN = Run(A, B, 1_700_000_000, Figures(1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, None))
PLAN = Plan(
    method="ties",
    compat="mergekit-0.1.5",
    recipe={"models": [{"model": "a", "parameters": {"weight": 0.5}}]},
    models=(ModelRef("a", A, B),),
    base=0,
    template=0,
    work_dtype=None,
    out_dtype="BF16",
    seed=0,
    block_size=1 << 20,
    budget=Budget("percent", 10.0),
    policy="energy",
    tensors=(
        PlanTensor(
            "w", "compute", "BF16", (3, 2048), 4096, A, ((0, C),), (Selection(((0, 1),)),), Selection(((0, 1),)),
            {"lambda": 1.0}, ({"weight": 0.5},), 2.5, 0.25,
        ),
    ),
    cost=Cost(1, 2, 3, 4, 5, 6),
    fidelity_predicted=0.96,
)  # fmt: skip


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (TENSOR, "0ffc6d2204abdd43cf7a630f758742dfe0df04c442f6f65b86af46b7678ef5ed"),
        (SNAPSHOT, "9d42a321514267b4ae1c45fd632d8d2a92ba4938d9bf9a06e74ca950d9af72ea"),
        (COMMIT, "abee2eae1118205dad7e3024c605314a867830ed3fafa81960f2008fa688d7a3"),
        (RUN, "da78e710685ae85171171616337e0727a1255a7d4be730b143c15bb2d3a8fe82"),
        (PLAN, "8e89afb7fa1be5fce6c3f62bcb2f9f15c07d80182f252d6b86ae27d8ea3c3185"),
    ],
)
def test_ids_never_change(item: Tensor | Commit | Run | Snapshot | Plan, expected: str) -> None:
    """If this fails, the repositories of all users become unreadable: change the format version, not this test."""
    assert object_id(item.encode()) == expected


def test_block_ids_never_change() -> None:
    assert block_id(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert block_id(b"MPFS").hex() == "74374742786e63155917ed260eb2072e"
    assert block_id(memoryview(bytearray(b"MPFS"))) == block_id(b"MPFS")


def test_the_encoding_of_a_commit() -> None:
    assert Commit(A, (), (), None, "é\n", "me", 1).encode() == (
        b'{"author":"me","inputs":[],"kind":"commit","message":"\xc3\xa9\\n","parents":[],"plan":null,"snapshot":"'
        + A.encode()
        + b'","source":null,"time":1}'
    )
    assert COMMIT.iso_time == "2023-11-14T22:13:20Z"


def test_object_ids_are_64_lower_case_hex_digits() -> None:
    assert is_object_id(A)
    for text in ("", "a", "A" * 64, "g" * 64, A + "a", A + "\n"):
        assert not is_object_id(text)


# Tensors


@pytest.mark.parametrize(
    ("dtype", "shape", "count"),
    [("F32", (), 1), ("F32", (0,), 0), ("F32", (2, 0), 0), ("F32", (1025,), 2), ("F4", (2,), 1), ("BOOL", (4096,), 1)],
)
def test_the_number_of_blocks_follows_from_the_shape(dtype: str, shape: tuple[int, ...], count: int) -> None:
    tensor = Tensor(dtype, shape, 4096, (bytes(16),) * count)
    assert tensor.numel == prod(shape)
    assert sum(size for _, size in tensor.sized_blocks()) == tensor.nbytes
    with pytest.raises(ValueError, match="blocks"):
        Tensor(dtype, shape, 4096, (bytes(16),) * (count + 1))


@pytest.mark.parametrize(
    ("dtype", "shape", "block_size", "blocks"),
    [
        ("F4", (3,), 4096, (bytes(16),)),  # not whole bytes
        ("F99", (1,), 4096, (bytes(16),)),
        ("F32", (-1, -1), 4096, (bytes(16),)),
        ("F32", (-1,), 4096, ()),
        ("F32", (1,), 0, (bytes(16),)),
        ("F32", (1,), -1, ()),
        ("F32", (1,), 4096, (bytes(15),)),
    ],
)
def test_tensors_that_cannot_be(dtype: str, shape: tuple[int, ...], block_size: int, blocks: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Tensor(dtype, shape, block_size, blocks)


def test_where_blocks_begin() -> None:
    for dtype, per_block in (
        ("F32", 1024),
        ("BF16", 2048),
        ("F64", 512),
        ("U8", 4096),
        ("F4", 4096),
        ("F6_E2M3", 4096),
    ):
        numel = 3 * 4096 * 8 // BITS[dtype] // 4 * 4
        size = nbytes(dtype, (numel,))
        tensor = Tensor(dtype, (numel,), 4096, (bytes(16),) * -(-size // 4096))
        assert [tensor.block_start(index) for index in range(2)] == [0, per_block]
        assert tensor.block_nbytes(len(tensor.blocks) - 1) == size - 4096 * (len(tensor.blocks) - 1)


# dtypes


def test_dtypes() -> None:
    assert nbytes("F32", []) == 4
    assert nbytes("F4", [2]) == 1
    assert nbytes("F6_E2M3", [4]) == 3
    assert itemsize("BF16") == 2
    for dtype, shape in (("F4", [3]), ("X", [])):
        with pytest.raises(ValueError, match=dtype):
            nbytes(dtype, shape)
        with pytest.raises(ValueError, match=dtype):
            itemsize(dtype)
    assert set(BITS) > MERGEABLE


def test_dtype_codes_never_change() -> None:
    assert list(CODES) == [
        "F4", "F6_E2M3", "F6_E3M2", "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0",
        "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64", "F64", "C64",
    ]  # fmt: skip
    assert list(CODES.values()) == list(range(len(CODES)))


# Snapshots


@pytest.mark.parametrize("path", ["a", "a/b.c", "é/ü", "a b", "...", ".hidden", "a:b"])
def test_good_paths(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/a", "//a", "a/", "a//b", "./a", "a/.", "a/./b", "../a", "a/../b", "a/..", "a\0b", "a\\b"]
)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(ValueError, match="unsafe path"):
        check_path(path)
    with pytest.raises(ValueError, match="unsafe path"):
        Snapshot((BlobFile(path, 0, A),))


@pytest.mark.parametrize("paths", [["b", "a"], ["a", "a"], ["a", "a/b"], ["a", "a-b", "a/b"], ["a/b", "a/b/c/d"]])
def test_paths_that_do_not_go_together(paths: list[str]) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        Snapshot(tuple(BlobFile(path, 0, A) for path in paths))


def test_tensor_names_are_unique() -> None:
    one = SafetensorsFile("a", 9, A, "", (("w", B), ("v", C)))
    with pytest.raises(ValueError, match="unique"):
        Snapshot((one, replace(one, path="b")))
    with pytest.raises(ValueError, match="unique"):
        Snapshot((replace(one, tensors=(("w", B), ("w", C))),))
    both = Snapshot((one, replace(one, path="b", prefix="b:")))
    assert list(both.tensors) == ["w", "v", "b:w", "b:v"]
    assert list(both.references()) == [A, B, C, A, B, C]
    assert both.size == 18
    assert both.file("b") == both.files[1]
    assert both.file("c") is None


@given(st.sets(st.integers(0, 100)))
def test_selections(columns: set[int]) -> None:
    selection = Selection.of(sorted(columns))
    assert list(selection.columns()) == sorted(columns)
    assert len(selection) == len(columns)
    assert all(stop < start for (_, stop), (start, _) in zip(selection.ranges, selection.ranges[1:], strict=False))


def test_a_plan_of_a_newer_version_is_refused() -> None:
    value = json.loads(PLAN.encode())
    with pytest.raises(ValueError, match="version 2"):
        Plan.decode(encode({**value, "version": 2}))


def test_figures_of_a_newer_version_are_left_out() -> None:
    value = json.loads(RUN.encode())
    value["figures"]["joules"] = 5
    assert Run.decode(encode(value)) == RUN
