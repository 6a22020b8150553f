"""What is kept of measured products, and what a store may not bring in.  Measures nothing."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from engine.cuda import picks as module
from engine.cuda.picks import (
    CANDIDATES,
    CUBLAS,
    EVERY,
    INVARIANT,
    NORMS,
    Picks,
    height,
    promised,
    store_path,
)
from engine.kernels.matmul import NORMED
from engine.kernels.overlap import EAGER, LATE, OFF
from engine.layers import Linear

STAMP = "a card, its libraries"
KEY = (960, 576, "turn64", "bfloat16")


@pytest.fixture
def card(monkeypatch):
    """A device whose name can be asked for; nothing is launched on it."""
    monkeypatch.setattr(module, "stamp", lambda device: STAMP)
    return torch.device("cuda")


def kept(path, *picks, stamp=STAMP):
    path.write_text(json.dumps({"device": stamp, "picks": picks}))
    return path


def test_what_was_measured_is_there_at_the_next_start(card, tmp_path):
    first = Picks(card, tmp_path / "deep" / "picks.json")
    tile = CANDIDATES[8][0]
    first._chosen[KEY, 4], first._took[KEY, 4] = tile, 0.0025
    first._chosen[KEY, 512], first._took[KEY, 512] = CUBLAS, 0.01
    first._chosen[KEY, 640], first._took[KEY, 640] = CUBLAS, 0.02
    first._apart.add((KEY, 640))
    first._changed = True
    first.save()
    second = Picks(card, tmp_path / "deep" / "picks.json")
    assert second._chosen == first._chosen and second._took == first._took
    assert second._apart == first._apart
    third = Picks(card, tmp_path / "deep" / "picks.json", promised=EVERY)
    assert [rows for _, rows in third._chosen] == [4, 512], "a model that promises more"


@pytest.mark.parametrize("rows", [INVARIANT, INVARIANT + 1, 2048])
@pytest.mark.parametrize("limit", [INVARIANT, EVERY])
@pytest.mark.parametrize("same", [True, False])
def test_cublas_has_the_bits_of_a_tile_as_far_as_is_promised(monkeypatch, rows, limit, same):
    times = iter([0.5] * len(CANDIDATES[128]) + [0.1])  # cuBLAS is the quickest, and the last
    monkeypatch.setattr(module, "_timed", lambda run: next(times))
    monkeypatch.setattr(Picks, "_same", lambda *given: same)
    picks = Picks(torch.device("cpu"), promised=limit)
    key = 960, 576, "add", "float32"
    picks._choose(key, [torch.zeros(960, 576)], rows)
    taken = same or rows > limit
    assert (picks._chosen[key, rows] is CUBLAS) == taken
    assert picks._took[key, rows] == pytest.approx((0.1 if taken else 0.5) / 1)
    assert ((key, rows) in picks._apart) == (taken and not same)


def test_small_layers_promise_bits_at_every_size():
    assert promised(7 << 20) == EVERY and promised(436 << 20) == INVARIANT


@pytest.mark.parametrize(
    "entry",
    [
        [*KEY, 4, [16, 48, 64, 4, 5, 0, 0], 0.1, False],  # no candidate
        [*KEY, 4, list(astuple(CANDIDATES[32][0])), 0.1, False],  # of another height
        [*KEY, 4, [16, 128, 128, 4, 3, 0, 0], 0.1, False],  # wider than the head
        # deeper than the product
        [960, 256, "add", "bfloat16", 4, [8, 8, 64, 4, 2, 512, 64], 0.1, False],
    ],
)
def test_a_tile_that_is_none_of_ours_is_not_taken(card, tmp_path, entry):
    good = [*KEY, 8, list(astuple(CANDIDATES[8][0])), 0.2, False]
    picks = Picks(card, kept(tmp_path / "picks.json", entry, good))
    assert list(picks._chosen) == [(KEY, 8)]


DAMAGED = ["", "[]", "{", json.dumps({"device": STAMP, "picks": [[1]]})]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_store_is_measured_anew(card, tmp_path, text):
    path = tmp_path / "picks.json"
    path.write_text(text)
    assert not Picks(card, path)._chosen


def test_another_card_or_other_candidates_are_measured_anew(card, tmp_path):
    entry = [*KEY, 8, list(astuple(CANDIDATES[8][0])), 0.2, False]
    assert not Picks(card, kept(tmp_path / "picks.json", entry, stamp="another"))._chosen


def test_a_store_that_cannot_be_written_is_no_error(card, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    picks = Picks(card, tmp_path / "file" / "picks.json")
    picks._changed = True
    picks.save()
    assert "not kept" in caplog.text


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.expanduser", _homeless)
    assert store_path() is None


def _homeless(path):
    raise RuntimeError("Could not determine home directory.")


def test_the_cost_of_a_step_counts_every_layer():
    picks = Picks(torch.device("cpu"))
    for _ in range(3):
        picks.note("layer", Linear(torch.zeros(960, 576)), "add", torch.float32)
    picks.note("head", Linear(torch.zeros(64, 576)), "store", torch.float32)
    key = (960, 576, "add", "float32")
    picks._took[key, 8] = 0.5
    assert picks.cost("layer", 8) == 1.5 and picks.cost("layer", 16) == picks.cost("head", 8) == 0


def test_a_biased_product_never_goes_to_cublas():
    picks = Picks(torch.device("cpu"))
    biased = Linear(torch.zeros(64, 32), torch.zeros(64))
    key = (64, 32, "store", "float32")
    picks._chosen[key, 4] = CUBLAS
    assert picks.pick(Linear(torch.zeros(64, 32)), "store", 4, torch.float32) is CUBLAS
    assert picks.pick(biased, "store", 4, torch.float32) == CANDIDATES[8][0]


def test_small_layers_overlap_early_and_large_ones_late(monkeypatch):
    monkeypatch.setattr(module, "OVERLAPS", True)
    assert module.overlapping(7 << 20) == EAGER and module.overlapping(436 << 20) == LATE
    monkeypatch.setattr(module, "OVERLAPS", False)
    assert module.overlapping(7 << 20) == OFF


def test_products_norm_a_few_rows_of_small_layers():
    early, late = (Picks(torch.device("cpu"), overlap=mode) for mode in (EAGER, LATE))
    assert early.norms(NORMED) and not early.norms(NORMED + 1) and not late.norms(1)
    wide = Linear(torch.zeros(960, 4096))
    tile = CANDIDATES[8][0]
    # The norm of so wide a row is summed by eight warps; a product that adds norms nothing.
    assert early.pick(wide, "gate", 4, torch.float32) == replace(tile, warps=8)
    assert early.pick(wide, "add", 4, torch.float32) == tile
    assert early.pick(wide, "gate", 8, torch.float32) == tile
    early._chosen[(960, 4096, "gate", "float32"), 4] = CUBLAS  # of a product that does not norm
    assert early.pick(wide, "gate", 4, torch.float32) is not CUBLAS
    early._took[(960, 4096, NORMS + "gate", "float32"), 4] = 0.25
    early.note("layer", wide, "gate", torch.float32)
    assert early.cost("layer", 4) == 0.25


@pytest.mark.parametrize(
    "rows, wanted", [(1, 1), (2, 8), (16, 16), (17, 32), (64, 64), (65, 128), (2048, 128)]
)
def test_every_row_count_has_candidates_for_it(rows, wanted):
    assert height(rows) == wanted
    first = CANDIDATES[wanted][0]
    assert first.ahead == first.tail == 0 and first.bn in (16, 32)  # fits every product
