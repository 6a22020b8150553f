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
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from speculative.head import HeadConfig
from speculative.train import shards
from speculative.train.packing import ALIGNED, Batch, Corpus
from speculative.train.target import Target, Wanted, kernels
from speculative.train.unroll import Losses, Whole, fresh, losses, unroll

BETAS = (0.9, 0.95)
CLIP = 0.5
MICRO = 4  # rows of a GPU's batch: 2,048 tokens each take some 10 GB at SmolLM2's shape
AUTO = 0  # as the number of steps: what the time allows
WARM = 50  # steps of the line up, then
SETTLING, TIMED = 10, 30  # first steps that are not timed, and the next that are
SPARED = 0.98  # of the time that is left is planned
UNPLANNED = "--steps auto plans by the time that is left: give --minutes, too."
STATE = "state.safetensors"
LOG = "train.jsonl"


class Recipe(msgspec.Struct, frozen=True):
    """What a training is; two runs with the same one and the same shards are the same training."""

    steps: int = 1000  # AUTO = as many as the time allows
    rows: int = 16  # of a step
    micro: int = 0  # rows computed together; 0 = MICRO on a GPU, all on a CPU
    length: int = 2048  # tokens of a row
    unroll: int = 5  # steps of the head on its own features
    rate: float = 1e-3  # the highest learning rate
    warmup: float = 0.03  # share of the steps
    decay: float = 0.01  # of weights, not of norms
    hybrid: float = 0.5  # share of the steps after which acceptance joins the loss; 1 = never
    seed: int = 0

    def check(self) -> Recipe:
        """Return itself; raise ValueError naming what cannot be."""
        for name, least in (("steps", AUTO), ("rows", 1), ("micro", 0), ("length", 1),
                            ("unroll", 1)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"--{name} is {value}; it must be at least {least}.")
        if not 0 < self.rate < 1:
            raise ValueError(f"--rate is {self.rate}; it must lie between 0 and 1.")
        return self

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one step of `steps`: a line up, then half a cosine down to zero.

        `steps` 0: not known yet.  Where time decides, the line's length cannot hang on it.
        """
        warm = max(1, round(self.steps * self.warmup)) if self.steps else WARM
        if step < warm:
            return self.rate * (step + 1) / warm
        gone = (step - warm) / max(1, steps - warm) if steps else 0.0
        return self.rate * 0.5 * (1 + math.cos(math.pi * min(gone, 1.0)))

    def mixes(self, step: int, steps: int) -> bool:
        """Whether acceptance is a part of the loss at one step of `steps`; 0: not known yet."""
        return self.hybrid <= 0 or (steps > 0 and step >= steps * self.hybrid)


@dataclass
class Training:
    """A head, its moments, and how far it is."""

    config: HeadConfig
    recipe: Recipe
    weights: dict[str, Tensor]
    optimiser: torch.optim.AdamW
    step: int = 0
    planned: int = 0  # steps, where the time decides: once known, for good

    @property
    def steps(self) -> int:
        """How many there will be; 0 = not known yet."""
        return self.recipe.steps or self.planned

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
        noted = self.step, self.recipe, self.planned
        about = {"training": msgspec.json.encode(noted).decode()}
        shards.replace(path, to_bytes({k: v.contiguous() for k, v in tensors.items()}, about))

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote; raise ValueError when that was another training."""
        with safe_open(path, framework="pt", device=str(self._device)) as file:
            about = (file.metadata() or {}).get("training", "")
            try:
                step, other, planned = msgspec.json.decode(about, type=tuple[int, Recipe, int])
            except msgspec.DecodeError:
                raise ValueError(f"{path} is not of this version. Delete it to begin anew, or go "
                                 "on with the version that wrote it.") from None
            if other != self.recipe:
                raise ValueError(
                    f"{path} is of another training: {_difference(other, self.recipe)}. Use the "
                    "same options, or delete it to begin anew."
                )
            self.step, self.planned = step, planned
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
    clock: Callable[[], float] = time.monotonic,
) -> list[Point]:
    """Train to the last step, or until `deadline` (of `clock`, in seconds).

    The state is in `folder` afterwards, and every `save_every` steps.  Returns the steps that were
    told of, one in `tell_every`.  Raise ValueError when the time decides and there is no deadline.
    """
    if not training.steps and deadline == math.inf:
        raise ValueError(UNPLANNED)
    told, pace = list[Point](), Pace(training.step)
    began, tokens, last = clock(), 0, -1
    while (not training.steps or training.step < training.steps) and clock() < deadline:
        point = one_step(training, target, corpus, kept)
        tokens += point.tokens
        if not training.steps and (planned := pace.planned(training.step, clock(), deadline)):
            training.planned = planned
            tell(f"step {point.step}: there is time for {planned:,} steps in all")
        if point.step % tell_every == 0 or training.step == training.steps:
            speed = tokens / max(1e-9, clock() - began)
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


