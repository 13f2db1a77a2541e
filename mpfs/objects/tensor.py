"""A tensor: dtype, shape and the blocks that hold its bytes. Its name is the snapshot's business.

Leaving the name out lets a renamed or tied tensor be the same object (docs/decisions/0001).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from mpfs.objects import dtypes
from mpfs.objects.encoding import Json, decode, encode
from mpfs.objects.ids import BLOCK_ID_SIZE, BlockId

KIND = "tensor"


def first_element(dtype: str, block_size: int, index: int) -> int:
    """Index, in C order, of the first element of a tensor's block `index` (for packed dtypes: of its first byte)."""
    bits = dtypes.BITS[dtype]
    return index * block_size * 8 // bits if bits % 8 == 0 else index * block_size


@dataclass(frozen=True, slots=True)
class Tensor:
    """An immutable tensor.

    `blocks` are runs of `block_size` raw little-endian bytes in C order, the last one shorter. Tensors of equal
    shape, dtype and block size line up block by block. Raw byte strings (side files, file headers) are U8 vectors.
    """

    dtype: str
    shape: tuple[int, ...]
    block_size: int
    blocks: tuple[BlockId, ...]

    def __post_init__(self) -> None:
        if self.block_size <= 0 or any(dimension < 0 for dimension in self.shape):
            raise ValueError(f"{self.dtype} {list(self.shape)} in blocks of {self.block_size} bytes cannot be")
        if not set(map(len, self.blocks)) <= {BLOCK_ID_SIZE}:
            raise ValueError(f"a block id has {BLOCK_ID_SIZE} bytes")
        expected = -(-self.nbytes // self.block_size)
        if len(self.blocks) != expected:
            raise ValueError(
                f"{self.dtype} {list(self.shape)} needs {expected} blocks of {self.block_size} bytes, "
                f"not {len(self.blocks)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return dtypes.nbytes(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def block_nbytes(self, index: int) -> int:
        """Bytes of block `index`."""
        return min(self.block_size, self.nbytes - index * self.block_size)

    def block_start(self, index: int) -> int:
        """Index of the first element of block `index`; see `first_element`."""
        return first_element(self.dtype, self.block_size, index)

    def sized_blocks(self) -> Iterator[tuple[BlockId, int]]:
        """Every block with its size in bytes."""
        nbytes = self.nbytes
        for index, block in enumerate(self.blocks):
            yield block, min(self.block_size, nbytes - index * self.block_size)

    def encode(self) -> bytes:
        """The canonical encoding."""
        value: Json = {
            "kind": KIND,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "block_size": self.block_size,
            "blocks": b"".join(self.blocks).hex(),
        }
        return encode(value)

    @classmethod
    def decode(cls, data: bytes) -> Tensor:
        """Read a tensor back.

        Raises:
            ValueError: the bytes are not a tensor object.
        """
        value = decode(data, KIND)
        try:
            raw = bytes.fromhex(value["blocks"])
            blocks = tuple([raw[i : i + BLOCK_ID_SIZE] for i in range(0, len(raw), BLOCK_ID_SIZE)])
            return cls(value["dtype"], tuple(value["shape"]), value["block_size"], blocks)
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed tensor object: {error!r}") from error
