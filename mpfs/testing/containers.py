"""GGUF, .npz, ONNX and NeuroChem files for tests: hypothesis strategies for valid ones, ways to damage them, and bombs.

As in `mpfs.testing.checkpoints`: what the strategies make is valid and often odd, and no reader may take what a damage
makes for whole. Needs hypothesis.
"""

from __future__ import annotations

import bz2
import io
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import strategies as st

from mpfs.formats.gguf import TYPES
from mpfs.formats.onnx import DTYPES as ONNX_DTYPES
from mpfs.objects.dtypes import nbytes

GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q4_0, GGUF_Q4_K = 0, 1, 30, 2, 12


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor: its name, ggml type, dimensions (the fastest first, as in the file) and bytes."""

    name: str
    type: int
    dimensions: tuple[int, ...]
    data: bytes


def gguf_nbytes(code: int, dimensions: Sequence[int]) -> int:
    """Bytes of a tensor of a ggml type."""
    kind = TYPES[code]
    return prod(dimensions) // kind.block * kind.size


def gguf_string(text: str) -> bytes:
    """A string as GGUF writes it."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: object) -> bytes:
    """A metadata value with its type before it: bool, int (u32), float (f32), str, or a list of one of them."""
    kinds: dict[type, tuple[int, Callable[[object], bytes]]] = {
        bool: (7, lambda item: struct.pack("<?", item)),
        int: (4, lambda item: struct.pack("<I", item)),
        float: (6, lambda item: struct.pack("<f", item)),
        str: (8, lambda item: gguf_string(str(item))),
    }
    if isinstance(value, list):
        code, write = kinds[type(value[0]) if value else int]
        return struct.pack("<IIQ", 9, code, len(value)) + b"".join(write(item) for item in value)
    code, write = kinds[type(value)]
    return struct.pack("<I", code) + write(value)


def gguf_bytes(
    tensors: Sequence[GGUFTensor],
    metadata: Mapping[str, object] | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
    filler: bytes = b"\0",
    padded_end: bool = True,
) -> bytes:
    """A GGUF file. `filler` is the byte of the padding, `padded_end` whether there is some after the last tensor."""
    pairs = dict(metadata or {})
    if alignment != 32:
        pairs["general.alignment"] = alignment

    def pad(data: bytes) -> bytes:
        return data + filler * (-len(data) % alignment)

    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    for key, value in pairs.items():
        head += gguf_string(key) + gguf_value(value)
    body = b""
    for tensor in tensors:
        body = pad(body)
        head += gguf_string(tensor.name) + struct.pack("<I", len(tensor.dimensions))
        head += b"".join(struct.pack("<Q", dim) for dim in tensor.dimensions)
        head += struct.pack("<IQ", tensor.type, len(body))
        body += tensor.data
    return pad(head) + (pad(body) if padded_end else body)


@st.composite
def gguf_tensors(draw: st.DrawFn) -> list[GGUFTensor]:
    """Tensors of different names, of every type."""
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), unique=True, max_size=5))
    tensors = []
    for name in names:
        code = draw(st.sampled_from(sorted(TYPES)))
        block = TYPES[code].block
        dimensions = draw(st.sampled_from([(block,), (block * 3, 5), (block * 2, 1, 3, 2), (block * 17, 4)]))
        data = random.Random(draw(st.integers(0, 2**32 - 1))).randbytes(gguf_nbytes(code, dimensions))
        tensors.append(GGUFTensor(name, code, dimensions, data))
    return tensors


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """A GGUF file."""
    value = (
        st.booleans()
        | st.integers(0, 2**32 - 1)
        | st.floats(width=32)
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    )
    metadata = draw(
        st.dictionaries(
            st.text("abc._", min_size=1, max_size=9),
            value | st.lists(st.text("xyz", max_size=4), max_size=5) | st.lists(st.integers(0, 9), max_size=5),
            max_size=5,
        )
    )
    return gguf_bytes(
        draw(gguf_tensors()),
        metadata,
        version=draw(st.sampled_from([2, 3])),
        alignment=draw(st.sampled_from([8, 32, 64])),
        filler=draw(st.sampled_from([b"\0", b"\xaa"])),
        padded_end=draw(st.booleans()),
    )


