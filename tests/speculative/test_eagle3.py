"""The head's own KV: paged, shared, copied, chunked and overwritten, drafts are the reference's."""

from __future__ import annotations

import math

import pytest
import torch

from engine.noise import gumbel
from speculative import eagle3
from speculative.head import Head
from tests.heads import (
    F64,
    Part,
    Plain,
    config,
    drafts,
    eagle_of,
    features_of,
    kept_of,
    kv_of,
    one_thread,
    weights_of,
)

alone = pytest.fixture(autouse=True, scope="module")(one_thread)

SIZE = 8


def reserved(blocks=24, **changes):
    eagle = eagle_of(**changes)
    eagle.reserve(blocks, SIZE, F64, "cpu")
    return eagle


def text(count, seed=0, shape=None):
    """True features and tokens of a sequence: aux [count, fused], tokens [count + 1]."""
    shape = shape or config()
    noise = torch.Generator().manual_seed(100 + seed)
    aux = torch.randn(count, shape.fused, generator=noise, dtype=F64)
    return aux, torch.randint(0, shape.vocab, (count + 1,), generator=noise).tolist()


def part(aux, tokens, start, stop, table, **more):
    return Part(start, aux[start:stop], tokens[start : stop + 1], table, **more)


def reference(aux, tokens, count, **changes):
    shape = config(**changes)
    return Plain(shape, weights_of(shape), kept_of(shape)).chain(aux, tokens[1:], count)


TABLES = ([3, 11, 0, 7], [5, 1, 9, 12])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 17, 24])
def test_a_whole_sequence_drafts_what_the_reference_drafts(count, norm_output, layers):
    changes = {"layers": layers, "norm_output": norm_output}
    aux, tokens = text(count)
    eagle = reserved(**changes)
    (chain,) = drafts(eagle, [part(aux, tokens, 0, count, TABLES[0], limit=5)])
    assert chain == reference(aux, tokens, 5, **changes)


@pytest.mark.parametrize("cuts", [(3,), (8,), (7, 8, 9), (1, 2, 17), (16,), (8, 16)])
def test_chunks_draft_what_the_whole_drafts(cuts):
    aux, tokens = text(20)
    eagle = reserved()
    ends = [*cuts, 20]
    for start, stop in zip([0, *cuts], ends, strict=True):
        limit = 4 if stop == 20 else 0
        (chain,) = drafts(eagle, [part(aux, tokens, start, stop, TABLES[0], limit=limit)])
    assert chain == reference(aux, tokens, 4)


def test_a_batch_drafts_what_each_would_alone():
    texts = [text(count, seed) for seed, count in enumerate((20, 3, 9, 1))]
    tables = [[0, 1, 2, 3], [4, 5], [6, 7, 8], [9, 10]]
    eagle = reserved()
    limits = [4, 2, 0, 5]
    chains = drafts(eagle, [
        part(aux, tokens, 0, len(aux), table, limit=limit)
        for (aux, tokens), table, limit in zip(texts, tables, limits, strict=True)
    ])
    for (aux, tokens), limit, chain in zip(texts, limits, chains, strict=True):
        assert chain == reference(aux, tokens, limit)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_after_a_verification_kv_and_drafts_are_those_of_true_features(accepted):
    """What the head wrote for its own drafts is made anew; then it is as if never drafted."""
    aux, tokens = text(24)
    eagle, fresh = reserved(), reserved()
    (first,) = drafts(eagle, [part(aux, tokens, 0, 14, TABLES[0], limit=3)])
    assert first == reference(aux[:14], tokens[:15], 3)
    stop = 14 + accepted + 1
    (second,) = drafts(eagle, [part(aux, tokens, 14, stop, TABLES[0], limit=3)])
    assert second == reference(aux[:stop], tokens[: stop + 1], 3)
    drafts(fresh, [part(aux, tokens, 0, stop, TABLES[1], limit=0)])
    slots = range(1, stop + 1)
    kept, scratch = kv_of(eagle, TABLES[0], slots), kv_of(fresh, TABLES[1], slots)
    torch.testing.assert_close(kept, scratch, rtol=1e-12, atol=1e-12)


