"""Model families: the protocol and the registry.  Imports none of them until asked.

To add a family: one file with a class like `Llama`, one line here; the conformance suite runs on
it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.attention import Attention
    from engine.batch import Batch
    from engine.layers import Layer, Linear
    from engine.model_config import ModelConfig
    from engine.ops import Ops

MODELS = {"LlamaForCausalLM": "engine.models.llama:Llama"}


class Model(Protocol):
    """A decoder over a flat token axis."""

    norm: Tensor  # [hidden] gain of the norm before the head
    head: Linear  # [vocab, hidden]
    layers: list[Layer]

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        max_len: int,
        taps: tuple[int, ...] = (),
        paired: bool = False,
        apart: bool = False,
    ) -> None:
        """Take the tensors that `expected` named; positions go up to `max_len`.

        `taps` are the layers whose outputs a device draft reads; `paired` lays gate and up
        projections out for fused kernels (engine/layers.py), after which only `run` works;
        `apart` copies no tensor, where another model is about to be made of the same ones.
        """

    @staticmethod
    def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor the family needs, in the checkpoint's own names."""

    def forward(self, batch: Batch, pages: Tensor, attention: Attention) -> Hidden:
        """Run all layers; writes KV into `pages` [layers, blocks, 2, size, kv_heads, head_dim]."""

    def run(self, ops: Ops) -> Hidden:
        """The same over a device's own operations."""

    def logits(self, rows: Tensor) -> Tensor:
        """[R, hidden] of `Hidden.last` to [R, vocab] logits, in torch."""


class Hidden:
    """The last layer's output [N, hidden], not yet normed: only the rows that draw need that.

    And those of the tapped layers, in their order.
    """

    __slots__ = ("kept", "last")

    def __init__(self, last: Tensor, kept: Sequence[Tensor] = ()) -> None:
        self.last, self.kept = last, kept

    @property
    def taps(self) -> Tensor | None:
        """The tapped layers' outputs side by side, [N, taps * hidden]: a copy; None without any."""
        import torch

        return torch.cat(list(self.kept), dim=-1) if self.kept else None


def family(architecture: str) -> type[Model]:
    """The class of a model family; raise KeyError naming the known ones."""
    if architecture not in MODELS:
        raise KeyError(
            f"Architecture {architecture!r} is not served; known: {', '.join(sorted(MODELS))}."
        )
    module, name = MODELS[architecture].split(":")
    found: type[Model] = getattr(importlib.import_module(module), name)
    return found
