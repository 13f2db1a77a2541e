"""The safetensors header: parsed strictly, and written as the reference library writes it.

MPFS needs the byte range of every tensor, which the library hides, and errors that say what is wrong, which the
library's do not. Only headers are handled here; a tensor's bytes are read by whoever wants them, at
`data_offset + start`, little-endian.

Format (github.com/huggingface/safetensors, "Format"): 8 bytes, the header's length N as an unsigned little-endian
integer; N bytes of UTF-8 JSON that begin with `{` and may end in whitespace; then the data. The JSON maps a
tensor's name to `dtype`, `shape` and `data_offsets`, and may map `__metadata__` to strings. The tensors cover the
data without holes or overlaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from mpfs.errors import FormatError
from mpfs.formats import sniff, strict_json
from mpfs.formats.location import RemoteLocation, opened
from mpfs.formats.messages import count, is_unicode, listing, show
from mpfs.objects.dtypes import BITS

MAX_HEADER_SIZE = 100_000_000
"""The longest header in bytes, without the 8 bytes of its length, that the reference library reads."""

METADATA_KEY = "__metadata__"
"""The one name that no tensor can have."""

_LENGTH_SIZE = 8
_ALIGNMENT = 8
_LIMIT = 2**63
_WRITE_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
"""The order in which safetensors 0.8 writes tensors of different dtypes: by descending alignment, then by its own
enumeration. Seen by experiment for all but the F6 dtypes, which its Python binding cannot write."""
_WRITE_RANK = {dtype: rank for rank, dtype in enumerate(_WRITE_ORDER)}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a header. `start` and `end` are byte offsets from the beginning of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header: entries in data order, which leave no hole and do not overlap.

    Entries are ordered by (start, end, position in the header), which matters for empty tensors only.
    `metadata` is None if the file has none, or null. `data_offset` is where the data section starts in the file.
    """

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str] | None
    data_offset: int

    @property
    def data_size(self) -> int:
        """Bytes of the data section."""
        return self.entries[-1].end if self.entries else 0


def read_header(path: str | os.PathLike[str] | RemoteLocation) -> tuple[Header, bytes]:
    """The header of a file, parsed and as raw bytes (length, JSON and padding: `data_offset` bytes).

    Nothing after the header is read, and nothing is allocated before the length was checked against the file's
    size and MAX_HEADER_SIZE.

    Raises:
        NotFoundError: there is no such file.
        BadInputError: the path is not a regular file, or cannot be read.
        FormatError: the file is not valid safetensors; see `parse_header`.
    """
    source = str(path)
    with opened(path) as (file, file_size):
        head = file.read(sniff.HEAD_SIZE)
        data_offset = _LENGTH_SIZE + _header_length(head, file_size, source)
        raw = head[:data_offset] + file.read(max(0, data_offset - len(head)))
    return parse_header(raw, file_size, source=source), raw


