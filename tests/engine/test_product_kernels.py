"""Products, norm, embedding and table kernels against float64 in torch.  Runs no model.

On the interpreter or the card; every tensor lies between lines of NaN, so that a read or a write
beyond its end shows.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.cuda.picks import CANDIDATES, Picks, height  # noqa: E402
from engine.kernels.embed import UPDATES, embed, update_table  # noqa: E402
from engine.kernels.matmul import Tile, gate, product  # noqa: E402
from engine.kernels.norm import norm  # noqa: E402
from engine.kernels.overlap import OVERLAPS  # noqa: E402
from engine.kernels.project import project  # noqa: E402
from engine.kernels.rope import rotate_and_store  # noqa: E402
from engine.layers import Linear  # noqa: E402
from tests.engine.test_attention_kernels import HALF, TYPES, lines_apart  # noqa: E402, F401

OVERLAP = OVERLAPS and DEVICE == "cuda"
TILES = [Tile(16, 32, 32, 4, 2), Tile(32, 16, 64, 4, 3), Tile(64, 64, 16, 4, 2)]
# (rows, columns, depth): one row, less than a tile, a tile and one, no multiple of anything
SIZES = [(1, 48, 64), (5, 38, 50), (17, 70, 96), (33, 22, 67)]


class Noise:
    """Fresh random tensors, the same in every run of a test."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.made, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, spread: float = 1.0) -> torch.Tensor:
        return fenced(torch.randn(shape, generator=self.made) * spread, self.dtype)

    def weight(self, columns: int, depth: int) -> torch.Tensor:
        return self(columns, depth, spread=depth**-0.5)


