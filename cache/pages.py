"""The tensor memory behind KV blocks.  Knows no tokens, users or keys; see blocks.py for those."""

from __future__ import annotations

import math

import torch


class Pages:
    """K and V of every block and layer, in one tensor.

        data[layer, slot, head, :]      slot = block.id * size + offset in the block
                          head 0 .. kv_heads-1 are K, kv_heads .. 2*kv_heads-1 are V

    Contiguous in the slot, so a run of consecutive blocks is one view.  The memory is not touched
    until it is written; with `poison` it is NaN, so that a read before the write shows in a test.
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
        shape = (layers, blocks * size, 2 * kv_heads, head_dim)
        assert all(extent > 0 for extent in shape), f"pages of shape {shape}"
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
        self._layers = list(self.data.unbind(0))

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

    def layer(self, index: int) -> torch.Tensor:
        """One layer's pages, a view [blocks * size, 2 * kv_heads, head_dim]."""
        return self._layers[index]

    def copy(self, source: int, target: int) -> None:
        """Copy block `source` onto block `target` in all layers, bit for bit."""
        blocks = self.data.shape[1] // self.size
        assert 0 <= min(source, target) and max(source, target) < blocks, (source, target, blocks)
        self._slots(target).copy_(self._slots(source))

    def _slots(self, block: int) -> torch.Tensor:
        return self.data[:, block * self.size : (block + 1) * self.size]
