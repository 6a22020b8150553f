"""Which proposer a server has: `--speculative-config` read and checked, the object made.  No guess.

Read where the command line is, so that a mistake is one sentence at once; made in the engine's
process, which knows its device.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

import msgspec

from engine.config import BadConfig
from speculative import PROPOSERS

if TYPE_CHECKING:
    from engine.config import EngineConfig, ResolvedConfig
    from engine.proposer import HostDrafts

MOST = 64  # draft tokens a sequence and step: more than that never paid
ROW = {"cpu": 0.04, "cuda": 0.002}  # what a row more costs until it is measured: see length.py
HERE = "speculative.served:make"


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--speculative-config`; the names are vLLM's."""

    method: str = "hybrid"
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
    changes = {} if most is None else {"max_drafts": most}
    return msgspec.structs.replace(config, proposer=config.proposer or HERE, **changes)


def make(config: ResolvedConfig, kind: str) -> HostDrafts | None:
    """The proposer of an engine on a device of this kind, or None.

    Left to itself a GPU gets none: host drafts make its next step wait for the last one's result,
    and what that costs has not been measured there.
    """
    wanted = _read(config.speculative)
    if wanted is None or (config.speculative == "auto" and kind != "cpu"):
        return None
    module, _, name = PROPOSERS[wanted.method].partition(":")
    made: HostDrafts = getattr(importlib.import_module(module), name)(ROW[kind])
    return made


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
