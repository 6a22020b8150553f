"""Train a head on shards: AdamW, cosine, checkpoints that go on bit for bit.  Evaluates nothing.

A step is a function of the weights, the moments and its number: batches follow from the seed, and
nothing else is random.  So a run that was cut and went on gives what an uncut one gives, to the bit
on a CPU.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from speculative.head import HeadConfig
from speculative.train import shards
from speculative.train.packing import Corpus
from speculative.train.target import Target
from speculative.train.unroll import fresh, losses, unroll

BETAS = (0.9, 0.95)
CLIP = 0.5
STATE = "state.safetensors"
LOG = "train.jsonl"


class Recipe(msgspec.Struct, frozen=True):
    """What a training is; two runs with the same one and the same shards are the same training."""

    steps: int = 1000
    rows: int = 16  # of a step
    length: int = 2048  # tokens of a row
    unroll: int = 5  # steps of the head on its own features
    rate: float = 1e-3  # the highest learning rate
    warmup: float = 0.03  # share of the steps
    decay: float = 0.01  # of weights, not of norms
    hybrid: float = 0.5  # share of the steps after which acceptance joins the loss; 1 = never
    seed: int = 0

    def check(self) -> Recipe:
        """Return itself; raise ValueError naming what cannot be."""
        for name in ("steps", "rows", "length", "unroll"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} is {value}; it must be at least 1.")
        if not 0 < self.rate < 1:
            raise ValueError(f"--rate is {self.rate}; it must lie between 0 and 1.")
        return self

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: a line up, then half a cosine down to zero."""
        warm = max(1, round(self.steps * self.warmup))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


