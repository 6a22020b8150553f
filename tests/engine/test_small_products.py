"""Products of few rows: low tiles, weights read ahead, rows normed on the way.  Runs no model.

On the interpreter or the card; the norm inside a product has to leave the bits of kernels/norm.py.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels.matmul import NORMED, Tile, product  # noqa: E402
from engine.kernels.norm import norm, warps  # noqa: E402
from engine.kernels.overlap import EAGER, OVERLAPS  # noqa: E402
from engine.kernels.project import project  # noqa: E402
from tests.engine.test_attention_kernels import HALF, TYPES, lines_apart  # noqa: E402, F401
from tests.engine.test_product_kernels import (  # noqa: E402
    Noise,
    Projection,
    check_fence,
    poisoned,
)

EPS = 1e-5
MODES = (0, 1, EAGER) if OVERLAPS and DEVICE == "cuda" else (0,)
# In steps; partly and wholly read ahead; a last step that is cut; low tiles.
TILES = [
    Tile(16, 32, 32, 4, 2), Tile(16, 16, 32, 4, 2, 32), Tile(16, 16, 16, 4, 2, 64, 16),
    Tile(16, 32, 64, 4, 2, 16, 16), Tile(4, 32, 32, 4, 2), Tile(4, 16, 16, 4, 2, 64, 16),
    Tile(1, 16, 32, 4, 2, 32), Tile(1, 16, 16, 4, 2, 64, 16),
]  # fmt: skip


def apart(x, gain, w, tile, **more):
    """Norm, then the product."""
    normed = poisoned(*x.shape, dtype=x.dtype)
    norm(x, gain, normed, EPS)
    return run(normed, w, tile, **more)


def run(x, w, tile, *, swiglu=False, residual=None, **more):
    out = poisoned(len(x), len(w) // 2 if swiglu else len(w), dtype=x.dtype)
    product(x, w, out, tile, swiglu=swiglu, residual=residual, **more)
    check_fence(out)
    return out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_product_that_norms_its_rows_has_the_bits_of_two_kernels(tile, dtype):
    depth = 80
    for rows in (1, 2, 3, NORMED):
        noise = Noise(rows, dtype)
        x, gain, w = noise(rows, depth, spread=3.0), noise(depth), noise.weight(38, depth)
        for swiglu in (False, True) if tile.bn >= 32 else (False,):
            found = run(x, w, tile, gain=gain, eps=EPS, swiglu=swiglu)
            wanted = apart(x, gain, w, tile, swiglu=swiglu)
            assert torch.equal(found, wanted), (rows, swiglu)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_normed_product_against_the_definition(tile):
    noise = Noise(5)
    x, gain, w = noise(3, 80, spread=3.0), noise(80), noise.weight(38, 80)
    found = run(x, w, tile, gain=gain, eps=EPS)
    wide = x.double()
    wide = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * gain.double()
    torch.testing.assert_close(found.double(), wide @ w.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_low_tiles_leave_the_bits_of_high_ones(dtype):
    noise = Noise(9, dtype)
    x, w, before = noise(4, 80), noise.weight(38, 80), noise(4, 38)
    wanted = run(x, w, TILES[0], residual=before)
    for bm in (1, 2, 4, 8):
        assert torch.equal(run(x, w, Tile(bm, 32, 32, 4, 2), residual=before), wanted), bm


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tile", [TILES[0], TILES[5], TILES[7]], ids=str)
def test_a_projection_that_norms_its_rows_has_the_bits_of_two_kernels(tile, dtype):
    for count in (1, 3):
        case = Projection(3, 1, 32, 80, dtype, count=count, bias=True)
        gain = Noise(2, dtype)(80)
        both, pages = projected(case, tile, gain)
        source, case.x = case.x, poisoned(count, 80, dtype=dtype)
        norm(source, gain, case.x, EPS)
        wanted, filled = case.fused(tile)
        assert torch.equal(case.queries(both), case.queries(wanted))
        assert torch.equal(pages.nan_to_num(7.0), filled.nan_to_num(7.0))


def projected(case, tile, gain, overlap=0):
    both, pages = case.room()
    project(case.x, case.w, both, pages, case.positions, case.slots, case.cos, case.sin, tile,
            bias=case.bias, gain=gain, eps=EPS, overlap=overlap)
    return both, pages


def test_what_cannot_be_normed_on_the_way_is_refused():
    noise = Noise(1)
    w, gain = noise.weight(16, 32), noise(32)
    with pytest.raises(AssertionError, match="rows are normed"):
        run(noise(5, 32), w, TILES[0], gain=gain, eps=EPS)
    with pytest.raises(AssertionError, match="does not sum"):
        run(noise(1, 32), w, Tile(16, 16, 32, 8, 2), gain=gain, eps=EPS)
    with pytest.raises(AssertionError, match="ahead"):
        run(noise(1, 32), w, Tile(16, 16, 32, 4, 2, 32, 16))
    with pytest.raises(AssertionError, match="tail"):
        run(noise(1, 32), w, Tile(16, 16, 32, 4, 2, 0, 16))


# ---- on the card only ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width, columns", [(576, 3072), (4096, 6144), (4096, 28672)])
def test_norm_in_a_product_has_the_bits_of_norm_and_product_on_the_card(width, columns):
    for rows in (1, 2, 3, 4):
        noise = Noise(rows + width, HALF)
        x, gain, w = noise(rows, width, spread=3.0), noise(width), noise.weight(columns, width)
        wanted = apart(x, gain, w, Tile(16, 32, 64, 4, 5), swiglu=True)
        fit = warps(width)
        for low in (1, 2, 4, 16):
            for ahead, tail in ((0, 0), (512, 0), (512, 64)):
                tile = Tile(low, 64 if width > 2048 else 32, 64, fit, 4, ahead, tail)
                for overlap in MODES:
                    found = run(x, w, tile, gain=gain, eps=EPS, swiglu=True, overlap=overlap)
                    assert torch.equal(found, wanted), (rows, tile, overlap)
    print(f"\n{width}: normed in the product and before it: the same bits")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("heads, kv_heads, dim, depth", [(9, 3, 64, 576), (32, 8, 128, 4096)])
def test_a_projection_may_norm_and_be_eager_on_the_card(heads, kv_heads, dim, depth):
    for count in (1, 3):
        case = Projection(heads, kv_heads, dim, depth, HALF, count=count)
        gain = Noise(2, HALF)(depth)
        source, case.x = case.x, poisoned(count, depth, dtype=HALF)
        norm(source, gain, case.x, EPS)
        wanted, filled = case.fused(Tile(16, 32, 64, 4, 5))
        case.x = source
        for low in (1, 4, 16):
            tile = Tile(low, 16, 64, warps(depth), 4, 512, 64)
            for overlap in MODES:
                both, pages = projected(case, tile, gain, overlap)
                assert torch.equal(case.queries(both), case.queries(wanted)), (tile, overlap)
                assert torch.equal(pages.nan_to_num(7.0), filled.nan_to_num(7.0)), (tile, overlap)
    print(f"\nhead {dim}: normed in the projection and before it: the same bits")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_low_tiles_and_high_ones_and_eager_ones_leave_the_same_bits_on_the_card():
    tried = 0
    for columns, depth in ((576, 576), (576, 1536), (4096, 14336)):
        noise = Noise(depth, HALF)
        x, w, before = noise(4, depth), noise.weight(columns, depth), noise(4, columns)
        wanted = run(x, w, Tile(16, 32, 64, 4, 5), residual=before)
        for bm in (1, 2, 4, 8, 16, 64):
            for bn, bk, ahead, tail in ((16, 64, 0, 0), (16, 64, 512, 64), (8, 64, 512, 0),
                                        (32, 256, 0, 0)):
                tile = Tile(bm, bn, bk, 4, 3, ahead, tail)
                for overlap in MODES:
                    found = run(x, w, tile, residual=before, overlap=overlap)
                    assert torch.equal(found, wanted), (columns, depth, tile, overlap)
                    tried += 1
    print(f"\n{tried} low, high and eager products with the same bits")
