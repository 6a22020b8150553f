"""The rotary kernel against float64 in torch, on the interpreter or the card.  No attention."""

from __future__ import annotations

import math
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels.rope import rotate_and_store  # noqa: E402

SIZE, MAX_LEN = 64, 200
TYPES = [torch.float32, torch.bfloat16]


def tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(0, dim, 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(MAX_LEN, dtype=torch.float64), 10_000.0 ** (-steps / dim))
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[N, heads, dim] as complex numbers turned by an angle, in float64."""
    turn = torch.complex(cos.double(), sin.double())[:, None]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(2)


class Case:
    """Random qkv of some tokens, poisoned pages, distinct slots."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, count: int = 5):
        made = torch.Generator().manual_seed(heads * 1000 + dim)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        width = (heads + 2 * kv_heads) * dim
        self.qkv = torch.randn(count, width, generator=made).to(DEVICE, dtype)
        self.pages = torch.full((4, 2, SIZE, kv_heads, dim), math.nan).to(DEVICE, dtype)
        self.positions = torch.tensor([0, 1, 63, 64, 199][:count], dtype=torch.int32).to(DEVICE)
        slots = torch.randperm(3 * SIZE, generator=made)[:count]
        self.slots = slots.to(DEVICE, torch.int32)
        self.cos, self.sin = tables(dim)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        split = self.qkv.view(-1, self.heads + 2 * self.kv_heads, self.dim)
        return split.split([self.heads, self.kv_heads, self.kv_heads], 1)

    def run(self) -> None:
        rotate_and_store(self.qkv, self.pages, self.positions, self.slots, self.cos, self.sin)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # One rounding: half a unit of the last place (a whole one where the interpreter cuts bf16 off),
    # and a little for the float32 inside.
    unit = torch.finfo(found.dtype).eps * (0.51 if DEVICE == "cuda" else 1.01)
    torch.testing.assert_close(found.double(), wanted, rtol=unit, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (16, 2, 128), (32, 8, 128)]
)
def test_queries_and_keys_turn_and_values_stay(heads, kv_heads, dim, dtype):
    case = Case(heads, kv_heads, dim, dtype)
    query, key, value = (part.clone() for part in case.parts())
    at = case.positions.long()
    cos, sin = case.cos[at], case.sin[at]
    case.run()
    turned, kept, _ = case.parts()
    close(turned, rotated(query, cos, sin))
    assert torch.equal(kept, key)
    block, offset = case.slots.long() // SIZE, case.slots.long() % SIZE
    close(case.pages[block, 0, offset], rotated(key, cos, sin))
    assert torch.equal(case.pages[block, 1, offset], value)


def test_only_the_tokens_slots_are_written():
    case = Case(4, 2, 32, torch.float32)
    case.run()
    case.pages.view(-1, 2, SIZE, 2, 32)[
        case.slots.long() // SIZE, :, case.slots.long() % SIZE
    ] = math.nan
    assert case.pages.isnan().all()


def test_padded_tokens_may_share_the_trash_block():
    case = Case(4, 2, 32, torch.float32)
    case.slots[2:] = 3 * SIZE  # block 3 is the trash
    case.run()
    written = case.pages[:3, 0].isfinite().all(-1).all(-1).sum()
    assert written == 2
    assert case.pages[3, 0, 0].isfinite().all()


def test_a_token_has_the_same_bits_alone_and_among_others():
    together, alone = Case(9, 3, 64, torch.bfloat16), Case(9, 3, 64, torch.bfloat16)
    for name in ("qkv", "positions", "slots"):
        setattr(alone, name, getattr(alone, name)[3:4].clone())
    together.run()
    alone.run()
    assert torch.equal(alone.qkv[0], together.qkv[3])
    block, offset = divmod(int(alone.slots[0]), SIZE)
    assert torch.equal(alone.pages[block, :, offset], together.pages[block, :, offset])
