"""Paged attention kernels against float64 in torch, on the interpreter or the card.  No model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels import attention_plan as plan  # noqa: E402
from engine.kernels.attention_meta import AttentionMeta  # noqa: E402
from engine.kernels.chunk_attention import SHAPES, chunk_attention  # noqa: E402
from engine.kernels.decode_attention import DecodeScratch, decode_attention  # noqa: E402

SIZE, SPLIT = 64, 128
# The interpreter multiplies the bits of bf16 matrices, not their values: half precision there.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TYPES = [torch.float32, HALF]
SHORT_PLACES = [0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 255, 256, 300]


@dataclass
class Model:
    """A shape of attention."""

    heads: int
    kv_heads: int
    dim: int = 32
    dtype: torch.dtype = torch.float32


@dataclass
class Row:
    """`count` tokens from `start` on, of a sequence whose content `seed` decides."""

    seed: int
    start: int
    count: int
    shared: int = 0  # leading blocks that every row of the same seed holds in common


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Step:
    """Rows on the device: NaN where nothing was written, blocks in random order, padded tables."""

    def __init__(self, model: Model, rows: list[Row], split: int = SPLIT, padding: int = 3):
        self.model, self.rows, self.split = model, rows, split
        self.tile = plan.short_tile(model.heads // model.kv_heads)
        self.first = np.cumsum([0, *(row.count for row in rows)]).astype(np.int32)
        self.tokens = int(self.first[-1])
        self.longest = max(row.start + row.count for row in rows)
        width = -(-self.longest // SIZE)
        ids = np.random.default_rng(len(rows)).permutation(len(rows) * width + 1).tolist()
        pages = torch.full((len(ids), 2, SIZE, model.kv_heads, model.dim), math.nan)
        queries = torch.full((self.tokens + padding, model.heads * model.dim), math.nan)
        self.table = np.full((len(rows) + 1, width + 1), ids.pop(), np.int32)  # stale entries
        common: dict[int, list[int]] = {}
        self.content = []
        for i, row in enumerate(rows):
            stop = row.start + row.count
            blocks = common.get(row.seed, [])[: row.shared]
            blocks = blocks + [ids.pop() for _ in range(-(-stop // SIZE) - len(blocks))]
            common.setdefault(row.seed, blocks)
            self.table[i, : len(blocks)] = blocks
            content = noise(row.seed, self.longest + 1, 2, model.kv_heads, model.dim)[:stop]
            asked = noise(row.seed + 1, self.longest + 1, model.heads, model.dim)[:stop]
            for place, block in enumerate(blocks):
                part = content[place * SIZE : (place + 1) * SIZE].transpose(0, 1)
                pages[block, :, : part.shape[1]] = part
            queries[self.first[i] : self.first[i + 1]] = asked[row.start :].flatten(1)
            self.content.append(content.to(model.dtype))
        self.pages = pages.to(DEVICE, model.dtype)
        self.queries = queries.to(DEVICE, model.dtype)
        self._fill()

    def _fill(self) -> None:
        starts, counts = (
            np.array([getattr(row, name) for row in self.rows], np.int32)
            for name in ("start", "count")
        )
        most = plan.most_short_items(
            len(self.rows), plan.SHORT, self.longest, tile=self.tile, split=self.split
        )
        chunk_tile = SHAPES[self.model.dim].tile
        self.most = max(1, plan.most_chunk_items(len(self.rows), self.tokens, tile=chunk_tile))
        meta = AttentionMeta.allocate(
            slots=self.table.shape[0], width=self.table.shape[1], rows=len(self.rows),
            short_items=most, chunk_items=self.most, device=DEVICE,
        )
        short, chunks = np.full((2, most), 7, np.int32), np.full((2, self.most), 7, np.int32)
        meta.short_total[0] = plan.fill_short(
            starts, counts, short, tile=self.tile, split=self.split
        )
        meta.chunk_total[0] = plan.fill_chunks(starts, counts, chunks, tile=chunk_tile)
        for target, source in (
            (meta.table, self.table), (meta.start, starts), (meta.count, counts),
            (meta.first, self.first[:-1]), (meta.slot, np.arange(len(self.rows), dtype=np.int32)),
            (meta.short_items, short), (meta.chunk_items, chunks),
        ):
            target.copy_(torch.from_numpy(np.ascontiguousarray(source)))
        self.meta = meta
        self.scratch = DecodeScratch.allocate(most, self.model.kv_heads, self.model.dim, DEVICE)
        self.scratch.partial.fill_(math.nan)
        self.scratch.stats.fill_(math.nan)

    def run(self, workers: int = 3, shape=None) -> torch.Tensor:
        out = torch.full_like(self.queries, math.nan)
        scale = self.model.dim**-0.5
        decode_attention(
            self.queries, self.pages, out, self.meta, self.scratch,
            scale=scale, split=self.split, workers=workers,
        )
        chunk_attention(
            self.queries, self.pages, out, self.meta, scale=scale, most=self.most, shape=shape
        )
        assert not self.scratch.arrived.any(), "a counter was not reset"
        return out

    def wanted(self) -> torch.Tensor:
        """Attention by its definition, in float64, from the sequences and not from the pages."""
        group = self.model.heads // self.model.kv_heads
        parts = []
        for i, row in enumerate(self.rows):
            key, value = self.content[i].double().repeat_interleave(group, 2).unbind(1)
            query = self.queries[self.first[i] : self.first[i + 1]].double().cpu()
            query = query.view(row.count, self.model.heads, self.model.dim)
            score = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(self.model.dim)
            future = torch.ones(row.count, len(key), dtype=torch.bool).triu(row.start + 1)
            weight = score.masked_fill(future, -math.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weight, value).flatten(1))
        return torch.cat(parts)

    def check(self, out: torch.Tensor) -> None:
        wide = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[self.model.dtype]
        real = out[: self.tokens].double().cpu()
        torch.testing.assert_close(real, self.wanted(), rtol=wide, atol=wide)
        assert out[self.tokens :].isnan().all(), "a padded token was written"

    def row(self, out: torch.Tensor, i: int) -> torch.Tensor:
        return out[self.first[i] : self.first[i + 1]]


def decodes(places: Iterable[int], count: int = 1) -> list[Row]:
    return [Row(seed=100 * place + 1, start=place, count=count) for place in places]


# ---- against the definition ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (8, 1)])
def test_decode_rows_around_every_boundary(heads, kv_heads, dtype):
    step = Step(Model(heads, kv_heads, dtype=dtype), decodes(SHORT_PLACES))
    step.check(step.run())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (8, 1), (16, 1)])
def test_verification_rows_across_every_boundary(heads, kv_heads, dtype):
    rows = [Row(place, place, count) for place, count in
            [(0, 5), (0, 16), (60, 5), (63, 2), (120, 16), (124, 5), (126, 3), (250, 9),
             (0, plan.SHORT), (50, plan.SHORT), (120, 17), (250, plan.SHORT - 1)]]
    step = Step(Model(heads, kv_heads, dtype=dtype), rows)
    step.check(step.run())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_chunks_fresh_and_resumed(heads, kv_heads, pages, dtype):
    rows = [Row(place + count, place, count) for place, count in
            [(0, plan.SHORT + 1), (0, 64), (0, 130), (62, 65), (64, 64), (126, 36), (127, 36),
             (130, 70)]]
    step = Step(Model(heads, kv_heads, dtype=dtype), rows)
    step.check(step.run(shape=replace(SHAPES[32], pages=pages)))


@pytest.mark.parametrize("dim", [64, 128])
def test_the_real_head_dimensions(dim):
    rows = [Row(1, 130, 1), Row(2, 62, 5), Row(3, 40, 150), Row(4, 0, 1)]
    step = Step(Model(3, 1, dim=dim, dtype=HALF), rows)
    step.check(step.run())


def test_random_mixes_of_rows_that_share_blocks():
    made = np.random.default_rng(3)
    for _ in range(4 if DEVICE == "cpu" else 20):
        rows = []
        for _ in range(7):
            count = int(made.choice([1, 1, 3, 16, 17, 90]))
            start = int(made.integers(0, 300))
            rows.append(Row(int(made.integers(3)), start, count, shared=start // SIZE))
        step = Step(Model(3, 1), rows, split=int(made.choice([64, 256])))
        step.check(step.run(workers=int(made.integers(1, 9))))


def test_queries_may_lie_in_qkv():
    step = Step(Model(3, 1), [Row(1, 130, 2), Row(2, 3, 30)])
    alone = step.run()
    step.queries = torch.cat((step.queries, torch.full_like(step.queries, math.nan)), 1)
    wide = step.queries
    out = torch.full_like(alone, math.nan)
    decode_attention(wide, step.pages, out, step.meta, step.scratch,
                     scale=32**-0.5, split=SPLIT, workers=2)
    chunk_attention(wide, step.pages, out, step.meta, scale=32**-0.5, most=step.most)
    assert torch.equal(out.nan_to_num(7.0), alone.nan_to_num(7.0))


# ---- bit for bit ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def lines_apart(monkeypatch):
    """On the interpreter, multiply matrices so that a line's bits depend on that line alone.

    Tensor cores do; the BLAS behind numpy does not.
    """
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, precision, imprecise):
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        product = (left[:, :, None] * right[None]).sum(1)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1)])
def test_a_token_has_the_same_bits_alone_and_among_others(heads, kv_heads, dtype):
    model = Model(heads, kv_heads, dtype=dtype)
    places = [0, 63, 64, 127, 128, 255, 257]
    crowd = Step(model, decodes(places)).run()
    for i, place in enumerate(places):
        alone = Step(model, decodes([place])).run(workers=1)[0]
        assert torch.equal(alone, crowd[i]), place


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("start", [0, 60, 123, 126, 250])
@pytest.mark.parametrize("count", [7, plan.SHORT])
def test_a_verification_row_is_its_tokens_one_by_one(count, start, dtype):
    model = Model(6, 2, dtype=dtype)
    whole = Step(model, [Row(5, start, count), *decodes([200])])
    verified = whole.row(whole.run(), 0)
    for k in range(count):
        # The same pages, so that what lies beyond the token is stale content, not NaN.
        single = Step(model, [Row(5, start, count)])
        single.queries = single.queries[k : k + 1].clone()
        single.rows, single.first = [Row(5, start + k, 1)], np.array([0, 1], np.int32)
        single._fill()
        assert torch.equal(single.run()[0], verified[k]), k


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_two_launches_give_the_same_bits(dtype):
    step = Step(Model(6, 2, dtype=dtype), [Row(1, 290, 5), Row(2, 127, 2), Row(3, 20, 70)])
    first = step.run(workers=4)
    for workers in (4, 1, 7):
        assert torch.equal(step.run(workers).nan_to_num(7.0), first.nan_to_num(7.0))


def test_a_plan_for_more_than_there_is_changes_nothing():
    """The host may not know yet how many drafts were accepted: it plans for the most."""
    model = Model(4, 1)
    rows = [Row(1, 126, 1), Row(2, 250, 3), Row(3, 64, plan.SHORT + 2)]
    step = Step(model, rows)
    wanted = step.run()
    starts = np.array([row.start + 5 for row in rows], np.int32)
    counts = np.array([6, 16, 130], np.int32)
    short, chunks = np.zeros((2, 40), np.int32), np.zeros((2, 5), np.int32)
    totals = (plan.fill_short(starts, counts, short, tile=4, split=SPLIT),
              plan.fill_chunks(starts, counts, chunks, tile=SHAPES[32].tile))
    step.meta = replace(
        step.meta,
        short_items=torch.from_numpy(short).to(DEVICE),
        chunk_items=torch.from_numpy(chunks).to(DEVICE),
        short_total=torch.tensor(totals[:1], dtype=torch.int32).to(DEVICE),
        chunk_total=torch.tensor(totals[1:], dtype=torch.int32).to(DEVICE),
    )
    assert totals[0] > 1 + 3 and totals[1] > 1
    step.scratch = DecodeScratch.allocate(40, 1, 32, DEVICE)
    step.most = 5
    assert torch.equal(step.run().nan_to_num(7.0), wanted.nan_to_num(7.0))


# ---- on the card only ----------------------------------------------------------------------------


@pytest.mark.gpu
def test_many_programs_at_once_arrive_in_any_order_and_give_the_same_bits():
    model = Model(32, 8, dim=128, dtype=torch.bfloat16)
    places = [1000 + 3 * i for i in range(40)]
    step = Step(model, decodes(places))
    first = step.run(workers=66)
    step.check(first)
    for workers in (1, 17, 33, 66, 132) * 10:
        assert torch.equal(step.run(workers)[: step.tokens], first[: step.tokens]), workers
    for i in (0, 7, 39):
        alone = Step(model, decodes([places[i]])).run()
        assert torch.equal(alone[0], first[i])


@pytest.mark.gpu
def test_a_captured_graph_follows_what_the_buffers_say():
    """One graph, another plan: no count, position or table entry may be baked in."""
    model = Model(9, 3, dim=64, dtype=torch.bfloat16)
    one = Step(model, [Row(1, 130, 5), Row(2, 0, 40), Row(3, 290, 1)])
    other = Step(model, [Row(4, 3, 1), Row(5, 100, 40), Row(6, 290, 5)])
    wanted = [one.run(), other.run()]  # compiles, too
    out, scale = torch.full_like(one.queries, math.nan), model.dim**-0.5

    def launch() -> None:
        decode_attention(one.queries, one.pages, out, one.meta, one.scratch,
                         scale=scale, split=SPLIT, workers=8)
        chunk_attention(one.queries, one.pages, out, one.meta, scale=scale, most=one.most)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    assert torch.equal(out[: one.tokens], wanted[0][: one.tokens])
    for name in one.meta.__slots__:
        getattr(one.meta, name).copy_(getattr(other.meta, name))
    one.pages.copy_(other.pages)
    one.queries.copy_(other.queries)
    graph.replay()
    assert torch.equal(out[: one.tokens], wanted[1][: one.tokens])
