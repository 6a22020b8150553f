"""Every model family computes what its reference computes, however its tokens are cut into steps.

The reference is transformers, given the tensors that our loader read.  In float64 its two float32
islands, the norm and the rotary table, are replaced by formulas written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cache.pages import Pages
from cache.prefix import BLOCK
from engine.attention.cpu import CpuAttention
from engine.batch import Batch
from engine.checkpoint import ModelConfig, open_checkpoint
from engine.models import MODELS, family
from engine.weights import load
from tests.tiny import write_llama

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, object]] = {
    "plain": {"kv_heads": 4},
    "grouped": {"heads": 8, "kv_heads": 2},
    "one key-value head": {"kv_heads": 1},
    "untied": {"tied": False},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 10},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3 scaling": {"rope_scaling": LLAMA3, "head_dim": 32, "rope_theta": 5000.0},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
LENGTH = 150  # tokens: three blocks


# ---- the reference -------------------------------------------------------------------------------


class ExactNorm(nn.Module):
    """Root mean square norm without a detour over float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps)


class ExactRotary(nn.Module):
    """Rotary cos and sin in float64, one frequency at a time, from the published rules."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        found = [self.frequency(config, i) for i in range(config.head_dim // 2)]
        self.frequencies = torch.tensor(found * 2, dtype=torch.float64)

    @staticmethod
    def frequency(config: ModelConfig, i: int) -> float:
        base = config.rope_theta ** (-2 * i / config.head_dim)
        scaling = config.rope_scaling
        if scaling is None:
            return base
        if scaling.kind == "linear":
            return base / scaling.factor
        wavelength = 2 * math.pi / base
        if wavelength < scaling.original_max_len / scaling.high_freq_factor:
            return base
        if wavelength > scaling.original_max_len / scaling.low_freq_factor:
            return base / scaling.factor
        smooth = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor)
        return (1 - smooth) * base / scaling.factor + smooth * base

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        return angles.cos(), angles.sin()


def llama(config: ModelConfig, weights: dict[str, Tensor]) -> Callable[[list[int]], Tensor]:
    """transformers' Llama over our tensors: token ids to [length, vocab] logits."""
    rope: dict[str, object] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling := config.rope_scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor,
                     "high_freq_factor": scaling.high_freq_factor,
                     "original_max_position_embeddings": scaling.original_max_len}
    theirs = LlamaConfig(
        vocab_size=config.vocab, hidden_size=config.hidden, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, intermediate_size=config.intermediate,
        max_position_embeddings=config.max_len, rms_norm_eps=config.rms_eps, rope_parameters=rope,
        tie_word_embeddings=config.tied, attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias, attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    head = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    model.load_state_dict({**weights, "lm_head.weight": head}, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(theirs)
    if head.dtype == torch.float64:
        model.model.rotary_emb = ExactRotary(config)
        model.model.norm = ExactNorm(model.model.norm.weight, config.rms_eps)
        for layer in model.model.layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                setattr(layer, name, ExactNorm(getattr(layer, name).weight, config.rms_eps))
    model.eval()
    return lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0]


REFERENCES = {"LlamaForCausalLM": llama}
WRITERS = {"LlamaForCausalLM": write_llama}


def test_every_family_has_a_reference_and_a_tiny_model():
    assert set(REFERENCES) == set(WRITERS) == set(MODELS)


# ---- our side ------------------------------------------------------------------------------------


@dataclass
class Ours:
    """One family's model and its pages, stepped by hand; sequences own fixed blocks."""

    config: ModelConfig
    weights: dict[str, Tensor]

    def __post_init__(self) -> None:
        config, dtype = self.config, next(iter(self.weights.values())).dtype
        self.model = family(config.architecture)(config, dict(self.weights), config.max_len)
        self.pages = Pages(config.layers, 12, BLOCK, config.kv_heads, config.head_dim, dtype)
        self.pages.clear(range(12))
        self.attention = CpuAttention(config.heads, config.kv_heads, config.head_dim, BLOCK, dtype)

    def step(self, rows: list[tuple[list[int], int, list[int]]]) -> list[Tensor]:
        """Run rows of (new ids, first position, block ids); return the logits of every token."""
        positions = [start + i for ids, start, _ in rows for i in range(len(ids))]
        tables = [table[: -(-(start + len(ids)) // BLOCK)] for ids, start, table in rows]
        slots = [table[p // BLOCK] * BLOCK + p % BLOCK
                 for ids, start, table in rows for p in range(start, start + len(ids))]
        counts = [len(ids) for ids, _, _ in rows]
        batch = Batch(
            tokens=torch.tensor([id for ids, _, _ in rows for id in ids]),
            positions=torch.tensor(positions), slots=torch.tensor(slots),
            starts=[start for _, start, _ in rows], counts=counts, tables=tables,
            logit_rows=torch.arange(len(positions)), logit_counts=counts,
        )
        self.attention.prepare(batch)
        hidden = self.model.forward(batch, self.pages.data, self.attention)
        return list(self.model.logits(hidden.last).split(counts))


@dataclass
class Pair:
    """The same tiny model twice."""

    ours: Ours
    reference: Callable[[list[int]], Tensor]


def pair(folder: Path, name: str, shape: dict[str, object], dtype: torch.dtype) -> Pair:
    checkpoint = open_checkpoint(str(WRITERS[name](folder, dtype="float64", **shape)))
    weights = load(checkpoint, family(name).expected(checkpoint.config), dtype)
    return Pair(Ours(checkpoint.config, weights), REFERENCES[name](checkpoint.config, weights))


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def gap(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


@pytest.fixture(autouse=True)
def quiet_torch():
    """No gradients, and one thread: for such small matrices more only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(tmp_path, name, shape):
    for dtype, limit in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        both = pair(tmp_path / str(dtype), name, SHAPES[shape], dtype)
        ids = text(1)
        theirs = both.reference(ids)
        assert theirs.dtype == dtype
        assert theirs.std() > 1
        assert gap(both.ours.step([(ids, 0, [7, 2, 5])])[0], theirs) <= limit


@pytest.mark.parametrize("shape", ["grouped", "biases", "llama3 scaling"])
@pytest.mark.parametrize("name", MODELS)
def test_any_cut_into_steps_gives_the_reference(tmp_path, name, shape):
    both = pair(tmp_path, name, SHAPES[shape], torch.float64)
    ids, at, got = text(2), 0, []
    for count in (33, 1, 1, 5, 64, 2, 16, 17, 11):  # chunks, decodes and verifications
        got += both.ours.step([(ids[at : at + count], at, [7, 2, 5])])
        at += count
    assert at == LENGTH
    assert gap(torch.cat(got), both.reference(ids)) <= 1e-9


@pytest.mark.parametrize("shape", ["grouped", "biases", "llama3 scaling"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_beside_each_other_do_not_mix(tmp_path, name, shape):
    both = pair(tmp_path, name, SHAPES[shape], torch.float64)
    texts, tables = [text(3), text(4), text(5)], [[7, 2, 5], [1, 9, 4], [3, 8, 6]]
    cuts = [[40, 1, 9, 100], [3, 97, 1, 49], [1, 4, 70, 75]]
    got: list[list[Tensor]] = [[], [], []]
    for turn in range(4):
        starts = [sum(cut[:turn]) for cut in cuts]
        rows = [(ids[start : start + cut[turn]], start, table)
                for ids, start, cut, table in zip(texts, starts, cuts, tables, strict=True)]
        for row, logits in zip(got, both.ours.step(rows), strict=True):
            row.append(logits)
    for ids, row in zip(texts, got, strict=True):
        assert gap(torch.cat(row), both.reference(ids)) <= 1e-9


# ---- the real model ------------------------------------------------------------------------------

PASSAGES = (
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky appears "
    "blue because of a phenomenon called Rayleigh scattering. When sunlight enters the Earth's "
    "atmosphere, it collides with tiny molecules of gases such as nitrogen and oxygen. Blue light "
    "has a shorter wavelength than red light, so it is scattered more in all directions, and we "
    "see a blue sky when we look up. At sunset the light travels through more of the atmosphere, "
    "most of the blue light is scattered away, and the sky looks orange and red.<|im_end|>\n",
    "<|im_start|>user\nWrite a function that adds two numbers.<|im_end|>\n<|im_start|>assistant"
    "\nHere is a simple Python function that adds two numbers:\n\n```python\ndef add_numbers(a, "
    "b):\n    \"\"\"\n    Add two numbers and return the result.\n    \"\"\"\n    return a + b\n```"
    "\n\nYou can call it like this:\n\n```python\nresult = add_numbers(2, 3)\nprint(result)\n```\n",
    "Once upon a time, in a small village at the foot of a mountain, there lived a young girl "
    "named Lily. She loved to explore the forest near her home, and every day she would find "
    "something new. One morning, as she was walking along the river, she heard a strange sound "
    "coming from behind a large tree. She walked closer and saw a little bird with a broken wing.",
    "The capital of France is Paris, and the capital of Germany is Berlin. The largest planet in "
    "our solar system is Jupiter, and the smallest is Mercury. Water boils at 100 degrees Celsius "
    "and freezes at 0 degrees Celsius. There are seven days in a week and twelve months in a year.",
)


@pytest.mark.model
def test_smollm2_prefers_the_tokens_that_the_reference_prefers():
    checkpoint = open_checkpoint("smollm2")
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    texts = [tokenizer.encode(passage).ids for passage in PASSAGES]
    assert sum(map(len, texts)) >= 300
    expected = family(checkpoint.architecture).expected(checkpoint.config)
    weights = load(checkpoint, expected, torch.float32)
    reference = llama(checkpoint.config, weights)
    best = torch.cat([reference(ids).argmax(-1) for ids in texts])
    following = torch.tensor([id for ids in texts for id in [*ids[1:], -1]])
    likely = best == following
    assert likely.float().mean() > 0.4  # it reads English: the weights are in the right order
    for dtype, needed in ((torch.float32, 0.995), (torch.bfloat16, 0.97)):
        ours = Ours(checkpoint.config, {name: value.to(dtype) for name, value in weights.items()})
        found = torch.cat([ours.step([(ids, 0, [7, 2, 5])])[0].argmax(-1) for ids in texts])
        same = (found == best).float().mean()
        assert same >= needed, f"{dtype}: {same:.4f} of {len(best)}"
