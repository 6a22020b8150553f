"""A decoder layer as fused kernels on buffers that never move.  See engine/ops.py for what each is.

A captured graph replays addresses, so activations live in buffers made once for the largest step;
a step of N tokens uses their first N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.picks import Pick, Picks
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.attention_plan import SHORT
from engine.kernels.chunk_attention import chunk_attention
from engine.kernels.decode_attention import DecodeScratch, decode_attention
from engine.kernels.embed import embed
from engine.kernels.launch import library
from engine.kernels.norm import norm as rms_norm
from engine.kernels.overlap import OFF
from engine.kernels.project import project
from engine.kernels.rope import rotate_and_store
from engine.layers import Linear, Norm, rotary_frequencies

if TYPE_CHECKING:
    from engine.model_config import ModelConfig

EACH = 32  # attention programs a KV head and token, up to what fills the device


@dataclass(frozen=True, slots=True)
class StepViews:
    """One bucket's integers on the device; all int32."""

    tokens: Tensor  # [N]
    origin: Tensor  # [N] slot whose newest token this is, or -1
    positions: Tensor  # [N]
    kv: Tensor  # [N] page slot: block * size + offset
    attention: AttentionMeta


@dataclass(frozen=True, slots=True)
class _Turn:
    """Project, rotate, store, by one kernel or by cuBLAS and another: the same bits."""

    cos: Tensor  # [max_len, head_dim / 2] float32
    sin: Tensor
    overlap: int

    def run(
        self, pick: Pick, x: Tensor, weight: Tensor, bias: Tensor | None, both: Tensor,
        pages: Tensor, positions: Tensor, kv: Tensor, normed: Norm | None,
    ) -> None:  # fmt: skip
        """See kernels/project.py; `pages` are one layer's."""
        turn = (pages, positions, kv, self.cos, self.sin)
        if pick is not None:
            gain, eps = normed or (None, 0.0)
            project(x, weight, both, *turn, pick, bias=bias, gain=gain, eps=eps,
                    overlap=self.overlap)  # fmt: skip
            return
        assert bias is None and normed is None, "picks keep cuBLAS away from biases and norms"
        library(x, weight, both)
        rotate_and_store(both, *turn, overlap=self.overlap)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The same for measuring: a prompt from position 0 on, stored in the first blocks.

    (All tokens in one place would be quick to write in a way that no step is.)
    It knows no KernelOps, which know the picks that know it: in a circle, what was tried on a few
    pages would keep its memory until Python looks for circles, long after pages were sized.
    """

    turn: _Turn
    pages: Tensor
    positions: Tensor  # [most] int32
    slots: Tensor  # [most] int32

    def run(self, pick: Pick, x: Tensor, weight: Tensor, both: Tensor, normed: Norm | None) -> None:
        """For `Picks.turn`."""
        positions, slots = self.positions[: x.shape[0]], self.slots[: x.shape[0]]
        self.turn.run(pick, x, weight, None, both, self.pages, positions, slots, normed)


class KernelOps:
    """The operations of one step after the other; `begin` says which bucket comes next."""

    def __init__(
        self, shape: ModelConfig, pages: Tensor, last: Tensor, picks: Picks, scratch: DecodeScratch,
        *, most: int, max_len: int, split: int, workers: int, taps: int = 0,
    ) -> None:  # fmt: skip
        """`pages` [layers, blocks + 1, 2, size, kv_heads, head_dim]; `most` tokens a step."""
        self._shape, self._pages, self._last, self._picks = shape, pages, last, picks
        self._scratch, self._split, self._workers = scratch, split, workers
        self._overlap = picks.overlap if pages.is_cuda else OFF
        self._scale = 1 / math.sqrt(shape.head_dim)
        device, dtype = pages.device, pages.dtype
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim

        def rows(width: int) -> Tensor:
            return torch.zeros(most, width, dtype=dtype, device=device)

        #: where the residual stream lies behind the last layer
        self.x = rows(shape.hidden)
        # Where it lies before: behind each tap it goes on elsewhere, and what it was stays there.
        self._rooms = [*(rows(shape.hidden) for _ in range(taps)), self.x]
        self._room = rows(shape.hidden)  # of normed rows
        self._qkv = rows((heads + 2 * kv_heads) * dim)
        self._mixed = rows(heads * dim)
        self._both = rows(2 * shape.intermediate)
        self._inner = rows(shape.intermediate)
        angles = torch.outer(
            torch.arange(max_len, dtype=torch.float64), rotary_frequencies(shape)
        )
        cos, sin = (table.float().to(device).contiguous() for table in (angles.cos(), angles.sin()))
        self._turn = _Turn(cos, sin, self._overlap)
        run = torch.arange(most, dtype=torch.int32, device=device)
        room = pages.shape[1] * pages.shape[3]
        picks.turn = _Trial(self._turn, pages[0], run % max_len, run % room).run
        self._views: StepViews | None = None
        self._count = self._chunks = self._taken = 0
        self._beyond: Tensor | None = None  # where the next sum goes, if not in place

    @property
    def _step(self) -> StepViews:
        assert self._views is not None, "begin was not called"
        return self._views

    def begin(self, views: StepViews, chunks: int) -> None:
        """The next step's integers; `chunks` is the launch's bucket of chunk items, 0 = none."""
        self._views = views
        self._count, self._chunks, self._taken = views.tokens.shape[0], chunks, 0
        self._beyond = None

    def end(self, last: Tensor) -> None:
        """The step's layers are through: see that the last one's output lies in `x`."""
        if last.data_ptr() != self.x.data_ptr():  # it was kept itself
            self.x[: self._count].copy_(last)

    def embed(self, table: Tensor) -> Tensor:
        """See Ops."""
        step, out = self._step, self._rooms[0][: self._count]
        embed(step.tokens, step.origin, self._last, table, out, overlap=self._overlap)
        return out

    def _normed_by(self, x: Tensor, norm: Norm) -> tuple[Tensor, Norm | None]:
        """Rows for a product that reads normed ones, and the norm if it is left to the product."""
        if self._picks.norms(self._count):
            return x, norm
        out = self._room[: self._count]
        rms_norm(x, norm[0], out, norm[1], overlap=self._overlap)
        return out, None

    def attend(self, layer: int, x: Tensor, norm: Norm, qkv: Linear) -> Tensor:
        """See Ops."""
        step, count, pages = self._step, self._count, self._pages[layer]
        both, out = self._qkv[:count], self._mixed[:count]
        x, rest = self._normed_by(x, norm)
        pick = self._picks.pick(qkv, f"turn{self._shape.head_dim}", count, both.dtype)
        assert qkv.weight is not None, "a packed weight cannot run here"
        self._turn.run(pick, x, qkv.weight, qkv.bias, both, pages, step.positions, step.kv, rest)
        decode_attention(
            both, pages, out, step.attention, self._scratch, scale=self._scale,
            split=self._split, workers=min(self._workers, EACH * (count + 1)),
            overlap=self._overlap,
        )
        if self._chunks:
            chunk_attention(
                both, pages, out, step.attention, scale=self._scale, most=self._chunks,
                overlap=self._overlap,
            )
        return out

    def add(self, x: Tensor, inner: Tensor, linear: Linear) -> Tensor:
        """See Ops; in place, unless `x` is to be kept."""
        out, self._beyond = x if self._beyond is None else self._beyond, None
        self._picks.run(inner, linear, out, residual=x)
        return out

    def gated(self, x: Tensor, norm: Norm, gate_up: Linear) -> Tensor:
        """See Ops; the projection's rows take turns (`join_gate`)."""
        out = self._inner[: self._count]
        x, rest = self._normed_by(x, norm)
        self._picks.run(x, gate_up, out, both=self._both[: self._count], norm=rest)
        return out

    def keep(self, x: Tensor) -> Tensor:
        """See Ops: nothing is copied, the next sum goes to another place."""
        self._taken += 1
        self._beyond = self._rooms[self._taken][: self._count]
        return x

    def kept(self, count: int) -> list[Tensor]:
        """[count, hidden] of each tap: the first rows of what was kept of the newest step."""
        return [room[:count] for room in self._rooms[:-1]]


def chunks_possible(tokens: int) -> bool:
    """Whether a step of so many tokens can hold a row that is no short one."""
    return tokens > SHORT
