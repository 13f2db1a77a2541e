"""NeuroChem networks, as the ANI models were published: a description (`.nnf`), and raw float32 files beside it.

Format, as torchani 1.2 reads it: the description is a text, compressed with bzip2 behind its length and `=` and a line feed; a
block `layer [ … ]` a layer has `nodes=N;`, `weights=FILE:NAME[COUNT];` and `biases=FILE:NAME[COUNT];`. Weights are (nodes,
inputs) in row-major order, little-endian; the first layer has `inputsize` inputs, and each other one the nodes before it.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from mpfs.errors import FormatError, UnsafeInputError
from mpfs.formats import sniff
from mpfs.formats.location import Location, opened
from mpfs.formats.messages import count, show

SUFFIX = ".nnf"
DTYPE = "F32"

MAX_DESCRIPTION_BYTES = 1 << 16
"""The longest description, packed or not. Those of ANI-1x have about 1 kB."""

_PACKED = re.compile(rb"\d+=\n(?=BZh)")
_LAYER = re.compile(r"\blayer\s*\[")
_NUMBER = r"{}\s*=\s*(\d{{1,9}})\s*;"
_FILE = r"{}\s*=\s*FILE:([^;\[\]\s]+)\[(\d{{1,12}})\]\s*;"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a network: its name, its file beside the description, and its shape; float32."""

    name: str
    file: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its file."""
        return 4 * prod(self.shape)


def read_network(location: Location) -> tuple[Parameter, ...]:
    """The tensors of a network: `STEM.lN.weight` and `.bias` of `STEM.nnf`, layers counted from 1. Their files are not
    looked at.

    Raises:
        NotFoundError: there is no such file.
        BadInputError: it cannot be read.
        UnsafeInputError: it names a file that is not beside it.
        FormatError: it is no such description, or its numbers contradict each other.
    """
    source = str(location)
    text = _text(location, source)
    stem = location.name.removesuffix(SUFFIX)
    found = list(_parameters(text, stem, source))
    files = [parameter.file for parameter in found]
    if len(set(files)) != len(files):
        _fail(source, "two of its layers have the same file")
    if not found:
        _fail(source, "this is no NeuroChem network: it has no layers")
    return tuple(found)


def _text(location: Location, source: str) -> str:
    with opened(location) as (file, size):
        if size > MAX_DESCRIPTION_BYTES:
            _fail(source, f"{size:,} bytes are too many for the description of a network")
        content = file.read(size)
    packed = _PACKED.match(content)
    try:
        if packed:
            reader = bz2.BZ2Decompressor()
            content = reader.decompress(content[packed.end() :], MAX_DESCRIPTION_BYTES)
            if not reader.eof:
                _fail(source, "its text was cut off, or is too long; copy it again")
        return content.decode("ascii")
    except (OSError, UnicodeDecodeError, ValueError):
        _fail(source, sniff.foreign(content[: sniff.HEAD_SIZE]) or "this is no NeuroChem network, or it is damaged")


def _parameters(text: str, stem: str, source: str) -> Iterator[Parameter]:
    head, *layers = _LAYER.split(text)
    inputs = int(_one(_NUMBER.format("inputsize"), head, "inputsize", source)[1])
    for number, layer in enumerate(layers, start=1):
        where = f"layer {number}"
        nodes = int(_one(_NUMBER.format("nodes"), layer, f"nodes of {where}", source)[1])
        for key, name, shape in (("weights", "weight", (nodes, inputs)), ("biases", "bias", (nodes,))):
            match = _one(_FILE.format(key), layer, f"{key} of {where}", source)
            file, stated = match[1], int(match[2])
            if "/" in file or "\\" in file or file in (".", ".."):
                raise UnsafeInputError(f"{source}: it names the file {show(file)}, which is not beside it", file=source)
            if prod(shape) != stated:
                _fail(source, f"{key} of {where} are said to be {stated:,}, but {show(shape)} takes {prod(shape):,}")
            yield Parameter(f"{stem}.l{number}.{name}", file, shape)
        inputs = nodes


def _one(pattern: str, text: str, what: str, source: str) -> re.Match[str]:
    found = list(re.finditer(rf"(?<![A-Za-z]){pattern}", text))
    if len(found) != 1:
        _fail(source, f"this is no NeuroChem network, or it is damaged: it has {count(len(found), 'value')} for {what}")
    return found[0]


def _fail(source: str, problem: str) -> NoReturn:
    raise FormatError(f"{source}: {problem}", file=source)
