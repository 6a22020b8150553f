"""Choose the tokens that a head can draw, by how often the target said them.  Trains nothing.

    d2t [draft_vocab] int64: target id - draft id, never falling;  t2d [vocab] bool: is it kept

A head that draws from a few thousand tokens is mostly cheaper by its output layer; what it cannot
draw it cannot guess, so tokens that structure needs are kept however rare they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from speculative.train import shards
from speculative.train.shards import Entry, Ids

Counts = npt.NDArray[np.int64]
#: Punctuation of JSON with the space around it, or digits, as a byte-level tokenizer spells them.
STRUCTURE = re.compile(r"[ĠĊ▁\s]*[\[\]{}\":,.]{1,4}[ĠĊ▁\s]*|[Ġ▁]?\d{1,3}|[ĠĊ▁]+|-|true|false|null")


@dataclass(frozen=True, slots=True)
class Counted:
    """How often the target said each token, [vocab] each; training and held-out apart."""

    training: Counts
    held_out: dict[str, Counts]  # by domain


class Kept(msgspec.Struct, frozen=True):
    """The tokens that are kept, and what share of what was said they are."""

    vocab: int
    ids: list[int]  # rising
    forced: int  # of them, kept for what they are
    coverage: float  # of the generated training tokens
    held_out: dict[str, float]  # of the held-out ones, by domain


def count(folder: Path) -> Counted:
    """Count the generated tokens of all shards, prompts left out; raise BadShard."""
    vocab = shards.read_run(folder).vocab
    counted = Counted(np.zeros(vocab, np.int64), {})
    for shard in shards.every(folder):
        said: dict[str, list[Ids]] = {}
        for entry, ids in shard.sequences():
            said.setdefault(_side(entry), []).append(ids[entry.prompt :])
        for side, parts in said.items():
            into = counted.training
            if side:
                into = counted.held_out.setdefault(side, np.zeros(vocab, np.int64))
            into += np.bincount(np.concatenate(parts), minlength=vocab)
    return counted


def choose(counted: Counted, size: int, forced: Iterable[int]) -> Kept:
    """The `size` tokens said most often, the forced ones among them; raise ValueError.

    Ties go to the lower id, so that the same counts give the same tokens.
    """
    vocab = len(counted.training)
    size = min(size, vocab)
    must = sorted(set(forced))
    if len(must) > size:
        raise ValueError(
            f"{len(must):,} tokens must be kept (stop ids, markers, JSON, digits), but --vocab is "
            f"{size:,}. Give a larger one."
        )
    rank = counted.training.astype(np.float64)
    rank[must] = np.inf
    best = np.argsort(-rank, kind="stable")[:size]
    ids = sorted(int(id) for id in best)
    return Kept(
        vocab, ids, len(must), _share(counted.training, ids),
        {domain: _share(counts, ids) for domain, counts in sorted(counted.held_out.items())},
    )


def forced_ids(
    tokenizer_json: str, vocab: int, stop_ids: Sequence[int], markers: Sequence[str]
) -> set[int]:
    """Tokens that are kept anyway: ends, added tokens, JSON's punctuation, digits, the layout's.

    `markers`: texts of the tool call layout, whose tokens are all needed.
    """
    pieces: Mapping[str, int] = json.loads(tokenizer_json)["model"]["vocab"]
    tokenizer = Tokenizer.from_str(tokenizer_json)
    found = set(stop_ids) | {id for id in tokenizer.get_added_tokens_decoder() if id < vocab}
    found |= {id for piece, id in pieces.items() if STRUCTURE.fullmatch(piece)}
    for marker in markers:
        found.update(tokenizer.encode(marker, add_special_tokens=False).ids)
    return {id for id in found if id < vocab}


def tables(kept: Kept) -> tuple[Tensor, Tensor]:
    """d2t [draft_vocab] int64 and t2d [vocab] bool."""
    ids = torch.tensor(kept.ids)
    t2d = torch.zeros(kept.vocab, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


def save(kept: Kept, path: Path) -> None:
    """Write it whole or not at all."""
    shards.replace(path, msgspec.json.encode(kept))


def read(path: Path) -> Kept:
    """What `save` wrote; raise ValueError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; run the stage `vocabulary` first.") from None


def _side(entry: Entry) -> str:
    """Empty for training, else the domain."""
    return entry.domain if entry.held_out else ""


def _share(counts: Counts, ids: list[int]) -> float:
    return float(counts[ids].sum() / max(1, counts.sum()))
