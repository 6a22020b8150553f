"""Why a request that ran cannot go on, in words for its caller.  Ends nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.grammar.masks import Masks
from engine.messages import Failed

if TYPE_CHECKING:
    from engine.sequence import Sequence

log = logging.getLogger("engine.failures")


def no_memory(request: str) -> Failed:
    """It does not fit the device even alone."""
    return Failed(
        request, "engine_overloaded",
        "The device ran out of memory on this request. Send it again, or send a shorter prompt.",
    )


def no_token(seq: Sequence, drawn: int, vocab: int) -> Failed:
    """Its next row gave no token that could stand; `drawn` is what it gave, -1 for nothing.

    A row whose grammar allows some token gives nothing only when its logits hold NaN or infinity.
    """
    id, place = seq.submit.id, len(seq.tokens)
    if drawn < 0 and (seq.grammar is None or _allows(seq, vocab)):
        log.error("request %s: the logits for position %d are not finite", id, place)
        return Failed(
            id, "model_failed",
            "The model's numbers overflowed here (NaN or infinite logits), so the answer could not "
            "be continued. Send the request again; if it fails again, start the server with a "
            "wider --dtype, or check the weights.",
        )
    log.warning("request %s: no legal token at position %d", id, place)
    return Failed(
        id, "grammar_failed",
        "The model had no legal token left here, so the answer could not be continued. "
        "Send the request again; if it fails again, simplify the schema.",
    )


def _allows(seq: Sequence, vocab: int) -> bool:
    """Whether some token may come next, by its grammar; a mask of its own, as steps use theirs."""
    assert seq.grammar is not None
    return bool(Masks(vocab, 1).fill([(0, seq.grammar, ())], 1).any())
