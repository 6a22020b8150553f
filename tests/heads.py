"""EAGLE-3 heads for tests: random, well trained, and a plain reference to compare with."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.pages import Pages
from cache.prefix import BLOCK
from engine.attention.cpu import CpuAttention
from engine.batch import Batch
from engine.checkpoint import open_checkpoint
from engine.models import family
from engine.proposer import Features
from engine.weights import load
from speculative.eagle3 import Eagle3
from speculative.head import Head, HeadConfig, kept_ids, shapes

F64 = torch.float64


def one_thread():
    """A fixture's body: such small products only wait for each other on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**changes) -> HeadConfig:
    """A head for the tiny target of tests/tiny.py."""
    given = {
        "hidden": 32, "target_hidden": 64, "intermediate": 48, "heads": 4, "kv_heads": 2,
        "head_dim": 16, "eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
        "draft_vocab": 200, "vocab": 259, "layers": 1, "taps": (0, 1, 2),
    }  # fmt: skip
    return HeadConfig(**(given | changes))


def weights_of(shape: HeadConfig, seed: int = 0, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    """Random tensors of a head, embedding included, that keep its values near one."""
    noise = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        made = torch.randn(size, generator=noise, dtype=F64)
        if "norm" in name:
            return 1 + 0.3 * made
        return made * (0.3 if len(size) == 1 else 1.5 / math.sqrt(size[-1]))

    named = {**shapes(shape), "embed_tokens.weight": (shape.vocab, shape.hidden)}
    return {name: draw(name, size).to(dtype) for name, size in named.items()}


def kept_of(shape: HeadConfig, seed: int = 0) -> Tensor | None:
    """Which target ids a head can draw: a random rising choice; None where it draws all."""
    if shape.draft_vocab == shape.vocab:
        return None
    noise = torch.Generator().manual_seed(seed)
    return torch.randperm(shape.vocab, generator=noise)[: shape.draft_vocab].sort().values


def d2t_of(kept: Tensor) -> Tensor:
    """The offsets that a checkpoint holds."""
    found = kept - torch.arange(len(kept))
    assert torch.equal(kept_ids(found), kept)
    return found


def head_of(shape: HeadConfig, seed: int = 0, dtype: torch.dtype = F64, max_len: int = 544) -> Head:
    weights = weights_of(shape, seed, dtype)
    return Head(shape, weights, weights["embed_tokens.weight"], kept_of(shape, seed), max_len)


def eagle_of(seed: int = 0, dtype: torch.dtype = F64, **changes) -> Eagle3:
    """A random head behind the protocol."""
    return Eagle3(head_of(config(**changes), seed, dtype))


# ---- the plain reference -----------------------------------------------------------------------


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * gain


class Plain:
    """A head by the book: one row at a time, every key of every layer in a list, no batching.

    Written from the definition alone; `rotate_by` [head_dim / 2] gives the angles a position.
    """

    def __init__(self, shape: HeadConfig, weights: dict[str, Tensor], kept: Tensor | None,
                 angles: Tensor | None = None, scale: float = 1.0) -> None:
        self.shape, self.weights, self.scale = shape, weights, scale
        self.kept = torch.arange(shape.vocab) if kept is None else kept
        half = torch.arange(shape.head_dim // 2, dtype=F64)
        self.angles = shape.rope_theta ** (-2 * half / shape.head_dim) if angles is None else angles
        self.keys = [[] for _ in range(shape.layers)]
        self.values = [[] for _ in range(shape.layers)]

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name + ".weight"]

    def fused(self, aux: Tensor) -> Tensor:
        """One true feature out of [taps * target_hidden]."""
        shape = self.shape
        if shape.norm_before_fc:
            aux = rms(aux, self["input_norm"], shape.eps)
        if shape.fc_norm:
            parts = aux.view(len(shape.taps), -1)
            aux = torch.cat([rms(part, self[f"fc_norm.{i}"], shape.eps)
                             for i, part in enumerate(parts)])
        found = self["fc"] @ aux
        return found + self.weights["fc.bias"] if shape.fc_bias else found

    def turned(self, head: Tensor, position: int) -> Tensor:
        half = len(head) // 2
        cos, sin = (self.angles * position).cos(), (self.angles * position).sin()
        low, high = head[:half], head[half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin)) * self.scale

    def linear(self, name: str, x: Tensor) -> Tensor:
        found = self[name] @ x
        return found + self.weights[name + ".bias"] if name + ".bias" in self.weights else found

    def attend(self, i: int, x: Tensor, position: int) -> Tensor:
        shape, at = self.shape, f"layers.{i}.self_attn."
        query = self.linear(at + "q_proj", x).view(shape.heads, -1)
        key = self.linear(at + "k_proj", x).view(shape.kv_heads, -1)
        value = self.linear(at + "v_proj", x).view(shape.kv_heads, -1)
        self.keys[i].append(torch.stack([self.turned(one, position) for one in key]))
        self.values[i].append(value)
        mixed = []
        for number, one in enumerate(query):
            own = number // (shape.heads // shape.kv_heads)
            turned = self.turned(one, position)
            scores = torch.stack([turned @ past[own] for past in self.keys[i]])
            chances = (scores / shape.head_dim**0.5).softmax(0)
            pairs = zip(chances, self.values[i], strict=True)
            mixed.append(sum(chance * past[own] for chance, past in pairs))
        return self.linear(at + "o_proj", torch.cat(mixed))

    def row(self, feature: Tensor, token: int, position: int) -> tuple[Tensor, Tensor]:
        """Consume one row; the feature to feed on, and the logits."""
        shape = self.shape
        normed = rms(feature, self["layers.0.hidden_norm"], shape.eps)
        token = rms(self["embed_tokens"][token], self["layers.0.input_layernorm"], shape.eps)
        x = normed if shape.norm_before_residual else feature
        for i in range(shape.layers):
            at = f"layers.{i}."
            joined = torch.cat((token, normed))
            read = joined if i == 0 else rms(x, self[at + "input_layernorm"], shape.eps)
            x = x + self.attend(i, read, position)
            inner = rms(x, self[at + "post_attention_layernorm"], shape.eps)
            gate, up = self[at + "mlp.gate_proj"] @ inner, self[at + "mlp.up_proj"] @ inner
            x = x + self[at + "mlp.down_proj"] @ (F.silu(gate) * up)
        last = rms(x, self["norm"], shape.eps)
        return (last if shape.norm_output else x), self["lm_head"] @ last

    def read(self, aux: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """All rows of a sequence from its start: row i has aux[i] and tokens[i] = x[i + 1]."""
        for position, (one, token) in enumerate(zip(aux, tokens, strict=True)):
            feature, logits = self.row(self.fused(one), token, position)
        return feature, logits

    def chain(self, aux: Tensor, tokens: list[int], count: int) -> list[int]:
        """The `count` greedy drafts behind these rows."""
        feature, logits = self.read(aux, tokens)
        found = []
        for depth in range(count):
            found.append(int(self.kept[logits.argmax()]))
            feature, logits = self.row(feature, found[-1], len(tokens) + depth)
        return found


# ---- the tiny target, seen from outside ------------------------------------------------------


class Target:
    """A model folder's model in fp64, to read whole texts with."""

    def __init__(self, folder, dtype: torch.dtype = F64) -> None:
        checkpoint = open_checkpoint(str(folder))
        self.shape = checkpoint.config
        kind = family(checkpoint.architecture)
        weights = load(checkpoint, kind.expected(self.shape), dtype)
        self.embedding = weights["model.embed_tokens.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embedding)
        taps = tuple(range(-1, self.shape.layers))
        self.model, self.dtype = kind(self.shape, weights, self.shape.max_len, taps), dtype

    def read(self, tokens: list[int], boundaries: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """[n, boundaries * hidden] residual streams and [n, vocab] logits."""
        shape, blocks = self.shape, -(-len(tokens) // BLOCK)
        pages = Pages(
            shape.layers, blocks, BLOCK, shape.kv_heads, shape.head_dim, self.dtype
        )
        pages.data.zero_()
        attention = CpuAttention(shape.heads, shape.kv_heads, shape.head_dim, BLOCK, self.dtype)
        places = torch.arange(len(tokens))
        batch = Batch(torch.tensor(tokens), places, places, [0], [len(tokens)],
                      [list(range(blocks))], places, [len(tokens)])
        attention.prepare(batch)
        hidden = self.model.forward(batch, pages.data, attention)
        streams = hidden.taps.view(len(tokens), shape.layers + 1, shape.hidden)
        return streams[:, list(boundaries)].flatten(1), self.model.logits(hidden.last)


def causal(shape: HeadConfig, count: int):
    """Attention of one whole sequence without pages, for Head.run; gradients flow through it."""
    mask = torch.full((count, count), -torch.inf, dtype=F64).triu(1)

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = shape.heads // shape.kv_heads
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) / shape.head_dim**0.5
        mixed = (scores + mask.to(scores.dtype)).softmax(-1) @ values
        return mixed.transpose(0, 1).reshape(count, -1)

    return attend


def trained(
    target: Target, texts: list[list[int]], shape: HeadConfig, steps: int = 150, seed: int = 0,
    shift: int = 0,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Weights and kept ids of a head that has learnt what the target says in these texts.

    On true features only; `shift` is added to the boundaries that it learns on.
    """
    kept = kept_of(shape, seed)
    weights = {name: value.requires_grad_() for name, value in weights_of(shape, seed).items()}
    place = torch.full((shape.vocab,), -100)
    place[torch.arange(shape.vocab) if kept is None else kept] = torch.arange(shape.draft_vocab)
    taps = tuple(boundary + shift for boundary in shape.taps)
    seen = []
    for text in texts:
        aux, said = target.read(text, taps)
        said = said.argmax(-1) if said.dim() > 1 else said
        seen.append((aux[:-2], torch.tensor(text[1:-1]), place[said[1:-1]]))
    optimiser = torch.optim.AdamW(weights.values(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        head = Head(shape, weights, weights["embed_tokens.weight"], kept, 544)
        loss = torch.zeros((), dtype=F64)
        for aux, tokens, wanted in seen:
            count = len(tokens)
            state = head.run(head.fuse(aux), tokens, torch.arange(count), causal(shape, count))
            loss = loss + F.cross_entropy(head.read(state)[1], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: value.detach() for name, value in weights.items()}, kept


def learnt(
    target: Target, texts: list[list[int]], shape: HeadConfig, max_len: int = 544, **how
) -> Eagle3:
    """The same behind the protocol."""
    weights, kept = trained(target, texts, shape, **how)
    return Eagle3(Head(shape, weights, weights["embed_tokens.weight"], kept, max_len))


# ---- a step by hand --------------------------------------------------------------------------


class Part(NamedTuple):
    """One sequence's share of a step: true features of x[start] .. and tokens x[start] .. + 1."""

    start: int
    aux: Tensor  # [count, taps * target_hidden]
    tokens: list[int]  # count + 1: x[start] .. x[start + count]
    table: list[int]
    limit: int = 0
    seed: int = 0
    heat: float = 0.0
    choice: int = 0


def features_of(parts: list[Part], size: int) -> Features:
    """What engine/drafting.py would make of these shares."""
    tokens, positions, slots, last = [], [], [], []
    for part in parts:
        count = len(part.aux)
        assert len(part.tokens) == count + 1
        tokens += part.tokens[1:]
        positions += range(part.start, part.start + count)
        slots += [part.table[p // size] * size + p % size
                  for p in range(part.start + 1, part.start + count + 1)]
        last.append(len(tokens) - 1)
    ints = torch.tensor
    batch = Batch(
        ints(tokens), ints(positions), ints(slots), [part.start for part in parts],
        [len(part.aux) for part in parts], [part.table for part in parts], ints([]),
        [0] * len(parts),
    )
    return Features(
        batch, torch.cat([part.aux for part in parts]), ints([part.tokens[0] for part in parts]),
        ints(last), ints([part.seed for part in parts]), ints([part.choice for part in parts]),
        torch.tensor([part.heat for part in parts]), ints([part.limit for part in parts]),
    )


def drafts(eagle: Eagle3, parts: list[Part]) -> list[list[int]]:
    """Extend and draft, as engine/drafting.guess does."""
    features = features_of(parts, eagle.pages.shape[3])
    eagle.extend(features)
    steps = [eagle.step(features, depth) for depth in range(max(part.limit for part in parts))]
    return [[int(step[i]) for step in steps[: part.limit]] for i, part in enumerate(parts)]


def kv_of(eagle: Eagle3, table: list[int], slots: range) -> Tensor:
    """[layers, slots, 2, heads, dim]: what lies in these slots of a sequence."""
    size = eagle.pages.shape[3]
    return torch.stack([eagle.pages[:, table[s // size], :, s % size] for s in slots], dim=1)


class Knowing(Eagle3):
    """A head that is told some answers, and gives most of their tokens: drafts are accepted.

    `answers` are (prompt length, tokens) by request seed and choice.
    """

    def __init__(self, head: Head, answers: dict[tuple[int, int], tuple[int, list[int]]]) -> None:
        super().__init__(head)
        self.answers = answers

    def step(self, features: Features, depth: int) -> Tensor:
        drawn = super().step(features, depth)
        whose = zip(features.seeds.tolist(), features.choices.tolist(), strict=True)
        for place, key in enumerate(whose):
            length, text = self.answers.get(key, (0, []))
            at = self._ends[place] + 2 + depth - length
            if 0 <= at < len(text) and (at + depth) % 7 != 3:
                drawn[place] = text[at]
        return drawn


class Watched:
    """A head that notes what it drafts, by request seed and by where the draft begins."""

    def __init__(self, eagle: Eagle3) -> None:
        self.eagle, self.taps, self.source = eagle, eagle.taps, eagle.source
        self.reserve, self.copy = eagle.reserve, eagle.copy
        self.chains: dict[tuple[int, int], list[int]] = {}
        self.steps: list[Batch] = []

    def extend(self, features: Features) -> None:
        self.steps.append(features.batch)
        self.eagle.extend(features)

    def step(self, features: Features, depth: int) -> Tensor:
        drawn = self.eagle.step(features, depth)
        for i, limit in enumerate(features.limits.tolist()):
            if limit > depth:
                at = int(features.batch.positions[features.last[i]])
                chain = self.chains.setdefault((int(features.seeds[i]), at), [])
                chain[depth:] = [int(drawn[i])]
        return drawn