def parse_header(raw: bytes, file_size: int, *, source: str) -> Header:
    """Parse a header and check it against the format and against the file's size.

    Args:
        raw: the first `data_offset` bytes of the file: the length, the JSON and its padding.
        file_size: bytes of the whole file.
        source: the file's name, for messages.

    Raises:
        FormatError: anything that the format does not allow. The message names the file, the tensor or key, and
            the byte counts that disagree; `details` has `file` and, where one is at fault, `tensor`. Keys of a
            tensor other than the three that the format defines are ignored, as the reference library does.
    """
    length = _header_length(raw, file_size, source)
    if len(raw) != _LENGTH_SIZE + length:
        _fail(source, f"the header has {len(raw) - _LENGTH_SIZE:,} of its {count(length, 'byte')}; it was cut off")
    try:
        text = raw[_LENGTH_SIZE:].decode("utf-8")
    except UnicodeDecodeError as error:
        _fail(source, f"the header is not UTF-8 (byte {error.start + _LENGTH_SIZE:,}); this is no safetensors file")
    if not text.startswith("{"):
        _fail(source, f"the header begins with {show(text[:1])} and not with {{; this is no safetensors file")
    try:
        table = strict_json.loads(text)
    except ValueError as error:
        _fail(source, f"the header is not valid: {error}")
    if not isinstance(table, dict):
        _fail(source, f"the header is {_kind(table)}, not a JSON object")
    metadata = _parse_metadata(table.pop(METADATA_KEY, None), source)
    entries = [_parse_entry(name, info, source) for name, info in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    header = Header(tuple(entries), metadata, len(raw))
    _check_cover(header, file_size, source)
    return header


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, Header]:
    """The header that safetensors.torch.save_file (0.8) writes for these tensors, byte for byte.

    Where the library's own bytes change from run to run (the order of several metadata keys) keys are sorted.
    Where they cannot be read back (no tensors and empty metadata) valid JSON is written instead.

    Args:
        tensors: name, dtype (a key of dtypes.BITS) and shape of each tensor, in any order. A shape counts elements,
            also for packed dtypes.
        metadata: what goes under `__metadata__`; None writes no such key, an empty mapping an empty one.

    Returns:
        The raw bytes (length, JSON, padding to a multiple of 8 bytes), and their parsed form, whose `entries` say
        in which order and where the tensors' bytes go.

    Raises:
        FormatError: a name occurs twice, is `__metadata__` or not Unicode; a dtype or shape that no file can hold;
            a header over MAX_HEADER_SIZE, which nothing could read back.
    """
    parts: list[str] = []
    if metadata is not None:
        pairs = ",".join(f"{_quote(key)}:{_quote(value)}" for key, value in sorted(metadata.items()))
        parts.append(f'"{METADATA_KEY}":{{{pairs}}}')
    entries: list[TensorEntry] = []
    names: set[str] = set()
    offset = 0
    for name, dtype, shape in sorted(tensors, key=lambda item: (_WRITE_RANK.get(item[1], -1), item[0])):
        if name in names or name == METADATA_KEY:
            why = "more than one tensor has it" if name in names else "the format keeps it for metadata"
            raise FormatError(f"cannot write the tensor {show(name)}: {why}; give it another name", tensor=name)
        names.add(name)
        try:
            size = _byte_size(dtype, shape)
        except ValueError as error:
            raise FormatError(f"cannot write the tensor {show(name)}: it {error}", tensor=name) from None
        dims = ",".join(str(dim) for dim in shape)
        parts.append(f'{_quote(name)}:{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{offset},{offset + size}]}}')
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, offset + size))
        offset += size
    text = f"{{{','.join(parts)}}}".encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_SIZE:
        raise FormatError(
            f"the header of {count(len(names), 'tensor')} would be {len(text):,} bytes long, and no reader takes "
            f"more than {MAX_HEADER_SIZE:,}; split the tensors over several files, or shorten names and metadata"
        )
    raw = len(text).to_bytes(_LENGTH_SIZE, "little") + text
    return raw, Header(tuple(entries), dict(metadata) if metadata is not None else None, len(raw))


def _fail(source: str, problem: str, **details: object) -> NoReturn:
    raise FormatError(f"{source}: {problem}", file=source, **details)


def _header_length(head: bytes, file_size: int, source: str) -> int:
    """The header's length, checked against the file, from the file's first bytes (8 at least, if it has them)."""
    if file_size < _LENGTH_SIZE or len(head) < _LENGTH_SIZE:
        _fail(source, sniff.foreign(head) or f"{file_size:,} bytes are too few for safetensors; it was cut off")
    length = int.from_bytes(head[:_LENGTH_SIZE], "little")
    if length == 0 and not head.strip(b"\0"):
        _fail(source, sniff.foreign(head) or "the header is empty")
    if length > MAX_HEADER_SIZE or length > file_size - _LENGTH_SIZE:
        # No text and no other format's magic number is a length that fits, so only misfits are worth a look.
        problem = sniff.foreign(head)
        if problem is None and head.startswith(sniff.ZIP_MAGIC):
            problem = "this is a zip archive (a torch file?) under the name of safetensors; give it its own suffix"
        if problem is None and length > MAX_HEADER_SIZE:
            problem = (
                f"the header would be {length:,} bytes long, the format's maximum is {MAX_HEADER_SIZE:,}; "
                "this is no safetensors file, or it is damaged"
            )
        if problem is None:
            problem = (
                f"the header is {count(length, 'byte')} long, but the file ends {file_size - _LENGTH_SIZE:,} bytes "
                "after its length; it was cut off, download or copy it again"
            )
        _fail(source, problem)
    return length