@dataclass
class Pace:
    """How long a step takes, from some of the first ones."""

    first: int  # the step that a run begins with
    _began: float = 0.0

    def planned(self, step: int, now: float, deadline: float) -> int:
        """Steps in all, with `step` of them done; 0 = too early to say."""
        if step == self.first + SETTLING:
            self._began = now
        if step < self.first + SETTLING + TIMED:
            return 0
        each = (now - self._began) / TIMED
        return step + max(1, int((deadline - now) * SPARED / max(each, 1e-9)))


def one_step(training: Training, target: Target, corpus: Corpus, kept: Tensor) -> Point:
    """One step of the optimiser; its rows some at a time, which changes nothing but roundings."""
    recipe, device = training.recipe, target.device
    fused = device.type == "cuda"
    micro = min(recipe.rows, recipe.micro or (MICRO if fused else recipe.rows))
    batches = corpus.step(training.step, recipe.rows, ALIGNED if fused else 1, micro)
    tokens = sum(batch.real for batch in batches)
    hybrid = recipe.mixes(training.step, training.steps)
    for group in training.optimiser.param_groups:
        group["lr"] = recipe.rate_at(training.step, training.steps)
    training.optimiser.zero_grad(set_to_none=True)
    with kernels(device):
        # The target goes first over all: losses are shares of what the whole step has.
        seen = [_seen(target, batch.to(device), kept) for batch in batches]
        whole = Whole.of([(batch, wanted) for batch, _, wanted in seen], recipe.unroll)
        parts = [
            _part(training, target, batch, features, wanted, whole, hybrid)
            for batch, features, wanted in seen
        ]
    torch.nn.utils.clip_grad_norm_(list(training.weights.values()), CLIP)
    training.optimiser.step()
    training.step += 1
    return Point(
        training.step - 1, float(torch.stack([part.loss for part in parts]).sum()),
        _summed([part.right for part in parts]), _summed([part.alpha for part in parts]), tokens,
    )


def _seen(target: Target, batch: Batch, kept: Tensor) -> tuple[Batch, Tensor, Wanted]:
    """A batch, with what the head reads and what it should say."""
    features, last = target.run(batch)
    return batch, features, target.wanted(batch, last, kept)


def _part(
    training: Training, target: Target, batch: Batch, features: Tensor, wanted: Wanted,
    whole: Whole, hybrid: bool,
) -> Losses:
    """A batch's share of the step's losses, without their graph; its gradients are added."""
    device = target.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        drawn = unroll(
            training.weights, training.config, batch, _read(features, device), wanted,
            _read(target.embedding, device), training.recipe.unroll,
        )
        found = losses(drawn, wanted, whole, hybrid=hybrid)
    found.loss.backward()  # type: ignore[no-untyped-call]
    return replace(found, loss=found.loss.detach())


def _summed(parts: list[list[Tensor]]) -> list[float]:
    """Sums by step of the unroll; short batches have fewer of them."""
    steps = zip_longest(*parts, fillvalue=torch.zeros((), device=parts[0][0].device))
    found: list[float] = torch.stack([torch.stack(one).sum() for one in steps]).tolist()
    return found


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
