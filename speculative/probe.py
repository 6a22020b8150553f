"""Ask at start whether a head reads the layers it was trained on.  Changes and serves nothing.

Files name layers in two ways under one key (dialects.py), and a head that reads a neighbour of its
layers is not wrong enough to be noticed: it only drafts badly.  So it is shown texts that the
target itself wrote, with all its layers as they are said to be, one lower and one higher, and what
counts is how often its first guess is the target's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model_config import BadCheckpoint
from speculative.head import Head, HeadConfig

log = logging.getLogger("speculative.probe")

LEAST = 0.15  # agreement below which a head is of no use: worse than none by its own cost
FEWEST = 64  # guesses from which on a share means something


class Target(Protocol):
    """The target as the probe sees it: teacher-forced, whole texts."""

    layers: int

    def read(self, tokens: list[int], boundaries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[n, boundaries * hidden] residual streams after so many layers, and [n] argmax ids."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe saw."""

    agreement: dict[int, float]  # by shift of all boundaries; those that the target has
    guesses: int  # behind each of them

    @property
    def best(self) -> int:
        """The shift that agrees most; 0 where others are no better."""
        return max(self.agreement, key=lambda shift: (self.agreement[shift], shift == 0))


def probe(
    head: Head, target: Target, texts: Sequence[list[int]], least: float = LEAST
) -> Probed:
    """Agreement of first guesses on `texts` (ids that the target wrote), for b - 1, b and b + 1.

    Some hundred ids in all.  Logs all three, warns when b is not the best, beyond chance.  Raises
    BadCheckpoint when even the best is below `least`.
    """
    shifts = [
        shift for shift in (-1, 0, 1)
        if 0 <= head.config.taps[0] + shift and head.config.taps[-1] + shift <= target.layers
    ]
    right = dict.fromkeys(shifts, 0)
    guesses = 0
    for text in texts:
        if len(text) < 3:
            continue
        guesses += len(text) - 2
        for shift, count in zip(shifts, _agreed(head, target, text, shifts), strict=True):
            right[shift] += count
    if guesses < FEWEST:
        raise ValueError(f"{guesses} guesses say nothing; give texts of {FEWEST} ids at least")
    found = Probed({shift: count / guesses for shift, count in right.items()}, guesses)
    _tell(head.config, found, least)
    return found


@torch.inference_mode()
def _agreed(head: Head, target: Target, text: list[int], shifts: list[int]) -> list[int]:
    """Rows of a text whose first guess is what the target says there, at each shift."""
    taps, device, count = head.config.taps, head.device, len(text) - 2
    wanted = sorted({boundary + shift for boundary in taps for shift in shifts})
    streams, said = target.read(text, wanted)
    each = streams[:count].to(device).view(count, len(wanted), -1)
    tokens, positions = torch.tensor(text[1:-1], device=device), torch.arange(count, device=device)
    whole = Whole(head.config, count, head.dtype, device)
    right: list[int] = []
    for shift in shifts:
        aux = each[:, [wanted.index(boundary + shift) for boundary in taps]].flatten(1)
        state = head.run(head.fuse(aux), tokens, positions, whole)
        guessed = head.ids(head.read(state)[1].argmax(dim=-1))
        right.append(int((guessed == said[1 : count + 1].to(device)).sum()))
    return right


def _tell(config: HeadConfig, found: Probed, least: float) -> None:
    shares = ", ".join(
        f"{[boundary + shift for boundary in config.taps]} {share:.1%}"
        for shift, share in found.agreement.items()
    )
    log.info("the draft's first guess is the target's, by the layers it reads: %s", shares)
    best = [boundary + found.best for boundary in config.taps]
    share = found.agreement[found.best]
    if share < least:
        raise BadCheckpoint(
            f"The draft guesses {share:.1%} of the model's tokens at best ({shares}); below "
            f"{least:.0%} it costs more than it gives. It is a draft of another model, or its "
            "config names other layers than it was trained on: choose another draft.")
    # Shares of so few guesses differ by chance: two standard errors of the difference.
    sure = share - found.agreement[0] > 2 * math.sqrt(2 * share * (1 - share) / found.guesses)
    if found.best and sure:
        log.warning(
            "the draft says that it reads the boundaries %s, but guesses better from %s (%.1f%% "
            "of tokens instead of %.1f%%): its config counts layers in the other way; serve it "
            "with boundaries %s",
            list(config.taps), best, 100 * share, 100 * found.agreement[0], best,
        )


class Whole:
    """Attention over one whole text, which needs no pages: speculative/head.py's Attend."""

    def __init__(
        self, config: HeadConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`count` rows, the first of them of position 0."""
        self._group = config.heads // config.kv_heads
        self._scale = config.head_dim**-0.5
        self._mask = torch.full((count, count), -torch.inf, dtype=dtype, device=device).triu_(1)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[n, heads * dim]: causal, each KV head for its group of query heads."""
        every, each = (
            x.repeat_interleave(self._group, dim=1).transpose(0, 1) for x in (keys, values)
        )
        scores = query.transpose(0, 1) @ every.transpose(1, 2) * self._scale
        mixed = torch.softmax(scores + self._mask, dim=-1) @ each
        return mixed.transpose(0, 1).reshape(len(query), -1)
