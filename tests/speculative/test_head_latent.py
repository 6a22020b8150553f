"""Latent attention is that of the reference, in rows, in pages and out of a Kimi draft's file."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model_config import BadCheckpoint
from engine.weights import BadWeights
from speculative.eagle3 import Eagle3
from speculative.head import Head
from speculative.latent import Latent
from speculative.rotary import Yarn
from tests.head_files import TAPS, opened, target_tables, written
from tests.heads import F64, Part, Plain, causal, config, drafts, one_thread, rms, weights_of

alone = pytest.fixture(autouse=True, scope="module")(one_thread)

WIDTHS = Latent(query_rank=20, key_rank=12, plain=8, turned=6, value=10)
YARN = Yarn(64.0, 32, 1.0, 1.0, scale=1.0, sharper=(0.1 * math.log(64) + 1) ** 2)  # as Kimi's


class PlainLatent(Plain):
    """The reference's attention by the book: latents, neighbours turned together, no pages."""

    def turned(self, part, position):
        pairs = part.view(-1, 2)
        cos, sin = (self.angles * position).cos(), (self.angles * position).sin()
        low = pairs[:, 0] * cos - pairs[:, 1] * sin
        high = pairs[:, 1] * cos + pairs[:, 0] * sin
        return torch.cat((low, high)) * self.scale

    def attend(self, i, x, position):
        shape, latent, at = self.shape, self.shape.latent, f"layers.{i}.self_attn."
        small = rms(self[at + "q_a_proj"] @ x, self[at + "q_a_layernorm"], shape.eps)
        queries = (self[at + "q_b_proj"] @ small).view(shape.heads, -1)
        both = self[at + "kv_a_proj_with_mqa"] @ x
        small = rms(both[: latent.key_rank], self[at + "kv_a_layernorm"], shape.eps)
        shared = self.turned(both[latent.key_rank :], position)
        each = (self[at + "kv_b_proj"] @ small).view(shape.heads, -1)
        self.keys[i].append(
            [torch.cat((one[: latent.plain], shared)) for one in each])
        self.values[i].append(each[:, latent.plain :])
        mixed = []
        for head, query in enumerate(queries):
            turned = self.turned(query[latent.plain :], position)
            query = torch.cat((query[: latent.plain], turned))
            scores = torch.stack([query @ past[head] for past in self.keys[i]])
            scale = getattr(shape.rope_scaling, "sharper", 1.0)
            chances = (scores / (latent.plain + latent.turned) ** 0.5 * scale).softmax(0)
            pairs = zip(chances, self.values[i], strict=True)
            mixed.append(sum(chance * past[head] for chance, past in pairs))
        return self[at + "o_proj"] @ torch.cat(mixed)


def shape_of(**changes):
    given = {
        "hidden": 64, "intermediate": 96, "taps": TAPS, "latent": WIDTHS, "kv_heads": 4,
        "head_dim": 14, "draft_vocab": 259,
    }  # fmt: skip
    return config(**(given | changes))


def angles(shape):
    half = torch.arange(3, dtype=F64)
    plain = shape.rope_theta ** (-half / 3)
    return plain if shape.rope_scaling is None else shape.rope_scaling.frequencies(6, 10000.0)


@pytest.mark.parametrize("scaling", [None, YARN])
def test_rows_are_those_of_the_reference(scaling):
    shape = shape_of(rope_scaling=scaling, norm_output=True, fc_norm=True)
    weights, noise = weights_of(shape), torch.Generator().manual_seed(3)
    aux = torch.randn(9, shape.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, 259, (9,), generator=noise)
    head = Head(shape, weights, weights["embed_tokens.weight"], None, 64)
    state = head.run(head.fuse(aux), tokens, torch.arange(9), causal(shape, 9))
    plain = PlainLatent(shape, weights, None, angles(shape))
    feature, logits = plain.read(aux, tokens.tolist())
    for mine, right in zip(head.read(state), (feature, logits), strict=True):
        torch.testing.assert_close(mine[-1], right, rtol=1e-9, atol=1e-9)


def test_pages_chunks_and_verification_give_the_references_drafts():
    shape = shape_of(rope_scaling=YARN)
    weights, noise = weights_of(shape), torch.Generator().manual_seed(4)
    aux = torch.randn(20, shape.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, 259, (21,), generator=noise).tolist()
    eagle = Eagle3(Head(shape, weights, weights["embed_tokens.weight"], None, 64))
    eagle.reserve(6, 8, F64, "cpu")
    for start, stop in ((0, 5), (5, 8), (8, 10), (10, 20)):
        (chain,) = drafts(
            eagle, [Part(start, aux[start:stop], tokens[start : stop + 1], [3, 0, 5, 1], 4)])
        plain = PlainLatent(shape, weights, None, angles(shape))
        assert chain == plain.chain(aux[:stop], tokens[1 : stop + 1], 4)


def test_a_kimi_draft_loads_and_says_what_the_reference_says(tmp_path):
    shape = shape_of(rope_scaling=YARN, rope_theta=50000.0)
    weights = weights_of(shape)
    del weights["embed_tokens.weight"]
    rope = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 32,
            "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    folder = written(tmp_path / "x", "mla", shape, weights, None,
                     config={"rope_scaling": rope, "norm_before_residual": None})
    eagle = opened(folder)
    assert eagle.head.config == shape
    noise = torch.Generator().manual_seed(6)
    aux = torch.randn(9, shape.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, 259, (10,), generator=noise).tolist()
    eagle.reserve(2, 16, F64, "cpu")
    (chain,) = drafts(eagle, [Part(0, aux, tokens, [0, 1], 4)])
    known = weights | {"embed_tokens.weight": target_tables()[0]}
    plain = PlainLatent(shape, known, None, YARN.frequencies(6, 50000.0))
    assert chain == plain.chain(aux, tokens[1:], 4)


@pytest.mark.parametrize("fields, error, words", [
    ({"qk_rope_head_dim": 5}, BadCheckpoint, r"\[20, 12, 8, 5, 10\]; .*the fourth be even"),
    ({"v_head_dim": 15}, BadCheckpoint, "the last at most the third and the fourth together"),
    ({"q_lora_rank": None}, BadCheckpoint, "all must be there"),
    ({"num_hidden_layers": 2}, BadCheckpoint, "latent attention, 2 layers"),
    ({"kv_lora_rank": 11}, BadWeights, r"kv_a_proj_with_mqa.weight.*\(18, 128\).*\(17, 128\)"),
])
def test_widths_that_do_not_fit_are_named(tmp_path, fields, error, words):
    shape = shape_of()
    weights = weights_of(shape)
    folder = written(tmp_path / "x", "mla", shape, weights, None, config=fields)
    with pytest.raises(error, match=words):
        opened(folder)
