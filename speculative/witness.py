"""A loaded model as the probe's Target, in plain torch: reads texts, and writes some.  Drafts none.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cache.pages import Pages
from cache.prefix import BLOCK
from engine.attention.cpu import CpuAttention
from engine.batch import Batch
from engine.noise import gumbel

if TYPE_CHECKING:
    from engine.model_config import ModelConfig
    from engine.models import Hidden
    from engine.models.llama import Llama

TEXTS, LENGTH = 8, 32  # what is written for a probe: tokens in a row, side by side
SEED = 20260301


class Witness:
    """Runs whole texts and short continuations through a model, in pages of its own."""

    def __init__(self, model: Llama, shape: ModelConfig) -> None:
        """`model` is not changed: a shallow copy reads other layers."""
        self.layers, self._shape = shape.layers, shape
        self._model = copy.copy(model)
        self._dtype, self._device = model.embedding.dtype, model.embedding.device

    @torch.inference_mode()
    def read(self, tokens: list[int], boundaries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See speculative/probe.py's Target."""
        self._model.taps = tuple(boundary - 1 for boundary in boundaries)
        with self._device:
            pages = self._pages(1, len(tokens))
            hidden = self._forward(pages, [tokens], 0)
            taps = hidden.taps
            assert taps is not None
            return taps, self._model.logits(hidden.last).argmax(dim=-1)

    @torch.inference_mode()
    def write(self, starts: list[list[int]], length: int = LENGTH) -> list[list[int]]:
        """Go on behind each of `starts`, all equally long, by `length` ids drawn at temperature 1.

        Drawn, because greedy texts from a short start soon repeat themselves, and a head that
        guesses repetitions shows nothing.
        """
        self._model.taps = ()
        with self._device:
            return self._written(starts, length)

    def _written(self, starts: list[list[int]], length: int) -> list[list[int]]:
        count = len(starts)
        pages = self._pages(count, len(starts[0]) + length)
        texts, rows = [list(start) for start in starts], starts
        choices = torch.arange(count)
        seeds = torch.full((count,), SEED)
        for _ in range(length):
            begin = len(texts[0]) - len(rows[0])
            last = self._forward(pages, rows, begin).last.view(count, len(rows[0]), -1)[:, -1]
            logits = self._model.logits(last).float()
            places = torch.full((count,), len(texts[0]))
            noise = gumbel(seeds, choices, places, logits.shape[-1], torch.float32)
            rows = (logits + noise).argmax(dim=-1)[:, None].tolist()
            for text, (token,) in zip(texts, rows, strict=True):
                text.append(token)
        return texts

    def _pages(self, count: int, length: int) -> Pages:
        shape = self._shape
        blocks = -(-length // BLOCK)
        pages = Pages(
            shape.layers, count * blocks, BLOCK, shape.kv_heads, shape.head_dim, self._dtype,
            self._device,
        )
        pages.data.zero_()
        return pages

    def _forward(self, pages: Pages, rows: list[list[int]], start: int) -> Hidden:
        """`rows`, equally many ids of every text, at positions from `start` on."""
        shape, count, width = self._shape, len(rows), len(rows[0])
        each = pages.blocks // count
        places = torch.arange(start, start + width)
        firsts = torch.arange(count)[:, None] * each * BLOCK
        none = torch.empty(0, dtype=torch.int64)
        used = -(-(start + width) // BLOCK)
        batch = Batch(
            torch.tensor(rows).flatten(), places.repeat(count), (firsts + places).flatten(),
            [start] * count, [width] * count,
            [list(range(i * each, i * each + used)) for i in range(count)], none, [0] * count,
        )
        attention = CpuAttention(shape.heads, shape.kv_heads, shape.head_dim, BLOCK, self._dtype)
        attention.prepare(batch)
        return self._model.forward(batch, pages.data, attention)
