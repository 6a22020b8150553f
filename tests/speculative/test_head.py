"""A head's pass over rows is that of the plain reference, whatever its switches."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model_config import BadCheckpoint, RopeScaling
from speculative.rotary import Yarn
from tests.heads import F64, Plain, causal, config, head_of, kept_of, one_thread, weights_of

alone = pytest.fixture(autouse=True, scope="module")(one_thread)

SWITCHES = {
    "plain": {},
    "the original: as wide as its target": {"hidden": 64, "draft_vocab": 259},
    "normed residual": {"norm_before_residual": True},
    "one norm before fc": {"norm_before_fc": True},
    "a norm each chunk": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "biases": {"fc_bias": True, "attention_bias": True},
    "two layers": {"layers": 2},
    "two layers, all norms": {"layers": 2, "norm_before_residual": True, "fc_norm": True,
                              "norm_output": True},
    "two taps": {"taps": (1, 2)},
    "another base": {"rope_theta": 500.0},
    "one KV head a query head": {"kv_heads": 4},
}


def both(shape, count=9, seed=3):
    """Rows of a sequence, and what head and reference make of them."""
    noise = torch.Generator().manual_seed(seed)
    aux = torch.randn(count, shape.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, shape.vocab, (count,), generator=noise)
    head = head_of(shape, seed)
    state = head.run(head.fuse(aux), tokens, torch.arange(count), causal(shape, count))
    plain = Plain(shape, weights_of(shape, seed), kept_of(shape, seed))
    rows = [plain.row(plain.fused(one), int(token), i)
            for i, (one, token) in enumerate(zip(aux, tokens, strict=True))]
    return head.read(state), tuple(torch.stack(part) for part in zip(*rows, strict=True))


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
def test_rows_are_those_of_the_reference(changes):
    ours, theirs = both(config(**changes))
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.shape == right.shape
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


def test_what_is_fed_on_does_not_change_what_is_drawn():
    bare, normed = (both(config(norm_output=on))[0] for on in (False, True))
    assert torch.equal(bare[1], normed[1]) and not torch.allclose(bare[0], normed[0])


def test_the_residual_switch_changes_what_is_drawn():
    first, other = (both(config(norm_before_residual=on))[0] for on in (False, True))
    assert not torch.allclose(first[1], other[1])


def test_the_embedding_comes_before_the_feature():
    shape = config()
    ours, _ = both(shape)
    weights = weights_of(shape, 3)
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"layers.0.self_attn.{part}.weight"
        weights[name] = weights[name].roll(shape.hidden, dims=1)
    noise = torch.Generator().manual_seed(3)
    aux = torch.randn(9, shape.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, shape.vocab, (9,), generator=noise).tolist()
    _, swapped = Plain(shape, weights, kept_of(shape)).read(aux, tokens)
    assert not torch.allclose(ours[1][-1], swapped)


def yarn_angles(dim, theta, factor, original, fast=32.0, slow=1.0):
    """Angles a position by the definition, one frequency at a time."""
    found = []
    low = math.floor(dim * math.log(original / (fast * 2 * math.pi)) / (2 * math.log(theta)))
    high = math.ceil(dim * math.log(original / (slow * 2 * math.pi)) / (2 * math.log(theta)))
    for i in range(dim // 2):
        angle = theta ** (-2 * i / dim)
        share = min(1.0, max(0.0, (i - max(low, 0)) / (min(high, dim - 1) - max(low, 0))))
        found.append(angle * (1 - share) + angle / factor * share)
    return torch.tensor(found, dtype=F64)


@pytest.mark.parametrize("position", [1, 2048, 8190, 32767])
def test_yarn_turns_as_far_as_the_server_serves(position):
    scale = 0.1 * math.log(32.0) + 1
    shape = config(rope_scaling=Yarn(32.0, 64, scale=scale), rope_theta=10000.0)
    angles = yarn_angles(16, 10000.0, 32.0, 64)
    head = head_of(shape, max_len=32768)
    plain = Plain(shape, weights_of(shape), kept_of(shape), angles, scale)
    seen = {}

    def attend(layer, query, keys, values):
        seen["keys"] = keys
        return query.reshape(1, -1)

    feature = torch.randn(1, 32, dtype=F64, generator=torch.Generator().manual_seed(2))
    head.run(feature, torch.tensor([5]), torch.tensor([position]), attend)
    turned = seen["keys"][0]
    head.run(feature, torch.tensor([5]), torch.tensor([0]), attend)
    bare = seen["keys"][0] / scale  # position 0 turns nothing
    wanted = torch.stack([plain.turned(one, position) for one in bare])
    torch.testing.assert_close(turned, wanted, rtol=1e-9, atol=1e-9)


def test_llama3_scaling_is_the_targets_own_rule():
    shape = config(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    ours, theirs = both(shape)
    assert not torch.allclose(ours[1], theirs[1])  # the reference turns without scaling
    linear = config(rope_scaling=RopeScaling("linear", 4.0))
    noise = torch.Generator().manual_seed(3)
    aux = torch.randn(9, shape.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, shape.vocab, (9,), generator=noise).tolist()
    half = torch.arange(8, dtype=F64)
    plain = Plain(linear, weights_of(linear, 3), kept_of(linear, 3), 1e4 ** (-half / 8) / 4)
    _, logits = plain.read(aux, tokens)
    torch.testing.assert_close(both(linear)[0][1][-1], logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"taps": (2, 1, 3)}, "must rise"),
        ({"taps": ()}, "must rise"),
        ({"taps": (1, 1, 2)}, "must rise"),
        ({"norm_before_fc": True, "fc_norm": True}, "one of the two"),
        ({"draft_vocab": 260}, "draws 260 tokens, its target has 259"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, words):
    with pytest.raises(BadCheckpoint, match=words):
        config(**changes)
