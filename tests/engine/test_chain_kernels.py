"""The kernels that only a device's drafts have, against float64 or plain loops.  Runs no head.

On the interpreter or the card; tensors of floats lie between lines of NaN, see
test_product_kernels.py.
"""

from __future__ import annotations

import math
import os
import random

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels import chain_attention as attention  # noqa: E402
from engine.kernels import chain_draw as drawing  # noqa: E402
from engine.kernels.chain_gate import chain_gate  # noqa: E402
from engine.kernels.chain_inputs import chain_inputs  # noqa: E402
from engine.kernels.chain_norms import chain_norms  # noqa: E402
from engine.kernels.chain_rows import Chains, FlatRows, Groups, Taken, begin, take  # noqa: E402
from engine.kernels.sampler_tables import SlotParams, SlotTables  # noqa: E402
from engine.messages import Sampling  # noqa: E402
from engine.noise import gumbel_at  # noqa: E402
from tests.engine.test_attention_kernels import HALF, TYPES  # noqa: E402
from tests.engine.test_product_kernels import (  # noqa: E402
    Noise,
    check_fence,
    close,
    fenced,
    poisoned,
    silu,
)

EPS, SIZE = 1e-5, 64
POISON = -77


def ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def blank(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


# ---- norms and gates -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "chunks", "width"), [(1, 1, 150), (3, 3, 50), (5, 2, 67)])
def test_each_chunk_is_normed_by_its_own_gain(rows, chunks, width, dtype):
    noise = Noise(rows * width, dtype)
    x, gains, out = noise(rows, chunks * width), noise(chunks, width), poisoned(
        rows, chunks * width, dtype=dtype)
    chain_norms(x, gains, out, EPS)
    close(out, rms(x.view(rows, chunks, width), gains).view(rows, -1))


def test_chunks_of_another_type_are_rounded_before_they_are_normed():
    x, out = Noise(1)(4, 2 * 40), poisoned(4, 2 * 40, dtype=HALF)
    gains = Noise(2, HALF)(2, 40)
    chain_norms(x, gains, out, EPS)
    close(out, rms(x.to(HALF).view(4, 2, 40), gains).view(4, -1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 48), (3, 1100), (5, 67)])
def test_gates_stand_before_ups(rows, columns, dtype):
    # One row more, which is not its business: made of NaN, a write beyond `out` would not show.
    both = Noise(columns, dtype)(rows + 1, 2 * columns)[:rows]
    out = poisoned(rows, columns, dtype=dtype)
    chain_gate(both, out)
    gate, up = both.double().chunk(2, dim=-1)
    close(out, silu(gate) * up, 3)