@dataclass
class Training:
    """A head, its moments, and how far it is."""

    config: HeadConfig
    recipe: Recipe
    weights: dict[str, Tensor]
    optimiser: torch.optim.AdamW
    step: int = 0

    @classmethod
    def begin(
        cls, config: HeadConfig, recipe: Recipe, target: Target, kept: Tensor
    ) -> Training:
        """A fresh head on the target's device."""
        norm = target.model.norm
        weights = fresh(config, target.head, norm, kept, recipe.seed)
        return cls.of(config, recipe, weights, target.device)

    @classmethod
    def of(
        cls, config: HeadConfig, recipe: Recipe, weights: dict[str, Tensor], device: torch.device
    ) -> Training:
        """A head of these weights, fp32 whatever the target is."""
        held = {
            name: torch.nn.Parameter(value.to(device, torch.float32))
            for name, value in weights.items()
        }
        groups = [
            {"params": [p for p in held.values() if p.dim() > 1], "weight_decay": recipe.decay},
            {"params": [p for p in held.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(
            groups, lr=recipe.rate, betas=BETAS, fused=device.type == "cuda")
        return cls(config, recipe, dict(held), optimiser)

    def save(self, path: Path) -> None:
        """Weights, moments and step in one file, whole or not at all."""
        tensors = {f"weight.{name}": value.detach() for name, value in self.weights.items()}
        for name, value in self.weights.items():
            moments = self.optimiser.state.get(value, {})
            for key in ("exp_avg", "exp_avg_sq"):
                if key in moments:
                    tensors[f"{key}.{name}"] = moments[key]
        # One entry: the format's writer keeps no order, and the same state shall be the same file.
        about = {"training": msgspec.json.encode((self.step, self.recipe)).decode()}
        shards.replace(path, to_bytes({k: v.contiguous() for k, v in tensors.items()}, about))

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote; raise ValueError when that was another training."""
        with safe_open(path, framework="pt", device=str(self._device)) as file:
            about = (file.metadata() or {})["training"]
            step, other = msgspec.json.decode(about, type=tuple[int, Recipe])
            if other != self.recipe:
                raise ValueError(
                    f"{path} is of another training: {_difference(other, self.recipe)}. Use the "
                    "same options, or delete it to begin anew."
                )
            self.step = step
            names = set(file.keys())
            for name, value in self.weights.items():
                stored = file.get_tensor(f"weight.{name}")
                if stored.shape != value.shape:
                    raise ValueError(
                        f"{path} has {name} of shape {tuple(stored.shape)}; this head needs "
                        f"{tuple(value.shape)}. Delete it to begin anew."
                    )
                value.data.copy_(stored)
                if f"exp_avg.{name}" in names:
                    at = "cpu" if self._device.type == "cpu" else self._device
                    self.optimiser.state[value] = {
                        "step": torch.tensor(float(self.step), device=at),
                        "exp_avg": file.get_tensor(f"exp_avg.{name}"),
                        "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}"),
                    }

    @property
    def _device(self) -> torch.device:
        return next(iter(self.weights.values())).device


@dataclass(frozen=True, slots=True)
class Point:
    """One step in numbers."""

    step: int
    loss: float
    right: list[float]  # by step of the unroll; see unroll.Losses
    alpha: list[float]
    tokens: int  # of the batch, prompts too


def train(
    training: Training,
    target: Target,
    corpus: Corpus,
    kept: Tensor,
    folder: Path,
    *,
    deadline: float = math.inf,
    save_every: int = 200,
    tell_every: int = 20,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Train to the recipe's last step, or until `deadline` (of time.monotonic).

    The state is in `folder` afterwards, and every `save_every` steps.  Returns the steps that were
    told of, one in `tell_every`.
    """
    recipe, told = training.recipe, list[Point]()
    began, tokens, last = time.monotonic(), 0, -1
    while training.step < recipe.steps and time.monotonic() < deadline:
        every = training.step % tell_every == 0 or training.step == recipe.steps - 1
        point = one_step(training, target, corpus, kept)
        tokens += point.tokens
        if every:
            speed = tokens / (time.monotonic() - began)
            told.append(point)
            _note(folder, point, speed)
            right = " ".join(f"{share:.3f}" for share in point.right)
            tell(f"step {point.step}: loss {point.loss:.3f}, right {right}, {speed:,.0f} tokens/s")
        if training.step % save_every == 0:
            training.save(folder / STATE)
            last = training.step
    if last != training.step:
        training.save(folder / STATE)
    return told


def one_step(training: Training, target: Target, corpus: Corpus, kept: Tensor) -> Point:
    """One step of the optimiser."""
    recipe, device = training.recipe, target.device
    multiple = 64 if device.type == "cuda" else 1
    batch = corpus.step(training.step, recipe.rows, multiple)
    tokens = batch.real
    batch = batch.to(device)
    features, last = target.run(batch)
    wanted = target.wanted(batch, last, kept)
    hybrid = training.step >= recipe.steps * recipe.hybrid
    rate = recipe.rate_at(training.step)
    for group in training.optimiser.param_groups:
        group["lr"] = rate
    training.optimiser.zero_grad(set_to_none=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        drawn = unroll(
            training.weights, training.config, batch, _read(features, device), wanted.row,
            _read(target.embedding, device), recipe.unroll,
        )
        found = losses(drawn, wanted, hybrid=hybrid)
    found.loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(list(training.weights.values()), CLIP)
    training.optimiser.step()
    training.step += 1
    return Point(
        training.step - 1, float(found.loss.detach()), [float(x) for x in found.right],
        [float(x) for x in found.alpha], tokens,
    )


def _read(x: Tensor, device: torch.device) -> Tensor:
    """On a CPU the head computes in fp32, whatever the target does."""
    return x if device.type == "cuda" else x.float()


def _note(folder: Path, point: Point, speed: float) -> None:
    with (folder / LOG).open("a") as file:
        file.write(json.dumps({
            "step": point.step, "loss": round(point.loss, 5), "tokens_per_s": round(speed),
            "right": [round(x, 4) for x in point.right],
            "alpha": [round(x, 4) for x in point.alpha],
        }) + "\n")  # fmt: skip


def _difference(one: Recipe, other: Recipe) -> str:
    return ", ".join(
        f"{name} {getattr(one, name)} there, {getattr(other, name)} here"
        for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)
    )