def _with(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + data + content[offset + len(data) :]


GGUF_DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the magic": lambda content: content[:3],
    "cut in the header": lambda content: content[:40],
    "cut in the data": lambda content: content[:-40],
    "stray bytes": lambda content: content + bytes(64),
    "version 1": _with(4, struct.pack("<I", 1)),
    "version 99": _with(4, struct.pack("<I", 99)),
    "big-endian": _with(4, struct.pack(">I", 3)),
    "too many tensors": _with(8, struct.pack("<Q", 2**40)),
    "too few tensors": _with(8, struct.pack("<Q", 1)),
    "too many pairs": _with(16, struct.pack("<Q", 2**60)),
    "key too long": _with(24, struct.pack("<Q", 2**62)),
    "git-lfs pointer": lambda content: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    ),
    "web page": lambda content: b"<!DOCTYPE html><html><body>Access denied</body></html>",
    "zeros": lambda content: bytes(len(content)),
}
"""Ways to break a GGUF file that has metadata, and at least two tensors that are not empty."""


# -- npz ------------------------------------------------------------------------------------------------------------


def npz_bytes(arrays: Mapping[str, np.ndarray], *, compressed: bool = False) -> bytes:
    """A .npz archive as NumPy writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return stream.getvalue()


@st.composite
def npz_arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Arrays of every dtype, order and byte order that there may be in an archive."""
    names = draw(st.lists(st.text("abc.é重_", min_size=1, max_size=8), unique=True, min_size=1, max_size=4))
    arrays = {}
    for name in names:
        kind = draw(st.sampled_from(["f2", "f4", "f8", "c8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"]))
        dtype = np.dtype(draw(st.sampled_from("<>")) + kind)
        shape = draw(st.sampled_from([(), (0,), (7,), (3, 5), (2, 3, 4), (1500,)]))
        data = random.Random(draw(st.integers(0, 2**32 - 1))).randbytes(dtype.itemsize * prod(shape))
        array = np.frombuffer(data, dtype).reshape(shape)
        if kind == "b1":
            array = np.frombuffer(bytes(byte & 1 for byte in data), dtype).reshape(shape)
        arrays[name] = np.asfortranarray(array) if draw(st.booleans()) else array
    return arrays


def _in_the_middle(content: bytes) -> bytes:
    """One bit of an array's data, which its checksum covers."""
    at = content.index(b"\x93NUMPY") + 128
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


NPZ_DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-10],
    "cut in the data": lambda content: content[: len(content) // 2],
    "a bit of the data": _in_the_middle,
    "no .npy header": lambda content: content.replace(b"\x93NUMPY", b"\x93NUMPI"),
    "header is no dictionary": lambda content: content.replace(b"{'descr'", b"['descr'"),
    "web page": lambda content: b"<!DOCTYPE html><html><body>Access denied</body></html>",
    "git-lfs pointer": lambda content: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    ),
}
"""Ways to break an uncompressed archive, with an array of at least one byte as its first."""


# -- ONNX -----------------------------------------------------------------------------------------------------------


def protobuf_varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def protobuf_number(field: int, value: int) -> bytes:
    """A field that is a number."""
    return protobuf_varint(field << 3) + protobuf_varint(value)


def protobuf_bytes(field: int, content: bytes) -> bytes:
    """A field that is bytes, a text or a message."""
    return protobuf_varint(field << 3 | 2) + protobuf_varint(len(content)) + content