class Inputs:
    """What `chain_inputs` is given, for `rows` rows."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, features: int | None = None):
        noise = Noise(rows + width, dtype)
        self.embedding, self.gain, self.other = noise(30, width), noise(width), noise(width)
        self.feature = noise(features or rows, width)
        made = torch.Generator().manual_seed(rows)
        self.tokens = torch.randint(30, (rows,), generator=made).to(DEVICE, torch.int32)
        self.out = poisoned(rows, 2 * width, dtype=dtype)

    def run(self, **more) -> None:
        chain_inputs(self.tokens, self.embedding, self.gain, self.feature, self.other, self.out,
                     EPS, **more)

    def wanted(self, feature: torch.Tensor) -> torch.Tensor:
        token = rms(self.embedding[self.tokens.long()], self.gain)
        return torch.cat((token, rms(feature, self.other)), dim=-1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (5, 50), (3, 131)])
def test_a_row_reads_its_token_and_its_feature(rows, width, dtype):
    case = Inputs(rows, width, dtype)
    case.run()
    close(case.out, case.wanted(case.feature))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_picked_feature_is_read_where_it_lies(dtype):
    case = Inputs(4, 50, dtype, features=9)
    picked = ints([8, 0, 3, 3])
    case.run(picked=picked)
    close(case.out, case.wanted(case.feature[picked.long()]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_normed_feature_may_take_the_place_of_the_bare_one(dtype):
    case = Inputs(3, 67, dtype)
    bare = case.feature.clone()
    case.run(normed=case.feature)
    close(case.out, case.wanted(bare))
    assert torch.equal(case.feature, case.out[:, 67:])
    check_fence(case.feature)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_features_of_ends_are_kept_and_others_are_not(dtype):
    case, kept = Inputs(4, 50, dtype), poisoned(6, 50, dtype=dtype)
    case.run(ends=ints([-1, 5, -1, 2]), kept=kept)
    close(case.out, case.wanted(case.feature))
    assert torch.equal(kept[[5, 2]], case.feature[[1, 3]])
    assert kept[[0, 1, 3, 4]].isnan().all()
    check_fence(kept)


# ---- attention -----------------------------------------------------------------------------------


class Pages:
    """Sequences of a draft in pages: NaN in slot 0, behind the newest row and in foreign blocks."""

    def __init__(self, positions: list[int], heads: int, kv_heads: int, dim: int, dtype):
        self.group, many = heads // kv_heads, len(positions)
        made = torch.Generator().manual_seed(heads * dim)
        width = max(positions) // SIZE + 2
        blocks = torch.randperm(many * width + 1, generator=made)
        pages = torch.full((len(blocks), 2, SIZE, kv_heads, dim), math.nan)
        self.table = torch.full((many + 2, width), int(blocks[-1]), dtype=torch.int32)
        self.place = torch.randperm(many + 2, generator=made)[:many]
        self.content = []
        for i, position in enumerate(positions):
            own = blocks[i * width : (i + 1) * width]
            self.table[self.place[i]] = own
            content = torch.randn(position + 1, 2, kv_heads, dim, generator=made)
            for n in range(position + 1):
                pages[own[(n + 1) // SIZE], :, (n + 1) % SIZE] = content[n]
            self.content.append(content.to(dtype).double())
        self.pages = pages.to(DEVICE, dtype)
        self.query = fenced(torch.randn(many, heads * dim, generator=made), dtype)
        self.out = poisoned(many, heads * dim, dtype=dtype)

    def wanted(self, row: int) -> torch.Tensor:
        """[heads * dim] of a row of `query`, by softmax in fp64."""
        oldest = min(self.starts[row] - 1, len(self.content[row]) - 1)
        key, value = self.content[row][oldest:].repeat_interleave(self.group, dim=2).unbind(1)
        query = self.query[row].double().cpu().view(key.shape[1:])
        score = torch.einsum("hd,nhd->hn", query, key) / math.sqrt(query.shape[1])
        return torch.einsum("hn,nhd->hd", score.softmax(-1), value).flatten()

    def run(self, positions: list[int], query=None, picked=None, starts=None) -> None:
        self.starts = starts or [1] * len(positions)
        attention.chain_attention(
            self.query if query is None else query, self.pages, self.table.to(DEVICE),
            self.place.to(DEVICE, torch.int32), ints(positions), ints(self.starts),
            self.out, picked=picked)

    def check(self) -> None:
        check_fence(self.out)
        wanted = torch.stack([self.wanted(row) for row in range(len(self.out))])
        unit = torch.finfo(self.out.dtype).eps
        torch.testing.assert_close(self.out.double().cpu(), wanted, rtol=2 * unit, atol=4 * unit)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (16, 1)])
def test_a_row_attends_to_all_that_its_sequence_wrote(heads, kv_heads, split, dtype, monkeypatch):
    positions = [0, 62, 63, 64, 299]
    monkeypatch.setattr(attention, "FULL", split * len(positions) * kv_heads)
    assert attention.splits_of(len(positions), kv_heads) == split
    case = Pages(positions, heads, kv_heads, 32, dtype)
    case.run(positions)
    case.check()


@pytest.mark.parametrize("split", [1, 4])
def test_a_picked_query_is_read_where_it_lies(split, monkeypatch):
    """Beside keys and values, as `extend` leaves it."""
    positions = [5, 130, 64]
    monkeypatch.setattr(attention, "FULL", split * len(positions) * 2)
    case = Pages(positions, 6, 2, 16, torch.float32)
    both = torch.full((7, 6 * 16 + 11), math.nan, device=DEVICE)
    both[[6, 0, 3], : 6 * 16] = case.query
    case.run(positions, query=both, picked=ints([6, 0, 3]))
    case.check()


# ---- draws ---------------------------------------------------------------------------------------

SAMPLINGS = [
    Sampling(temperature=0.0, seed=3), Sampling(temperature=1.0, seed=-5),
    Sampling(temperature=0.3, seed=2**61 + 7), Sampling(temperature=2.5, seed=0),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("count", [5, 1000, 2 * drawing.BLOCK + 77])
def test_a_draft_is_drawn_with_the_noise_of_the_target(count, kept, dtype):
    rows, ahead = 7, 2
    logits = Noise(count, dtype)(rows, count, spread=3.0)
    tables = SlotTables.allocate(rows + 1, count, DEVICE)
    params = SlotParams(tables)
    place = random.Random(count).sample(range(rows + 1), rows)
    given = [SAMPLINGS[i % 4] for i in range(rows)]
    for slot, sampling in zip(place, given, strict=True):
        params.write(slot, sampling, [], slot % 3, [], [])
    params.upload()
    ids = (torch.randperm(3 * count)[:count].sort().values if kept else torch.arange(count))
    position, tokens = [40 * i for i in range(rows)], blank(rows)
    drawing.chain_draw(
        logits, ids.to(DEVICE, torch.int32) if kept else None, tables.records, ints(place),
        ints(position), tokens, ahead)
    noise = gumbel_at(
        torch.tensor([one.seed for one in given]), torch.tensor([slot % 3 for slot in place]),
        torch.tensor(position) + ahead, ids.expand(rows, -1), torch.float64)
    for i, one in enumerate(given):
        score = logits[i].double().cpu()
        score = score / one.temperature + noise[i] if one.temperature else score
        found = (ids == int(tokens[i])).nonzero()
        assert len(found) == 1, f"row {i} drew {int(tokens[i])}, which the draft has not"
        # Two scores that lie closer in fp64 than fp32 tells apart may come in either order.
        assert score[found[0, 0]] >= score.max() - (3e-5 if one.temperature else 0)


@pytest.mark.parametrize("best", [[0, 1], [3, drawing.BLOCK], [drawing.BLOCK + 5, 9000]])
def test_of_equal_logits_a_greedy_row_takes_the_first(best):
    logits = fenced(torch.zeros(1, 9001), torch.float32)
    logits[0, best] = 2.0
    tables, tokens = SlotTables.allocate(1, 1, DEVICE), blank(1)
    drawing.chain_draw(logits, None, tables.records, ints([0]), ints([0]), tokens, 2)
    assert int(tokens[0]) == best[0]


# ---- rows ----------------------------------------------------------------------------------------

TRASH = 9 * SIZE


@pytest.mark.parametrize("count", [1, 128, 301])
def test_a_flat_token_becomes_a_row_where_it_is_right_and_trash_behind_a_wrong_draft(count):
    chance = random.Random(count)
    groups = 6
    matched = [chance.randrange(4) for _ in range(groups)]
    drawn = [chance.randrange(1000) for _ in range(40)]
    drawn[7] = -1  # nothing was legal
    rows = {name: [] for name in ("known", "group", "offset", "fresh", "after", "ends")}
    wanted = []
    for i in range(count):
        unknown = chance.random() < 0.5
        known = -1 if unknown else chance.randrange(1000)
        group, offset = chance.randrange(groups), chance.randrange(4)
        fresh, after, end = chance.randrange(40), chance.randrange(500), chance.choice([-1, i])
        if not unknown:  # what is not of a draw means nothing
            group, offset, fresh = 10**6, 10**6, 10**6
            wanted.append((known, after, end))
        elif offset <= matched[group]:
            wanted.append((max(drawn[fresh], 0), after, end))
        else:
            wanted.append((0, TRASH, -1))
        for name, one in zip(rows, (known, group, offset, fresh, after, end), strict=True):
            rows[name].append(one)
    taken = Taken(blank(count + 1), blank(count + 1), blank(count + 1))
    take(FlatRows(**{name: ints(one) for name, one in rows.items()}), ints(matched), ints(drawn),
         taken, TRASH)
    found = zip(taken.tokens.tolist(), taken.slots.tolist(), taken.ends.tolist(), strict=True)
    assert [*found] == [*wanted, (POISON, POISON, POISON)]


@pytest.mark.parametrize("split", [1, 4])
def test_a_row_sees_nothing_before_its_start_and_always_its_own_slot(split, monkeypatch):
    positions, starts = [0, 70, 70, 299, 299, 299], [9, 1, 71, 64, 250, 999]
    monkeypatch.setattr(attention, "FULL", split * len(positions) * 3)
    case = Pages(positions, 9, 3, 32, torch.float32)
    case.run(positions, starts=starts)
    case.check()


@pytest.mark.parametrize("many", [1, 6])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_chain_begins_behind_what_stood_and_writes_no_further_than_it_may(many, depth):
    chance = random.Random(many * depth)
    table = torch.randint(1, 9, (many + 1, 8), dtype=torch.int32)
    base = [chance.randrange(50) for _ in range(many)]
    start = [chance.choice([0, 61, 62, 63, 200]) for _ in range(many)]
    limit = [chance.choice([0, 1, 2, 5]) for _ in range(many)]
    matched = [chance.randrange(3) for _ in range(many)]
    limit[-1], place = (-1 if many > 1 else 5), chance.sample(range(many + 1), many)
    each = (blank(depth, many) for _ in range(3))
    chains = Chains(blank(many), blank(many), *each)
    begin(Groups(ints(base), ints(start), ints(place), ints(limit), blank(many)), ints(matched),
          table.to(DEVICE), chains, SIZE, TRASH)
    for i in range(many):
        right = matched[i] if limit[i] >= 0 else 0  # of who is not there it is an older step's
        assert int(chains.row[i]) == base[i] + right
        for step in range(depth):
            position, slot = start[i] + right + step, TRASH
            if step < limit[i]:
                block, inner = divmod(position + 1, SIZE)
                slot = int(table[place[i], block]) * SIZE + inner
            else:
                position = 0
            found = int(chains.positions[step, i]), int(chains.slots[step, i])
            assert found == (position, slot)
    assert (chains.tokens == POISON).all()