def fenced(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` on the device, with 256 elements of NaN before and behind."""
    fence = torch.full((values.numel() + 512,), math.nan, dtype=dtype, device=DEVICE)
    inside = fence[256:-256].view(values.shape)
    inside.copy_(values)
    return inside


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return fenced(torch.full(shape, math.nan), dtype)


def check_fence(tensor: torch.Tensor) -> None:
    """Nothing was written beside it."""
    whole = torch.as_strided(tensor, (tensor.numel() + 512,), (1,), tensor.storage_offset() - 256)
    assert whole[:256].isnan().all() and whole[-256:].isnan().all()


def close(found: torch.Tensor, wanted: torch.Tensor, roundings: int = 1) -> None:
    """Equal but for roundings to the type, and a little for the sums in float32."""
    check_fence(found)
    unit = 0.51 * torch.finfo(found.dtype).eps * roundings
    torch.testing.assert_close(
        found.double(), wanted, rtol=unit + 2e-6, atol=3e-6 if roundings == 1 else unit
    )


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


# ---- products against the definition -------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, columns, depth", SIZES)
def test_a_product_with_bias_and_a_residual_in_place(rows, columns, depth, dtype, tile):
    noise = Noise(rows, dtype)
    x, w, bias = noise(rows, depth), noise.weight(columns, depth), noise(columns)
    exact = x.double() @ w.double().T
    out = poisoned(rows, columns, dtype=dtype)
    product(x, w, out, tile)
    close(out, exact)
    product(x, w, out, tile, bias=bias)
    close(out, exact + bias.double())
    # Rounded, then added and rounded again: what cuBLAS, and torch on a CPU, leave.
    stream = noise(rows, columns)
    wanted = out + stream
    product(x, w, stream, tile, bias=bias, residual=stream)
    check_fence(stream)
    assert torch.equal(stream, wanted)
    apart = noise(rows, columns)
    product(x, w, out, tile)
    wanted = out + apart
    product(x, w, out, tile, residual=apart)
    check_fence(out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, columns, depth", SIZES)
def test_a_gated_product_is_the_gate_of_the_stored_one_bit_for_bit(rows, columns, depth, dtype):
    noise = Noise(columns, dtype)
    x, w, bias = noise(rows, depth), noise.weight(columns, depth), noise(columns)
    for given in (None, bias):
        both = poisoned(rows, columns, dtype=dtype)
        product(x, w, both, TILES[0], bias=given)
        out, apart = (poisoned(rows, columns // 2, dtype=dtype) for _ in range(2))
        product(x, w, out, TILES[0], bias=given, swiglu=True)
        gate(both, apart)
        assert torch.equal(out, apart)
        exact = x.double() @ w.double().T + (0.0 if given is None else given.double())
        close(out, silu(exact[:, ::2]) * exact[:, 1::2], roundings=8)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gate_wider_than_a_program(dtype):
    both = Noise(3, dtype)(2, 2 * 1030)
    out = poisoned(2, 1030, dtype=dtype)
    gate(both, out)
    left, right = both.double()[:, ::2], both.double()[:, 1::2]
    close(out, silu(left) * right, roundings=3)


def test_logits_keep_float32_of_a_narrow_product():
    noise = Noise(7, HALF)
    x, w = noise(3, 50), noise.weight(37, 50)
    out = poisoned(3, 37, dtype=torch.float32)
    product(x, w, out, TILES[0])
    close(out, x.double() @ w.double().T)


def test_a_product_of_the_wrong_shape_is_refused():
    x, w = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(AssertionError, match="out"):
        product(x, w, torch.zeros(2, 3), TILES[0])
    with pytest.raises(AssertionError, match="w "):
        product(x, w[:, :6], torch.zeros(2, 4), TILES[0])
    with pytest.raises(AssertionError, match="residual"):
        out = torch.zeros(2, 2)
        product(x, w, out, TILES[0], residual=out, swiglu=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others(dtype):
    noise = Noise(11, dtype)
    x, w = noise(40, 96), noise.weight(38, 96)
    whole = poisoned(40, 38, dtype=dtype)
    product(x, w, whole, TILES[1])
    for row in (0, 15, 31, 39):
        for tile in (TILES[1], replace(TILES[1], bm=16, bn=64)):
            alone = poisoned(1, 38, dtype=dtype)
            product(x[row : row + 1], w, alone, tile)
            assert torch.equal(alone[0], whole[row]), (row, tile)


@pytest.mark.parametrize("epilogue", ["store", "add", "gate"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_pick_runs_the_product_that_was_asked_for(epilogue, bias):
    noise = Noise(23)
    x, w = noise(3, 40), noise.weight(34, 40)
    linear = Linear(w, noise(34) if bias else None)
    exact = x.double() @ w.double().T + (linear.bias.double() if bias else 0.0)
    picks = Picks(torch.device("cpu"))  # measures nothing: the first candidate
    if epilogue == "store":
        out = poisoned(3, 34, dtype=torch.float32)
        picks.run(x, linear, out)
    elif epilogue == "add":
        out = noise(3, 34)
        exact = exact + out.double()
        picks.run(x, linear, out, residual=out)
    else:
        out = poisoned(3, 17, dtype=torch.float32)
        picks.run(x, linear, out, both=poisoned(3, 34, dtype=torch.float32))
        exact = silu(exact[:, ::2]) * exact[:, 1::2]
    close(out, exact, roundings=8 if epilogue == "gate" else 1)


# ---- queries, keys and values --------------------------------------------------------------------


class Projection:
    """Tokens on their way to rotated queries and pages."""

    def __init__(self, heads, kv_heads, dim, depth, dtype, count=5, bias=False):
        noise = Noise(dim + heads, dtype)
        columns = (heads + 2 * kv_heads) * dim
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.x, self.w = noise(count, depth), noise.weight(columns, depth)
        self.bias = noise(columns) if bias else None
        spread = torch.tensor([0, 1, 63, 64, 199, 7, 8, 100])
        self.positions = spread.repeat(-(-count // 8))[:count].to(DEVICE, torch.int32)
        slots = torch.randperm(max(3 * 64, count), generator=noise.made)[:count]
        self.slots = slots.to(DEVICE, torch.int32)
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = torch.outer(torch.arange(200, dtype=torch.float64), 10_000.0**-steps)
        self.cos, self.sin = (fenced(t, torch.float32) for t in (angles.cos(), angles.sin()))
        self.blocks = -(-max(3 * 64, count) // 64) + 1

    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Poisoned qkv and pages."""
        return (poisoned(len(self.x), len(self.w), dtype=self.dtype),
                poisoned(self.blocks, 2, 64, self.kv_heads, self.dim, dtype=self.dtype))

    def fused(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        both, pages = self.room()
        project(self.x, self.w, both, pages, self.positions, self.slots, self.cos, self.sin, tile,
                bias=self.bias, overlap=OVERLAP)
        return both, pages

    def apart(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        both, pages = self.room()
        product(self.x, self.w, both, tile, bias=self.bias, overlap=OVERLAP)
        rotate_and_store(both, pages, self.positions, self.slots, self.cos, self.sin,
                         overlap=OVERLAP)
        return both, pages

    def queries(self, both: torch.Tensor) -> torch.Tensor:
        return both[:, : self.heads * self.dim]

    def same(self, tile: Tile, other: Tile) -> None:
        """One kernel with `tile` and two with `other` leave the same bits."""
        fused, pages = self.fused(tile)
        apart, wanted = self.apart(other)
        check_fence(fused), check_fence(pages)
        assert torch.equal(self.queries(fused), self.queries(apart)), tile
        assert torch.equal(pages.nan_to_num(7.0), wanted.nan_to_num(7.0)), tile
        written = pages[..., 0, 0].isfinite().all(1).sum()
        assert written == len(self.x), "not a slot a token"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim, depth", [(3, 1, 32, 48), (2, 2, 64, 50)])
def test_a_projection_is_a_product_then_a_rotation_bit_for_bit(
    heads, kv_heads, dim, depth, dtype, bias
):
    case = Projection(heads, kv_heads, dim, depth, dtype, bias=bias)
    case.same(TILES[0], TILES[0])
    case.same(replace(TILES[0], bn=16), TILES[0])


def test_a_projection_against_the_definition():
    case = Projection(3, 1, 32, 48, torch.float32, bias=True)
    both, pages = case.fused(TILES[0])
    whole = case.x.double() @ case.w.double().T + case.bias.double()
    pairs = torch.view_as_complex(whole.view(5, 5, 16, 2))
    at = case.positions.long()
    turned = pairs * torch.complex(case.cos[at].double(), case.sin[at].double())[:, None]
    wanted = torch.view_as_real(turned).flatten(2)
    torch.testing.assert_close(case.queries(both).double(), wanted[:, :3].flatten(1),
                               rtol=1e-5, atol=1e-5)
    block, offset = case.slots.long() // 64, case.slots.long() % 64
    torch.testing.assert_close(pages[block, 0, offset].double(), wanted[:, 3:4],
                               rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pages[block, 1, offset].double(), whole.view(5, 5, 32)[:, 4:],
                               rtol=1e-5, atol=1e-5)
    assert both[:, 96:].isnan().all(), "keys and values belong to the pages"


def test_a_projections_tile_may_not_cross_a_head():
    case = Projection(3, 1, 32, 48, torch.float32)
    with pytest.raises(AssertionError, match="heads of 32"):
        case.fused(Tile(16, 64, 32, 4, 2))


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [33, 64, 576])
def test_rms_norm_of_all_rows_or_of_picked_ones(width, dtype):
    noise = Noise(width, dtype)
    x, gain = noise(5, width, spread=3.0), noise(width)
    x[3] = 0
    wide = x.double()
    wanted = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    out = poisoned(5, width, dtype=dtype)
    norm(x, gain, out, 1e-5)
    close(out, wanted)
    order = torch.tensor([4, 0, 0, 3], dtype=torch.int32, device=DEVICE)
    few = poisoned(4, width, dtype=dtype)
    norm(x, gain, few, 1e-5, picked=order)
    assert torch.equal(few, out[order.long()]), "a row's bits depend on where it stands"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [33, 64])
def test_an_embedding_takes_the_hosts_token_or_the_slots(width, dtype):
    weights = Noise(width, dtype)(20, width)
    last = torch.tensor([3, 19, 0, 7], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([5, 0, 0, 11, 19], dtype=torch.int32, device=DEVICE)
    origin = torch.tensor([-1, 1, 2, -1, 0], dtype=torch.int32, device=DEVICE)
    out = poisoned(5, width, dtype=dtype)
    embed(tokens, origin, last, weights, out)
    assert tokens.tolist() == [5, 19, 0, 11, 3], "who reads the tokens later sees the real ones"
    assert torch.equal(out, weights[tokens.long()])
    assert last.tolist() == [3, 19, 0, 7]
    check_fence(out)


@pytest.mark.parametrize("count", [0, 1, 7, UPDATES - 1, UPDATES, 2 * UPDATES + 5])
def test_a_table_gets_the_counted_entries_and_no_other(count):
    chance = torch.Generator().manual_seed(count)
    rows, width, room = 9, 100, 2 * UPDATES + 30
    cells = torch.randperm(rows * width, generator=chance)[:room]
    blocks = torch.randint(1, 10_000, (room,), generator=chance)
    table = torch.full((rows, width), -5, dtype=torch.int32, device=DEVICE)
    wanted = table.clone().flatten()
    wanted[cells[:count].to(DEVICE)] = blocks[:count].to(DEVICE, torch.int32)
    ints = [t.to(DEVICE, torch.int32) for t in (cells // width, cells % width, blocks)]
    update_table(table, *ints, torch.tensor([count], dtype=torch.int32, device=DEVICE))
    assert torch.equal(table.flatten(), wanted)


@pytest.mark.parametrize("depth, ahead", [(96, 32), (50, 32), (64, 64), (200, 128)])
def test_weights_read_ahead_change_nothing_but_the_order_of_reading(depth, ahead):
    noise = Noise(41, torch.float32)
    x, w = noise(5, depth), noise.weight(40, depth)
    out = poisoned(5, 40, dtype=torch.float32)
    product(x, w, out, Tile(16, 16, 32, 4, 2, ahead))
    wanted = x.double() @ w.double().T
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    check_fence(out)


# ---- on the card only ----------------------------------------------------------------------------


def tiles(depth: int = 1 << 20) -> list[Tile]:
    """Everything that a pick may be for a product of this depth."""
    made = dict.fromkeys(tile for some in CANDIDATES.values() for tile in some)
    return [tile for tile in made if tile.ahead + tile.tail <= depth]


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_candidate_gives_the_same_bits_and_a_row_alone_those_it_has_among_128():
    noise = Noise(31, torch.bfloat16)
    shapes = [(960, 576), (576, 1536), (6144, 4096), (4096, 14336)]
    for columns, depth in shapes:
        x, w = noise(128, depth), noise.weight(columns, depth)
        first = poisoned(128, columns, dtype=torch.bfloat16)
        product(x, w, first, tiles(depth)[0], overlap=OVERLAP)
        torch.testing.assert_close(first.float(), x.float() @ w.float().T, rtol=0.01, atol=0.01)
        for tile in tiles(depth):
            out = poisoned(128, columns, dtype=torch.bfloat16)
            product(x, w, out, tile, overlap=OVERLAP)
            assert torch.equal(out, first), (columns, depth, tile)
            check_fence(out)
        for rows, at in ((1, 0), (1, 127), (5, 60), (16, 16), (100, 20)):
            tile = CANDIDATES[height(rows)][-1]
            out = poisoned(rows, columns, dtype=torch.bfloat16)
            product(x[at : at + rows].clone(), w, out, tile, overlap=OVERLAP)
            assert torch.equal(out, first[at : at + rows]), (columns, depth, rows, at)
    print(f"\n{len(tiles())} tiles, {len(shapes)} shapes: the same bits, at 1 to 128 rows")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("heads, kv_heads, dim, depth", [(9, 3, 64, 576), (32, 8, 128, 4096)])
def test_every_candidate_projects_as_product_and_rotation_do(heads, kv_heads, dim, depth):
    fitting = [tile for tile in tiles(depth) if dim % tile.bn == 0]
    for count in (1, 128):
        case = Projection(heads, kv_heads, dim, depth, torch.bfloat16, count=count)
        for tile in fitting if count == 128 else fitting[:3]:
            case.same(tile, tiles()[0])
    print(f"\nhead {dim}: {len(fitting)} tiles project and rotate with the bits of two kernels")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("epilogue", ["add", "gate"])
def test_an_epilogue_has_the_same_bits_with_the_lowest_and_the_highest_tile(epilogue):
    noise = Noise(37, torch.bfloat16)
    x, w, before = noise(128, 576), noise.weight(3072, 576), noise(128, 3072)
    seen = []
    for some in CANDIDATES.values():
        for tile in (some[0], some[-1]):
            if epilogue == "add":
                out = before.clone()
                product(x, w, out, tile, residual=out, overlap=OVERLAP)
            elif tile.bn >= 32:
                out = torch.full((128, 1536), math.nan, dtype=torch.bfloat16, device=DEVICE)
                product(x, w, out, tile, swiglu=True, overlap=OVERLAP)
            seen.append(out)
    assert all(torch.equal(out, seen[0]) for out in seen)
    print(f"\n{epilogue}: {len(seen)} tiles with the same bits")