def onnx_initialiser(
    name: str, code: int, shape: tuple[int, ...], content: bytes, field: int = 9, packed: bool = False
) -> bytes:
    """An initialiser of an ONNX graph; `field` is where its numbers are (9: raw_data), `packed` how its shape is written."""
    dims = protobuf_bytes(1, b"".join(map(protobuf_varint, shape)))
    if not packed:
        dims = b"".join(protobuf_number(1, dim) for dim in shape)
    return protobuf_bytes(
        5, dims + protobuf_number(2, code) + protobuf_bytes(8, name.encode()) + protobuf_bytes(field, content)
    )


def onnx_bytes(*initialisers: bytes) -> bytes:
    """An ONNX model with these initialisers, a node, and fields that nobody knows."""
    node = protobuf_bytes(1, protobuf_bytes(1, b"x") + protobuf_bytes(4, b"Add"))
    graph = node + b"".join(initialisers) + protobuf_bytes(2, b"graph")
    begin = protobuf_number(1, 8) + protobuf_bytes(2, b"producer")
    return (
        begin
        + protobuf_bytes(7, graph)
        + protobuf_bytes(8, protobuf_number(2, 17))
        + protobuf_varint(90 << 3 | 5)
        + b"1234"
    )


@st.composite
def onnx_models(draw: st.DrawFn) -> bytes:
    """An ONNX model with at least one initialiser that is a run of numbers, in each of the ways that there are."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    parts = []
    for number, name in enumerate(draw(st.lists(text, unique=True, min_size=1, max_size=5))):
        code = draw(st.sampled_from(sorted(ONNX_DTYPES)))
        shape = draw(st.sampled_from([(), (0,), (3,), (2, 5), (1, 2, 3), (700,)]))
        content = random.Random(draw(st.integers(0, 2**32 - 1))).randbytes(nbytes(ONNX_DTYPES[code], shape))
        if ONNX_DTYPES[code] == "BOOL":
            content = bytes(byte & 1 for byte in content)
        typed = {"F32": 4, "F64": 10}.get(ONNX_DTYPES[code])
        field = typed if typed is not None and content and draw(st.booleans()) else 9
        parts.append(onnx_initialiser(name, code, shape, content, field, draw(st.booleans())))
        if number and draw(st.booleans()):
            parts[-1] = onnx_initialiser(name, 8, (1,), b"a text", 6)
    return onnx_bytes(*parts)


ONNX_DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "stray bytes": lambda content: content + b"\xff",
    "a group": lambda content: content + protobuf_varint(9 << 3 | 3),
    "no field": lambda content: b"\x00" + content,
    "a number without end": lambda content: b"\x08" + b"\xff" * 11 + content,
    "longer than the file": lambda content: content + protobuf_varint(7 << 3 | 2) + protobuf_varint(2**62),
    "a graph twice": lambda content: content + content,
    "web page": lambda content: b"<!DOCTYPE html><html><body>Access denied</body></html>",
    "git-lfs pointer": lambda content: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    ),
}
"""Ways to break an ONNX model with initialisers."""


# -- NeuroChem ------------------------------------------------------------------------------------------------------


def neurochem_text(inputs: int, files: Sequence[tuple[int, str, str]]) -> str:
    """The description of a network with `inputs` inputs, and for each layer nodes, and files of weights and biases."""
    text = f"inputsize={inputs};\natom_net H $\n"
    for nodes, weights, biases in files:
        text += f"layer [\nnodes={nodes};\nactivation=9;\nblocksize={inputs};\n"
        text += f"weights=FILE:{weights}[{nodes * inputs}];\nbiases=FILE:{biases}[{nodes}];\n]\n"
        inputs = nodes
    return text + "$\n"


def neurochem_packed(text: str) -> bytes:
    """A description as it is on disk."""
    return f"{len(text)}=\n".encode() + bz2.compress(text.encode()) + b"\0"


@st.composite
def neurochem_networks(draw: st.DrawFn) -> dict[str, bytes]:
    """A directory of networks: descriptions, packed or not, and the raw files that they name."""
    files: dict[str, bytes] = {}
    for stem in draw(st.lists(st.sampled_from(["ANN-H", "ANN-C", "net", "x.y"]), unique=True, min_size=1, max_size=3)):
        inputs = wide = draw(st.integers(1, 40))
        layers = []
        for number, nodes in enumerate(draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)), start=1):
            names = f"{stem}.nnf-l{number}.wparam", f"{stem}.nnf-l{number}.bparam"
            layers.append((nodes, *names))
            rng = random.Random(draw(st.integers(0, 2**32 - 1)))
            files[names[0]], files[names[1]] = rng.randbytes(4 * nodes * wide), rng.randbytes(4 * nodes)
            wide = nodes
        text = neurochem_text(inputs, layers)
        files[f"{stem}.nnf"] = neurochem_packed(text) if draw(st.booleans()) else text.encode()
    return files


NEUROCHEM_DAMAGES: Mapping[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: neurochem_packed(text)[:-20],
    "text cut": lambda text: text.encode()[: len(text) // 2],
    "no layers": lambda text: neurochem_packed(text.partition("layer")[0]),
    "no inputs": lambda text: neurochem_packed(text.replace("inputsize", "outputsize")),
    "a key twice": lambda text: neurochem_packed(text.replace("nodes=", "nodes=1;nodes=", 1)),
    "another number": lambda text: neurochem_packed(text.replace("nodes=", "nodes=1", 1)),
    "another file": lambda text: neurochem_packed(text.replace("FILE:", "FILE:x")),
    "one file twice": lambda text: neurochem_packed(text.replace("l2.bparam", "l1.bparam")),
    "outside": lambda text: neurochem_packed(text.replace("FILE:", "FILE:../", 1)),
    "absolute": lambda text: neurochem_packed(text.replace("FILE:", "FILE:/etc/", 1)),
    "a bomb": lambda text: neurochem_packed(text + " " * (1 << 20)),
    "too long": lambda text: text.encode() + b" " * (1 << 17),
    "not text": lambda text: b"\xff" + text.encode(),
    "web page": lambda text: b"<!DOCTYPE html><html><body>Access denied</body></html>",
}
"""Ways to break the description of a network of two layers of equal sizes, whose files are called `….l1.wparam` and so on."""


# -- bombs ----------------------------------------------------------------------------------------------------------


def deflated_zeros(head: bytes, size: int) -> bytes:
    """A raw deflate stream (RFC 1951) of `head` and then `size` zeros, a thousandth as long and made in no time."""
    chunk = 1 << 24
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    zeros = packer.compress(bytes(chunk)) + packer.flush(zlib.Z_FULL_FLUSH)
    return begin + zeros * (size // chunk) + packer.compress(bytes(size % chunk)) + packer.flush()


def zip_bomb(members: Mapping[str, tuple[bytes, int]]) -> bytes:
    """A zip archive whose members unpack to some bytes and then as many zeros. Their checksums are wrong."""
    body = directory = b""
    for name, (head, size) in members.items():
        packed = deflated_zeros(head, size)
        common = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, 1, len(packed), len(head) + size, len(name), 0)
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHLL", 0, 0, 0, 0, len(body))
        directory += name.encode()
        body += b"PK\x03\x04" + common + name.encode() + packed
    end = struct.pack("<HHHHLLH", 0, 0, len(members), len(members), len(directory), len(body), 0)
    return body + directory + b"PK\x05\x06" + end


def tar_gz_bomb(name: str, size: int) -> bytes:
    """A .tar.gz of one file of zeros."""
    info = tarfile.TarInfo(name)
    info.size = size
    head = info.tobuf()
    trailer = struct.pack("<LL", 0, (len(head) + size) & 0xFFFFFFFF)
    return b"\x1f\x8b\x08\0\0\0\0\0\x02\xff" + deflated_zeros(head, size) + trailer