def test_its_own_features_leave_another_kv_than_true_ones():
    """Otherwise the test above could not fail."""
    aux, tokens = text(24)
    eagle = reserved()
    (chain,) = drafts(eagle, [part(aux, tokens, 0, 14, TABLES[0], limit=3)])
    own = kv_of(eagle, TABLES[0], range(15, 17)).clone()
    drafts(eagle, [part(aux, [*tokens[:15], *chain, 0], 14, 16, TABLES[0], limit=0)])
    assert not torch.allclose(own, kv_of(eagle, TABLES[0], range(15, 17)))


@pytest.mark.parametrize("hit", [8, 16])
def test_a_sequence_that_shares_blocks_drafts_as_if_it_had_run_them(hit):
    """The first row behind a hit is made of the feature that was kept beside the block."""
    aux, tokens = text(20)
    others, foreign = text(20, 1)
    mixed = torch.cat((aux[:hit], others[hit:]))
    spoken = [*tokens[:hit], *foreign[hit:]]
    eagle = reserved()
    drafts(eagle, [part(aux, tokens, 0, 20, [2, 4, 6], limit=2)])
    shared = [2, 4, 6][: hit // SIZE]
    table = [*shared, 10, 12, 14][:4]
    before = kv_of(eagle, shared, range(hit)).clone()
    (chain,) = drafts(eagle, [part(mixed, spoken, hit, 20, table, limit=4)])
    assert chain == reference(mixed, spoken, 4)
    assert torch.equal(before, kv_of(eagle, shared, range(hit))), "a shared block was written"


def test_a_copied_block_carries_kv_and_feature():
    aux, tokens = text(20)
    eagle = reserved()
    drafts(eagle, [part(aux, tokens, 0, 16, [2, 4, 6], limit=0)])
    eagle.copy(4, 15)
    (chain,) = drafts(eagle, [part(aux, tokens, 16, 20, [2, 15, 10], limit=4)])
    assert chain == reference(aux, tokens, 4)
    # In the middle of a copied block: one token more is computed, and none has to be joined.
    eagle.copy(4, 17)
    other, foreign = text(20, 5)
    mixed = torch.cat((aux[:12], other[12:]))
    spoken = [*tokens[:13], *foreign[13:]]
    (chain,) = drafts(eagle, [part(mixed, spoken, 12, 20, [2, 17, 11], limit=4)])
    assert chain == reference(mixed, spoken, 4)


def test_a_lost_feature_is_noticed():
    """The tests of hits can fail: without the kept feature, or with another block's, drafts differ.
    """
    aux, tokens = text(20)
    eagle = reserved()
    drafts(eagle, [part(aux, tokens, 0, 16, [2, 4, 6], limit=0)])
    eagle.last_features[4] = eagle.last_features[2]
    eagle.extend(features_of([part(aux, tokens, 16, 20, [2, 4, 10], limit=4)], SIZE))
    wrong = kv_of(eagle, [2, 4, 10], range(16, 17)).clone()
    drafts(eagle, [part(aux, tokens, 0, 20, [3, 5, 7], limit=0)])
    assert not torch.allclose(wrong, kv_of(eagle, [3, 5, 7], range(16, 17)))


# ---- what is not there is not read -------------------------------------------------------------


def exact(eagle):
    """Attention that looks at the visible slots alone, so that NaN anywhere else cannot matter."""
    shape, size = eagle.head.config, SIZE

    class Exact:
        def prepare(self, batch):
            self.batch = batch

        def run(self, query, keys, values, pages):
            batch, out, begin = self.batch, [], 0
            for slot, key, value in zip(batch.slots, keys, values, strict=True):
                pages[slot // size, 0, slot % size] = key
                pages[slot // size, 1, slot % size] = value
            flat = pages.transpose(1, 2).reshape(-1, 2, shape.kv_heads, shape.head_dim)
            for start, count, ids in zip(batch.starts, batch.counts, batch.tables, strict=True):
                for place in range(count):
                    seen = [ids[s // size] * size + s % size for s in range(1, start + place + 1)]
                    read, group = flat[seen], shape.heads // shape.kv_heads
                    k, v = (read[:, i].repeat_interleave(group, 1) for i in (0, 1))
                    scores = torch.einsum("hd,shd->hs", query[begin + place], k)
                    chances = (scores / shape.head_dim**0.5).softmax(-1)
                    out.append(torch.einsum("hs,shd->hd", chances, v).flatten())
                begin += count
            return torch.stack(out)

    return Exact()


def a_day(eagle, seen):
    """Chunks, drafts, a rejection, a hit, a copy and a reused block; every chain goes to `seen`."""
    aux, tokens = text(30)
    other, foreign = text(30, 1)
    for start, stop, limit in ((0, 5, 0), (5, 13, 3), (13, 14, 3), (14, 17, 5), (17, 24, 2)):
        seen.append(drafts(eagle, [
            part(aux, tokens, start, stop, [3, 1, 8, 5], limit=limit),
            *([part(other, foreign, 0, 9, [0, 9], limit=4)] if start == 5 else []),
        ]))
    mixed = torch.cat((aux[:16], other[16:]))
    spoken = [*tokens[:16], *foreign[16:]]
    seen.append(drafts(eagle, [part(mixed, spoken, 16, 27, [3, 1, 11, 12], limit=4)]))
    eagle.copy(8, 13)
    seen.append(drafts(eagle, [part(aux, tokens, 20, 30, [3, 1, 13, 2, 10], limit=4)]))
    seen.append(drafts(eagle, [part(other, foreign, 0, 12, [5, 8, 6], limit=4)]))


def test_slots_that_nobody_wrote_are_never_read():
    """NaN in all that is unwritten, and an attention that shows every read of it."""
    clean, poisoned = [], []
    a_day(reserved(), clean)
    eagle = reserved()
    eagle.pages.fill_(math.nan)
    eagle.last_features.fill_(math.nan)
    eagle._attention = exact(eagle)
    states = []
    run = eagle.head.run
    eagle.head.run = lambda *given: states.append(run(*given)) or states[-1]
    a_day(eagle, poisoned)
    assert poisoned == clean
    assert all(state.isfinite().all() for state in states)


def test_what_is_masked_weighs_nothing():
    """With the real attention: another filling of unwritten slots does not move one bit."""
    clean, filled = [], []
    a_day(reserved(), clean)
    eagle = reserved()
    eagle.pages.fill_(1e4)
    eagle.last_features.fill_(1e4)
    a_day(eagle, filled)
    assert filled == clean


def test_a_request_whose_features_are_nan_spoils_nobody_else():
    aux, tokens = text(20)
    sick = torch.full_like(aux[:12], math.nan)
    eagle = reserved()
    chains = drafts(eagle, [
        part(aux, tokens, 0, 9, [3, 1, 8], limit=3),
        Part(0, sick, tokens[:13], [0, 9, 7], 3, heat=1.0),
    ])
    assert chains[0] == reference(aux[:9], tokens[:10], 3)
    assert all(0 <= token < 259 for token in chains[1])
    (after,) = drafts(eagle, [part(aux, tokens, 0, 10, [0, 9, 7], limit=3)])  # its blocks, reused
    assert after == reference(aux[:10], tokens[:11], 3)
    assert eagle.pages.isfinite().all()


# ---- ids and noise -----------------------------------------------------------------------------


def test_drafts_are_drawn_with_the_targets_noise_at_their_own_ids():
    aux, tokens = text(9)
    shape = config()
    kept = kept_of(shape)
    _, logits = Plain(shape, weights_of(shape), kept).read(aux, tokens[1:])
    wanted = set()
    for seed in (1, -5, 2**62 + 3):
        for heat in (0.5, 1.0):
            for choice in (0, 2):
                where = (torch.tensor([seed]), torch.tensor([choice]), torch.tensor([10]))
                noise = gumbel(*where, shape.vocab, F64)[0, kept]
                best = int(kept[(logits / heat + noise).argmax()])
                wanted.add(best)
                (chain,) = drafts(reserved(), [part(
                    aux, tokens, 0, 9, TABLES[0], limit=1, seed=seed, heat=heat, choice=choice)])
                assert chain == [best]
    assert len(wanted) > 4


def test_only_the_likeliest_places_get_noise(monkeypatch):
    """Of 200 places all do; of more, those with the best logits."""
    aux, tokens = text(9)
    shape = config()
    kept = kept_of(shape)
    _, logits = Plain(shape, weights_of(shape), kept).read(aux, tokens[1:])
    assert shape.draft_vocab <= eagle3.CANDIDATES
    monkeypatch.setattr(eagle3, "CANDIDATES", 5)
    likely = set(kept[logits.topk(5).indices].tolist())
    drawn = set()
    for seed in range(60):
        drawn |= set(drafts(reserved(), [part(
            aux, tokens, 0, 9, TABLES[0], limit=1, seed=seed, heat=1.5)])[0])
    assert drawn <= likely and len(drawn) > 2


@pytest.mark.parametrize("vocab", [200, 259])
def test_every_id_is_one_that_the_head_can_draw(vocab):
    eagle = reserved(blocks=40, draft_vocab=vocab)
    kept = kept_of(config(draft_vocab=vocab))
    known = set(range(259)) if kept is None else set(kept.tolist())
    aux, tokens = text(30)
    features = features_of([
        part(aux, tokens, 0, stop, list(range(6 * i, 6 * i + 6)), limit=i, seed=i, heat=float(i))
        for i, stop in enumerate((30, 3, 9, 1, 16, 2))
    ], SIZE)
    eagle.extend(features)
    for depth in range(5):
        found = eagle.step(features, depth)
        assert found.dtype == torch.int64 and found.shape == (6,)
        assert set(found[depth + 1 :].tolist()) <= known
        assert all(0 <= token < 259 for token in found.tolist())


@pytest.mark.parametrize("position", [2047, 2048, 8190, 8191])
def test_positions_far_beyond_what_drafts_are_trained_on(position):
    """The 2049th and the 8191st token: keys are turned as far as the server's texts reach."""
    shape = config()
    weights = weights_of(shape)
    eagle = reserved(blocks=position // SIZE + 2)
    eagle.head = Head(shape, weights, weights["embed_tokens.weight"], kept_of(shape), 8192)
    aux, tokens = text(1)
    table = list(range(position // SIZE + 2))
    drafts(eagle, [Part(position, aux, tokens, table)])
    plain = Plain(shape, weights, kept_of(shape))
    plain.row(plain.fused(aux[0]), tokens[1], position)
    found = kv_of(eagle, table, range(position + 1, position + 2))[0, 0, 0]
    torch.testing.assert_close(found, plain.keys[0][0], rtol=1e-9, atol=1e-9)


def test_drafting_past_the_last_position_gives_valid_ids():
    shape = config()
    weights = weights_of(shape)
    eagle = reserved()
    eagle.head = Head(shape, weights, weights["embed_tokens.weight"], kept_of(shape), 20)
    aux, tokens = text(20)
    (chain,) = drafts(eagle, [part(aux, tokens, 0, 20, TABLES[0], limit=5)])
    assert all(0 <= token < 259 for token in chain)


def test_bf16_and_fp32_draft_nearly_the_same():
    aux, tokens = text(20)
    seen = []
    for dtype, near in ((F64, 0.0), (torch.float32, 1e-3), (torch.bfloat16, 0.35)):
        eagle = eagle_of(dtype=dtype)
        eagle.reserve(8, SIZE, dtype, "cpu")
        features = features_of([part(aux.to(dtype), tokens, 0, 20, [0, 1, 2], limit=2)], SIZE)
        eagle.extend(features)
        seen.append(eagle._logits.double())
        assert (seen[-1] - seen[0]).abs().max() <= near
        assert eagle.step(features, 0).dtype == eagle.step(features, 1).dtype == torch.int64
