"""Which proposer a server has: `--speculative-config` read and checked, the object made.  No guess.

Read where the command line is, so that a mistake is one sentence at once; made in the engine's
process, which knows its device.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.config import BadConfig
from engine.model_config import BadCheckpoint
from speculative import PROPOSERS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.config import EngineConfig, ResolvedConfig
    from engine.model_config import ModelConfig
    from engine.models import Model
    from engine.proposer import AnyDraft, HeadMaker, HostDrafts

log = logging.getLogger("speculative.served")

MOST = 64  # draft tokens a sequence and step: more than that never paid
ROW = {"cpu": 0.04, "cuda": 0.002}  # what a row more costs until it is measured: see length.py
HERE = "speculative.served:make"
HEAD = "speculative.served:head"
HEADED = ("eagle3", "hybrid")  # methods that may have a head
# Built-in models that come with one: a folder of a checkout.  An installation without it has none.
OWN_HEADS = {"smollm2": Path(__file__).resolve().parent.parent / "samples" / "drafts" / "smollm2"}


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--speculative-config`; the names are vLLM's."""

    method: str = "hybrid"
    model: str | None = None  # an EAGLE-3 head: folder or hub id; "" = none; None = the model's own
    num_speculative_tokens: int | None = None


def configured(config: EngineConfig) -> EngineConfig:
    """The config of an engine that makes the proposer that is asked for; raise BadConfig."""
    wanted = _read(config.speculative)
    if wanted is None:
        return msgspec.structs.replace(config, proposer="")
    most = wanted.num_speculative_tokens
    if most is not None and not 1 <= most <= MOST:
        raise BadConfig(
            f"speculative-config: num_speculative_tokens is {most}; it is 1 to {MOST}. "
            "To draft nothing, use --speculative-config off."
        )
    head = _head_of(config.model, wanted)
    if wanted.method == "eagle3" and not head:
        raise BadConfig("speculative-config: method eagle3 needs a model: a folder or hub id of an "
                        'EAGLE-3 head, as in {"method": "eagle3", "model": "./head"}.')
    if wanted.model and wanted.method not in HEADED:
        raise BadConfig(f"speculative-config: method {wanted.method} takes no model; leave it out, "
                        f"or use {' or '.join(HEADED)}.")
    changes: dict[str, Any] = {} if most is None else {"max_drafts": most}
    if head:
        changes["head"] = HEAD
    return msgspec.structs.replace(config, proposer=config.proposer or HERE, **changes)


def make(config: ResolvedConfig, kind: str) -> HostDrafts | None:
    """The proposer of an engine on a device of this kind, or None."""
    wanted = _read(config.speculative)
    if wanted is None:
        return None
    module, _, name = PROPOSERS[wanted.method].partition(":")
    made: HostDrafts = getattr(importlib.import_module(module), name)(ROW[kind], kind != "cpu")
    return made


class _Eagle3:
    """An EAGLE-3 head on its way; see engine.proposer.HeadMaker."""

    source = "eagle3"

    def __init__(self, path: str, asked: bool) -> None:
        """`asked`: for by name; one that nobody asked for may be of no use without harm."""
        self._path, self._asked = path, asked

    def open(
        self, shape: ModelConfig, weights: Mapping[str, Tensor], max_len: int, dtype: torch.dtype,
        device: torch.device, blank: bool = False,
    ) -> AnyDraft | None:
        """Load it; it shares the target's embedding and head where it has none."""
        try:
            return self._open(shape, weights, max_len, dtype, device, blank)
        except BadCheckpoint as error:
            if self._asked or blank:
                raise
            log.warning("served without the draft head that comes with the model: %s", error)
            return None

    def _open(
        self, shape: ModelConfig, weights: Mapping[str, Tensor], max_len: int, dtype: torch.dtype,
        device: torch.device, blank: bool,
    ) -> AnyDraft:
        from speculative.checkpoint import open_head  # late: torch

        embedding = weights["model.embed_tokens.weight"]
        last = embedding if shape.tied else weights["lm_head.weight"]
        draft = open_head(self._path, shape, embedding, last, max_len, dtype, device, blank=blank)
        if device.type == "cpu":
            return draft
        from speculative.captured import CapturedEagle3  # late: Triton

        return CapturedEagle3(draft.head, max_len)

    def meet(self, draft: AnyDraft, model: Model, shape: ModelConfig) -> None:
        """Probe it on what the target writes; raise BadCheckpoint if it is of no use."""
        if not self._asked:  # ours, whose file is right; a probe takes a second
            return
        from speculative.probe import probe  # late: torch
        from speculative.witness import TEXTS, Witness

        witness = Witness(model, shape)  # type: ignore[arg-type]  # every family is Llama's so far
        step = max(shape.vocab // TEXTS, 1)
        starts = [[(place * step + step // 2) % shape.vocab] for place in range(TEXTS)]
        found: Any = draft  # one that `open` made
        probe(found.head, witness, witness.write(starts))


def head(config: ResolvedConfig, kind: str) -> HeadMaker | None:
    """What loads the head that is asked for, or None; raise BadConfig."""
    wanted = _read(config.speculative)
    path = None if wanted is None else _head_of(config.model, wanted)
    if wanted is None or not path:
        return None
    return _Eagle3(path, asked=wanted.model is not None)


def _head_of(model: str, wanted: Wanted) -> str:
    """Where the head is that is asked for, or that comes with the model; else ""."""
    if wanted.model is not None or wanted.method not in HEADED:
        return wanted.model or ""
    own = OWN_HEADS.get(model)
    return str(own) if own is not None and own.is_dir() else ""


def _read(text: str) -> Wanted | None:
    """What was asked for; None = nothing."""
    if text == "off":
        return None
    if text == "auto":
        return Wanted()
    try:
        wanted = msgspec.json.decode(text, type=Wanted)
    except msgspec.DecodeError as error:
        raise BadConfig(
            f"speculative-config {text!r} cannot be read: {error}. It is auto, off, or JSON such "
            'as {"method": "suffix", "num_speculative_tokens": 8}.'
        ) from error
    if wanted.method not in PROPOSERS:
        near = difflib.get_close_matches(wanted.method, PROPOSERS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(PROPOSERS)}."
        raise BadConfig(f"speculative-config: method {wanted.method!r} is not known. {hint}")
    return wanted
