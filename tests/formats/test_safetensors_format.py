"""mpfs.formats.safetensors: what is refused and how it is said, and agreement with the safetensors library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats.safetensors import MAX_HEADER_SIZE, Header, TensorEntry, build_header, parse_header, read_header
from mpfs.formats.torch_file import dtype_name
from mpfs.objects.dtypes import BITS


def frame(header: str | bytes) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text


def parse(header: object, data_size: int) -> Header:
    raw = frame(header if isinstance(header, str | bytes) else json.dumps(header))
    return parse_header(raw, len(raw) + data_size, source="m.safetensors")


def refused(header: object, data_size: int = 8) -> str:
    with pytest.raises(FormatError) as caught:
        parse(header, data_size)
    assert caught.value.message.startswith("m.safetensors: ")
    assert caught.value.details["file"] == "m.safetensors"
    assert len(caught.value.message) < 1000
    return caught.value.message


def tensor(dtype: str, shape: list[object], start: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def f32(start: int, end: int) -> str:
    return json.dumps(tensor("F32", [(end - start) // 4], start, end))


class TestValid:
    def test_entries_are_in_data_order_whatever_the_order_of_the_header(self) -> None:
        header = parse({"b": tensor("F32", [1], 4, 8), "a": tensor("I16", [2], 0, 4), "__metadata__": {"x": "y"}}, 8)
        assert header.entries == (TensorEntry("a", "I16", (2,), 0, 4), TensorEntry("b", "F32", (1,), 4, 8))
        assert header.metadata == {"x": "y"}
        assert header.data_size == 8
        assert header.entries[1].nbytes == 4

    def test_empty_and_scalar_tensors(self) -> None:
        table = {"e": tensor("F32", [0], 0, 0), "s": tensor("F32", [], 0, 4), "f": tensor("F32", [2, 0], 4, 4)}
        assert [(entry.name, entry.shape) for entry in parse(table, 4).entries] == [
            ("e", (0,)),
            ("s", ()),
            ("f", (2, 0)),
        ]

    def test_empty_tensors_at_one_offset_keep_the_header_s_order(self) -> None:
        table = {name: tensor("U8", [0], 0, 0) for name in "zay"}
        assert [entry.name for entry in parse(table, 0).entries] == ["z", "a", "y"]

    @pytest.mark.parametrize("dtype", BITS)
    def test_every_dtype_is_stored(self, dtype: str) -> None:
        assert parse({"t": tensor(dtype, [4, 2], 0, BITS[dtype])}, BITS[dtype]).entries[0].dtype == dtype

    @pytest.mark.parametrize("header", ["{}", "{}      ", '{"__metadata__":{}}', '{"__metadata__":null}', "{}\n\t"])
    def test_a_file_without_tensors(self, header: str) -> None:
        assert parse(header, 0).entries == ()

    def test_unknown_keys_of_a_tensor_are_ignored_as_the_library_does(self) -> None:
        assert parse({"t": {**tensor("U8", [8], 0, 8), "note": [{"a": 1}]}}, 8).entries[0].shape == (8,)


class TestRefused:
    def test_i1_repeated_tensor_is_named(self) -> None:
        assert 'the key "a" appears more than once' in refused(f'{{"a":{f32(0, 4)},"a":{f32(4, 8)}}}')

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (
                '{"t":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}',
                '"shape" appears more than once in "t"',
            ),
            ('{"__metadata__":{"k":"1","k":"2"}}', '"k" appears more than once in "__metadata__"'),
            ('{"__metadata__":{},"__metadata__":{}}', '"__metadata__" appears more than once'),
            ('{"t":{"x":[1,[{"y":1,"y":1}]]}}', '"y" appears more than once in "t"."x"'),
        ],
    )
    def test_i1_repeated_keys_at_every_level(self, header: str, said: str) -> None:
        assert said in refused(header)

    def test_i2_stray_bytes(self) -> None:
        said = refused({"a": tensor("F32", [1], 0, 4)}, 8)
        assert "take 4 bytes" in said
        assert "8 bytes follow" in said
        assert "last 4 belong to no tensor" in said

    def test_i2_missing_bytes(self) -> None:
        said = refused({"a": tensor("F32", [4], 0, 16)}, 8)
        assert "take 16 bytes" in said
        assert "only 8 bytes follow" in said

    def test_i3_shape_against_offsets(self) -> None:
        said = refused({"a": tensor("F32", [1000, 1000], 0, 4)}, 4)
        assert "F32 [1000, 1000] takes 4,000,000 bytes" in said
        assert "[0, 4] give it 4 bytes" in said

    def test_i8_packed_dtypes_must_fill_bytes(self) -> None:
        assert "12 bits, which do not fill whole bytes" in refused({"a": tensor("F4", [3], 0, 2)}, 2)
        assert parse({"a": tensor("F4", [2], 0, 1), "b": tensor("F6_E2M3", [4], 1, 4)}, 4).data_size == 4

    @pytest.mark.parametrize(
        ("table", "said"),
        [
            ({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 6, 10)}, "2 bytes between them"),
            ({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 2, 6)}, "they overlap"),
            ({"a": tensor("F32", [1], 4, 8)}, "the first one must start at 0"),
            ({"a": tensor("F32", [2], 0, 8), "e": tensor("F32", [0], 4, 4)}, "they overlap"),
            ({"": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}, "they overlap"),
            ({"a": tensor("F32", [1], -4, 0)}, "data_offsets holds -4"),
            ({"a": tensor("F32", [1], 8, 4)}, "not before it"),
            ({"a": {**tensor("F32", [1], 0, 4), "data_offsets": [0, 4, 8]}}, "must be a start and an end"),
            ({"a": tensor("F32", [1], 0, 2**63)}, "data_offsets holds 9223372036854775808"),
            ({"a": tensor("F32", [-1], 0, 4)}, "shape holds -1"),
            ({"a": tensor("F32", [2.0], 0, 8)}, "shape holds 2.0"),
            ({"a": tensor("F32", [True], 0, 4)}, "shape holds true"),
            ({"a": tensor("F32", [2], 0, 8.0)}, "data_offsets holds 8.0"),
            ({"a": tensor("F32", [2], False, 8)}, "data_offsets holds false"),
            ({"a": tensor("F32", [None], 0, 8)}, "shape holds null"),
            ({"a": tensor("F32", ["2"], 0, 8)}, 'shape holds "2"'),
            ({"a": tensor("F32", [[2]], 0, 8)}, "shape holds [2]"),
            ({"a": tensor("F32", [10**3000], 0, 8)}, "an integer of 9966 bits"),
            ({"a": tensor("F32", [2**32, 2**32], 0, 8)}, "overflows"),
            ({"a": tensor("F32", [2**62, 2**62, 0], 0, 0)}, "overflows"),
            ({"a": tensor("F32", [2**40] * 10_000, 0, 0)}, "overflows"),
            ({"a": tensor("F99", [2], 0, 8)}, 'the dtype "F99"'),
            ({"a": {**tensor("F32", [2], 0, 8), "dtype": 3}}, "its dtype is a number"),
            ({"a": {**tensor("F32", [2], 0, 8), "shape": 2}}, "its shape is a number"),
            ({"a": {"dtype": "F32", "shape": [2]}}, 'lacks "data_offsets"'),
            ({"a": ["F32", [2], [0, 8]]}, "its entry is a list"),
            ({"a": None}, "its entry is null"),
            ({"__metadata__": {"k": 1}}, '"k" is a number'),
            ({"__metadata__": {"k": True}}, '"k" is a boolean'),
            ({"__metadata__": {"k": {}}}, '"k" is an object'),
            ({"__metadata__": []}, "__metadata__ is a list"),
            ({"__metadata__": {"k": "\ud800"}}, "lone surrogate"),
            ({"\udfff": tensor("F32", [2], 0, 8)}, "lone surrogate"),
        ],
    )
    def test_contents(self, table: dict[str, object], said: str) -> None:
        assert said in refused(table)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b"[]", "begins with"),
            (b' {"a":1}', "begins with"),
            (b"", "begins with"),
            (b"\xef\xbb\xbf{}", "begins with"),
            (b"{", "not valid"),
            (b"{}{}", "not valid"),
            (b"{}\0\0", "not valid"),
            (b'{"a":\xff}', "not UTF-8 (byte 13)"),
            (b'{"\xed\xa0\x80":1}', "not UTF-8"),
            (b'{"a":NaN}', "NaN is not JSON"),
            (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}', "data_offsets holds -0.0"),
            (b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', "Infinity is not JSON"),
            (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
            (b'{"a":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001, "nested too deeply"),
            (b'{"a":' + b"9" * 5000 + b"}", "not valid"),
            (b'{"a\nb":1}', "not valid"),
        ],
    )
    def test_text(self, text: bytes, said: str) -> None:
        assert said in refused(text)

    def test_a_name_s_length_and_control_characters_stay_out_of_messages(self) -> None:
        said = refused({"\x1b[31m" + "x" * 10_000: None})
        assert "\x1b" not in said


class TestFiles:
    def check(self, path: Path, content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(FormatError) as caught:
            read_header(path)
        assert str(path) in caught.value.message
        return caught.value.message

    def test_reads_the_header_and_its_raw_bytes(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(1000)}, tmp_path / "m.safetensors", {"format": "pt"})
        header, raw = read_header(tmp_path / "m.safetensors")
        assert header.data_offset == len(raw)
        assert (tmp_path / "m.safetensors").read_bytes()[: len(raw)] == raw
        assert header.metadata == {"format": "pt"}
        assert read_header(str(tmp_path / "m.safetensors")) == (header, raw)

    def test_i5_git_lfs_pointer(self, tmp_path: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
        said = self.check(tmp_path / "model.safetensors", pointer)
        assert "this is a git-lfs pointer, fetch the file first: git lfs pull" in said

    @pytest.mark.parametrize(
        "page", [b"<!DOCTYPE html><html></html>", b"\n  <HTML><body>404", b"<?xml version='1.0'?>"]
    )
    def test_web_page(self, tmp_path: Path, page: bytes) -> None:
        assert "web page" in self.check(tmp_path / "model.safetensors", page)

    def test_empty_and_truncated(self, tmp_path: Path) -> None:
        whole = save({"a": torch.zeros(100)})
        path = tmp_path / "model.safetensors"
        assert "the file is empty" in self.check(path, b"")
        assert "too few" in self.check(path, whole[:5])
        assert "cut off" in self.check(path, whole[:30])
        assert "1 are missing" in self.check(path, whole[:-1])

    def test_other_formats_are_recognised(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        assert "GGUF" in self.check(path, b"GGUF\x03\0\0\0" + b"\0" * 100)
        torch.save({"a": torch.zeros(1)}, path)
        assert "zip archive" in self.check(path, path.read_bytes())

    def test_i9_the_length_is_checked_before_anything_is_allocated(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        with path.open("wb") as file:  # sparse: takes no space
            file.write((MAX_HEADER_SIZE + 1).to_bytes(8, "little") + b"{")
            file.truncate(MAX_HEADER_SIZE + 100)
        with pytest.raises(FormatError, match="100,000,001 bytes long, the format's maximum is 100,000,000"):
            read_header(path)
        assert "maximum" in self.check(path, (2**64 - 1).to_bytes(8, "little") + b"{}")

    def test_not_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            read_header(tmp_path / "nope")
        with pytest.raises(BadInputError, match="not a regular file"):
            read_header(tmp_path)


class TestBuild:
    def test_equals_the_library_s_bytes_for_every_dtype_and_awkward_names(self, tmp_path: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for number, dtype in enumerate(TORCH_DTYPES):
            # Names run against the order of dtypes, and one name is needed twice per dtype to see both sorts.
            for name in (f"{99 - number:02}", f"x{number:02}"):
                tensors[name] = torch.zeros(number % 3, 2, dtype=torch.uint8).to(dtype)
        tensors['é\n"\\/\x7f\u2028\x01\U0001f600\b\f\t\r\x0b'] = torch.zeros(())
        tensors[""] = torch.zeros(0, 3)
        save_file(tensors, tmp_path / "m.safetensors", {"k\x1f": "ü\\"})
        raw, header = built(tensors, {"k\x1f": "ü\\"})
        assert (tmp_path / "m.safetensors").read_bytes()[: len(raw)] == raw
        assert read_header(tmp_path / "m.safetensors") == (header, raw)

    def test_float4_counts_elements_not_pairs(self) -> None:
        pairs = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        raw, _ = build_header([("a", "F4", (2, 4)), ("b", "U8", (1,)), ("c", "BOOL", (1,))], None)
        assert save(
            {"a": pairs, "b": torch.zeros(1, dtype=torch.uint8), "c": torch.zeros(1, dtype=torch.bool)}
        ).startswith(raw)

    @pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
    def test_metadata(self, metadata: dict[str, str] | None) -> None:
        raw, _ = build_header([("a", "F32", (1,))], metadata)
        assert save({"a": torch.zeros(1)}, metadata).startswith(raw)

    def test_no_tensors(self) -> None:
        assert build_header([], None)[0] == save({})
        # The library writes invalid JSON here (0.8.0: `{},"__metadata__":{}}`).
        assert build_header([], {})[0][8:].rstrip() == b'{"__metadata__":{}}'

    def test_metadata_is_sorted_where_the_library_has_no_order(self) -> None:
        raw, _ = build_header([], {"b": "2", "a": "1", "__metadata__": "0"})
        assert b'{"__metadata__":"0","a":"1","b":"2"}' in raw

    @pytest.mark.parametrize(
        ("tensors", "said"),
        [
            ([("a", "F32", (1,)), ("a", "U8", (1,))], "more than one tensor has it"),
            ([("__metadata__", "F32", (1,))], "keeps it for metadata"),
            ([("a", "F99", (1,))], "F99"),
            ([("a", "F4", (3,))], "whole bytes"),
            ([("a", "F32", (-1,))], "-1"),
            ([("a", "F32", (2**61, 2))], "overflows"),
            ([("\ud800", "F32", (1,))], "lone surrogate"),
        ],
    )
    def test_refuses(self, tensors: list[tuple[str, str, tuple[int, ...]]], said: str) -> None:
        with pytest.raises(FormatError, match=said):
            build_header(tensors, None)

    def test_i9_refuses_a_header_that_no_one_could_read(self) -> None:
        fits = MAX_HEADER_SIZE - len('{"__metadata__":{"k":""}}')
        assert len(build_header([], {"k": "x" * fits})[0]) == MAX_HEADER_SIZE + 8
        with pytest.raises(FormatError, match="no reader takes more than 100,000,000; split"):
            build_header([("a", "F32", (1,))], {"k": "x" * (fits + 1)})


TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def built(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, Header]:
    return build_header([(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()], metadata)


deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    specs = draw(st.dictionaries(names, st.tuples(st.sampled_from(TORCH_DTYPES), shapes), max_size=6))
    return {name: torch.zeros(shape, dtype=torch.uint8).to(dtype) for name, (dtype, shape) in specs.items()}


class TestAgreement:
    @settings(deadline=None, max_examples=150)
    @given(checkpoints(), st.none() | st.dictionaries(names, st.text('aé\\"\n', max_size=3), min_size=1, max_size=1))
    def test_what_is_built_is_what_the_library_writes_and_reads(
        self, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
    ) -> None:
        whole = save(tensors, metadata)
        raw, header = built(tensors, metadata)
        assert whole.startswith(raw)
        assert parse_header(raw, len(whole), source="x") == header
        theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in deserialize(whole)}
        assert theirs == {entry.name: (entry.dtype, entry.shape) for entry in header.entries}

    @settings(deadline=None, max_examples=150)
    @given(
        st.dictionaries(names, st.tuples(st.sampled_from(sorted(BITS)), shapes), max_size=6),
        st.none() | st.dictionaries(names, names, max_size=4),
        st.randoms(use_true_random=False),
    )
    def test_any_order_and_spacing_of_a_valid_header_parses_to_the_same(
        self, specs: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None, random: object
    ) -> None:
        whole_bytes = {
            name: (dtype, (*shape, 4) if BITS[dtype] % 8 else shape) for name, (dtype, shape) in specs.items()
        }
        raw, header = build_header([(name, *spec) for name, spec in whole_bytes.items()], metadata)
        table = list(json.loads(raw[8:]).items())
        if not any(prod(entry.shape) == 0 for entry in header.entries):  # their order is the header's
            random.shuffle(table)  # type: ignore[attr-defined]
        text = json.dumps(dict(table), indent=1) + " \n"
        again = parse(text, header.data_size)
        assert again.entries == header.entries
        assert again.metadata == (metadata if metadata is None else dict(metadata))

    @settings(deadline=None, max_examples=400)
    @given(checkpoints(), st.data())
    def test_a_mutated_file_is_refused_or_parses_to_something_consistent(
        self, tensors: dict[str, torch.Tensor], data: st.DataObject
    ) -> None:
        whole = bytearray(save(tensors, {"format": "pt"}))
        header_size = 8 + int.from_bytes(whole[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, header_size - 1))
            kind = data.draw(st.sampled_from(["set", "insert", "delete", "digit", "cut"]))
            if kind == "set" and at < len(whole):
                whole[at] = data.draw(st.integers(0, 255))
            elif kind == "insert":
                whole[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            elif kind == "digit":
                for digit in data.draw(st.permutations([i for i, c in enumerate(whole[:header_size]) if 48 <= c < 58]))[
                    :1
                ]:
                    whole[digit] = data.draw(st.integers(48, 57))
            else:
                del whole[at : at + 1 if kind == "delete" else None]
        length = int.from_bytes(whole[:8], "little")
        raw = bytes(whole[: 8 + length]) if length < len(whole) else bytes(whole)
        try:
            header = parse_header(raw, len(whole), source="x")
        except FormatError:
            return
        end = 0
        for entry in header.entries:
            assert entry.start == end
            assert (entry.end - entry.start) * 8 == BITS[entry.dtype] * prod(entry.shape)
            end = entry.end
        assert header.data_offset + end == len(whole)
        # What MPFS takes, the reference library takes, and sees the same.
        theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in deserialize(bytes(whole))}
        assert theirs == {entry.name: (entry.dtype, entry.shape) for entry in header.entries}


def test_importing_it_does_not_import_torch() -> None:
    code = (
        "import sys, mpfs.formats.safetensors, mpfs.formats.huggingface, mpfs.formats.torch_file\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
