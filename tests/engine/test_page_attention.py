"""Attention by pages against float64 in torch, and fine against coarse bit for bit.  No model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.kernels.attention_plan import LINES
from engine.kernels.decode_attention import DecodeScratch
from engine.kernels.overlap import EAGER, OVERLAPS
from tests.bench.candidates.page_attention import page_attention
from tests.engine.test_attention_kernels import (  # noqa: F401
    DEVICE,
    HALF,
    SHORT_PLACES,
    TYPES,
    Model,
    Row,
    Step,
    decodes,
    lines_apart,
)

COARSE, FINE = 0, 10_000  # pages up to which each has a program


def attend(step: Step, fine: int, workers: int = 3, overlap: int = 0) -> torch.Tensor:
    room = step.meta.short_items.shape[1] * step.split // 64
    step.scratch = DecodeScratch.allocate(room, step.model.kv_heads, step.model.dim, DEVICE)
    step.scratch.partial.fill_(math.nan)
    step.scratch.stats.fill_(math.nan)
    out = torch.full_like(step.queries, math.nan)
    page_attention(step.queries, step.pages, out, step.meta, step.scratch,
                   scale=step.model.dim**-0.5, split=step.split, workers=workers, fine=fine,
                   overlap=overlap)
    assert not step.scratch.arrived.any(), "a counter was not reset"
    return out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fine", [COARSE, FINE])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_decode_rows_around_every_boundary(heads, kv_heads, fine, dtype):
    step = Step(Model(heads, kv_heads, dtype=dtype), decodes(SHORT_PLACES))
    step.check(attend(step, fine))


@pytest.mark.parametrize("fine", [COARSE, FINE])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 1)])
def test_verification_rows_across_every_boundary(heads, kv_heads, fine):
    rows = [Row(place, place, count) for place, count in
            [(0, 5), (0, 16), (60, 5), (63, 2), (120, 16), (124, 5), (126, 3), (250, 9)]]
    step = Step(Model(heads, kv_heads), rows)
    step.check(attend(step, fine))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("split", [64, 128, 256])
def test_pages_apart_and_splits_whole_have_the_same_bits(split, dtype):
    rows = [Row(1, 130, 1), Row(2, 62, 5), Row(3, 511, 1), Row(4, 0, 1), Row(5, 250, 9)]
    step = Step(Model(6, 2, dtype=dtype), rows, split=split)
    coarse = attend(step, COARSE)
    step.check(coarse)
    for workers in (1, 5):
        fine = attend(step, FINE, workers)
        assert torch.equal(fine.nan_to_num(7.0), coarse.nan_to_num(7.0)), workers


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_has_the_same_bits_alone_in_a_draft_and_among_others(dtype):
    model = Model(6, 2, dtype=dtype)
    places = [0, 63, 64, 127, 128, 255, 257]
    crowd = attend(Step(model, decodes(places)), COARSE)
    for i, place in enumerate(places):
        assert torch.equal(attend(Step(model, decodes([place])), FINE)[0], crowd[i]), place
    whole = Step(model, [Row(5, 123, 7), *decodes([200])])
    verified = whole.row(attend(whole, COARSE), 0)
    for k in range(7):
        single = Step(model, [Row(5, 123, 7)])
        single.queries = single.queries[k : k + 1].clone()
        single.rows, single.first = [Row(5, 123 + k, 1)], np.array([0, 1], np.int32)
        single._fill()
        assert torch.equal(attend(single, FINE)[0], verified[k]), k


def test_more_pages_than_the_limit_are_taken_by_splits():
    step = Step(Model(3, 1), decodes([300, 40]))
    wanted = attend(step, COARSE)
    for fine in (7, 8, 11, 12):  # 5 + 1 pages; 3 + 1 splits of two
        assert torch.equal(attend(step, fine).nan_to_num(7.0), wanted.nan_to_num(7.0)), fine


# ---- on the card only ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("heads, kv_heads, dim, split", [(9, 3, 64, 128), (32, 8, 128, 256)])
def test_alone_by_pages_has_the_bits_of_among_others_by_splits_on_the_card(
    heads, kv_heads, dim, split
):
    model = Model(heads, kv_heads, dim=dim, dtype=HALF)
    places = [0, 63, 64, 255, 256, 600, 1000, 1100, 2047]
    step = Step(model, decodes(places), split=split)
    modes = (0, 1, EAGER) if OVERLAPS else (0,)
    first = attend(step, COARSE, 66)
    step.check(first)
    for workers in (1, 17, 66, 132) * 5:
        for overlap in modes:
            for fine in (COARSE, FINE):
                found = attend(step, fine, workers, overlap)[: step.tokens]
                assert torch.equal(found, first[: step.tokens]), (workers, overlap, fine)
    for i, place in enumerate(places):
        for overlap in modes:
            alone = attend(Step(model, decodes([place]), split=split), FINE, 64, overlap)
            assert torch.equal(alone[0], first[i]), place
    drafts = Step(model, [Row(7, 1020, 9), Row(8, 250, 16)], split=split)
    drafts.check(attend(drafts, FINE, 64))
    assert torch.equal(attend(drafts, FINE, 64)[:25], attend(drafts, COARSE, 7)[:25])
    print(f"\nhead {dim}: by pages and by splits the same bits, {LINES} lines a tile")