def _parse_metadata(value: object, source: str) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        _fail(source, f"{METADATA_KEY} is {_kind(value)}, not an object of strings")
    metadata: dict[str, str] = {}
    for key, item in value.items():
        if not isinstance(item, str):
            _fail(source, f"{METADATA_KEY} may hold strings only, but {show(key)} is {_kind(item)}")
        if not (is_unicode(key) and is_unicode(item)):
            _fail(source, f"{METADATA_KEY} holds a lone surrogate at {show(key)}, which is not Unicode text")
        metadata[key] = item
    return metadata


def _parse_entry(name: str, info: object, source: str) -> TensorEntry:
    def fail(problem: str) -> NoReturn:
        _fail(source, f"tensor {show(name)}: {problem}", tensor=name)

    def integers(key: str, items: object) -> tuple[int, ...]:
        if not isinstance(items, list):
            fail(f"its {key} is {_kind(items)}, not a list of integers")
        for item in items:
            if type(item) is not int or not 0 <= item < _LIMIT:
                fail(f"its {key} holds {show(item)}; only integers from 0 to 2^63 - 1 are allowed")
        return tuple(items)

    if not is_unicode(name):
        fail("its name holds a lone surrogate, which is not Unicode text")
    if not isinstance(info, dict):
        fail(f"its entry is {_kind(info)}, not an object")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in info]
    if missing:
        fail(f"its entry lacks {listing(missing)}")
    dtype = info["dtype"]
    if not isinstance(dtype, str):
        fail(f"its dtype is {_kind(dtype)}, not a string")
    shape = integers("shape", info["shape"])
    offsets = integers("data_offsets", info["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"its data_offsets are {show(offsets)}; they must be a start and an end that is not before it")
    try:
        size = _byte_size(dtype, shape)
    except ValueError as error:
        fail(f"it {error}")
    start, end = offsets
    if size != end - start:
        fail(
            f"{dtype} {show(shape)} takes {count(size, 'byte')}, but its data_offsets {show(offsets)} give it "
            f"{count(end - start, 'byte')}"
        )
    return TensorEntry(name, dtype, shape, start, end)


def _byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. The ValueError's message continues a sentence that begins with "it"."""
    bits = BITS.get(dtype)
    if bits is None:
        raise ValueError(f"has the dtype {show(dtype)}, which safetensors 0.8 does not know")
    # A dimension of 0 counts as 1 here: the strides of an empty tensor must be representable, too.
    extent = 1
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise ValueError(f"has {show(dim)} in its shape, where only integers from 0 are allowed")
        extent *= max(dim, 1)
        if extent * bits >= 8 * _LIMIT:
            raise ValueError(f"has the shape {show(tuple(shape))}, which overflows: it is 2^63 bytes or more")
    total = 0 if 0 in shape else extent * bits
    if total % 8:
        raise ValueError(f"is {dtype} {show(tuple(shape))}, {total} bits, which do not fill whole bytes")
    return total // 8


def _check_cover(header: Header, file_size: int, source: str) -> None:
    end = 0
    before = "the first one must start"
    for entry in header.entries:
        if entry.start != end:
            gap = (
                f"{entry.start - end:,} bytes between them belong to no tensor" if entry.start > end else "they overlap"
            )
            _fail(
                source,
                f"tensor {show(entry.name)} starts at byte {entry.start:,} of the data, but {before} at {end:,}: {gap}",
                tensor=entry.name,
            )
        end, before = entry.end, f"tensor {show(entry.name)} before it ends"
    present = file_size - header.data_offset
    if present < end:
        _fail(
            source,
            f"the tensors take {count(end, 'byte')}, but only {count(present, 'byte')} follow the header: "
            f"{end - present:,} are missing; the file was cut off, download or copy it again",
        )
    if present > end:
        _fail(
            source,
            f"the tensors take {count(end, 'byte')}, but {count(present, 'byte')} follow the header: "
            f"the last {present - end:,} belong to no tensor; the file is damaged, download or copy it again",
        )


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if value is None:
        return "null"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _quote(text: str) -> str:
    if not is_unicode(text):
        raise FormatError(f"cannot write {show(text)}: it holds a lone surrogate, which is not Unicode text")
    return json.dumps(text, ensure_ascii=False)
