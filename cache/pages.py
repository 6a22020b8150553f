"""The tensor memory behind KV blocks.  Knows no tokens, users or keys; see blocks.py for those."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Pages:
    """K and V of every block and layer, in one tensor.

        data[layer, block, 0, offset, head, :]   keys
        data[layer, block, 1, offset, head, :]   values

    A block's keys lie together, and so do its values: gathering blocks then gives contiguous keys
    and contiguous values, which batched products on a CPU need (measured: a factor of three), and
    which paged kernels on a GPU read in whole tiles.  The memory is not touched until it is
    written; with `poison` it is NaN, so that a read before the write shows in a test.
    """

    def __init__(
        self,
        layers: int,
        blocks: int,
        size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ) -> None:
        shape = (layers, blocks, 2, size, kv_heads, head_dim)
        assert all(extent > 0 for extent in shape), f"pages of shape {shape}"
        self.blocks = blocks
        self.size = size  # tokens a block
        try:
            self.data = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            wanted = math.prod(shape) * dtype.itemsize
            raise MemoryError(
                f"The KV pages need {wanted / 2**30:,.1f} GiB on {device}, which cannot be had. "
                "Start with a smaller --cache.kv-bytes."
            ) from error
        if poison:
            self.data.fill_(math.nan)

    @staticmethod
    def bytes_per_block(
        layers: int, size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers."""
        return layers * size * 2 * kv_heads * head_dim * dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return self.data.nbytes

    def copy(self, source: int, target: int) -> None:
        """Copy block `source` onto block `target` in all layers, bit for bit."""
        for block in (source, target):
            assert 0 <= block < self.blocks, f"copy {source} -> {target} of {self.blocks}"
        self.data[:, target].copy_(self.data[:, source])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in all layers: attention masks what is stale, but 0 * NaN is NaN."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.data.device)
        self.data.index_fill_(1, index, 0)
