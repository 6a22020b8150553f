"""What the sampler kernels read and write: slot tables, rows, scratch, results.  Launches nothing.

Everything is allocated once; a step only changes contents.  A slot is a running sequence's place in
the tables; the last slot is a spare for rows that nobody waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.messages import Sampling

BLOCK = 1024  # vocabulary ids a program scores; fixes the order of float sums: the same for all R
STRIP = 8  # neighbours that share one maximum when a filtered row looks for its best tokens
TILE = 4096  # best tokens of a filtered row that are looked at together; more take a slow path
AIM = 2048  # how many of them the pivot aims at: the tile leaves room for ties and crowded strips
FACTS = 6  # words that the kernels of a filtered row tell each other
BEST = 20  # most alternatives that logprobs can ask for
BIASES = 1024  # most biased ids of a sequence
STOPS = 16  # most stop ids that min_tokens can hold back

# Columns of a slot's record of 32 words; floats are stored by their bits, TOP_P is an fp64.
FLAGS, TEMPERATURE, RATE, TOP_K, TOP_P, FLOOR, REPETITION, FREQUENCY, PRESENCE, SEED, CHOICE = (
    0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12,
)  # fmt: skip
LOGPROBS, BIAS_COUNT, STOP_COUNT, FIRST_STOP, WORDS = 13, 14, 15, 16, 32
# Bits of FLAGS.
HOT, FILTERED, PENALTIES, BIASED, SCORED = 1, 2, 4, 8, 16
# Kernel arguments that are views of a step's one buffer, read a word at a time: their alignment
# follows the bucket and must not compile a kernel anew.
WORDWISE = (
    "count", "groups", "group_row", "group_rows", "row_slot", "row_position", "row_hold",
    "row_mask", "row_first", "row_offset", "tokens",
)  # fmt: skip
OFF_TOP_P = 2.0  # no mass reaches twice the total


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What outlives a step, by slot, on the device; filled through `SlotParams`."""

    records: Tensor  # [slots + 1, 32] int32, see the columns above
    bias_ids: Tensor  # [slots + 1, BIASES] int32, rising
    bias_values: Tensor  # [slots + 1, BIASES] float32
    history: Tensor  # [slots + 1, vocab] int32: 2 * times put out, + 1 if in the prompt; or [1, 1]
    last: Tensor  # [slots + 1] int32: the newest token of each slot's sequence, never negative

    @classmethod
    def allocate(
        cls, slots: int, vocab: int, device: torch.device | str, penalties: bool = True
    ) -> SlotTables:
        """Zeroed tables for `slots` sequences; without `penalties` there is no history."""
        size = (slots + 1, vocab) if penalties else (1, 1)
        return cls(
            records=torch.zeros(slots + 1, WORDS, dtype=torch.int32, device=device),
            bias_ids=torch.zeros(slots + 1, BIASES, dtype=torch.int32, device=device),
            bias_values=torch.zeros(slots + 1, BIASES, dtype=torch.float32, device=device),
            history=torch.zeros(size, dtype=torch.int32, device=device),
            last=torch.zeros(slots + 1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's rows and groups, all int32 on the device; entries beyond the counts are not read.

    The runner may lay these over one buffer that a single copy fills.  A group is the rows of one
    sequence, k + 1 of them for k drafts, one after the other.
    """

    slot: Tensor  # [R] the row's slot
    position: Tensor  # [R] absolute position of the token to draw
    hold: Tensor  # [R] 1 where stop ids are masked (min_tokens), else 0
    mask: Tensor  # [R] row of the masks; or ~token, the only one that may come
    first: Tensor  # [R] index in `tokens` of its group's first token, the newest committed one
    offset: Tensor  # [R] which row of its group: so many drafts follow that token before this row
    tokens: Tensor  # [N] the step's flat input tokens
    count: Tensor  # [1] real rows
    group_row: Tensor  # [G] the first row of a group
    group_rows: Tensor  # [G] its rows, at least 1
    groups: Tensor  # [1] real groups

    @classmethod
    def allocate(cls, rows: int, groups: int, tokens: int, device: torch.device | str) -> Rows:
        """Zeroed buffers, laid over one piece of memory."""
        sizes = (rows, rows, rows, rows, rows, rows, tokens, 1, groups, groups, 1)
        memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends = accumulate(sizes)
        return cls(*(memory[end - size : end] for end, size in zip(ends, sizes, strict=True)))


@dataclass(frozen=True, slots=True)
class Scratch:
    """Between the kernels of one settle; contents mean nothing before and after it."""

    peak: Tensor  # [R, chunks] float32: largest logit of the chunk after masks and penalties
    value: Tensor  # [R, chunks] float32: the logit of the chunk's candidate
    token: Tensor  # [R, chunks] int32: the candidate
    state: Tensor  # [R, chunks] int32: HELD or 0, see sampler_score
    shaped: Tensor  # [R, vocab] float32: logits after masks and penalties, of filtered rows
    strips: Tensor  # [R, chunks * BLOCK / STRIP] float32: maxima of strips, of filtered rows
    row: Tensor  # [R, FACTS] int32: what is known of a filtered row, see sampler_ranks
    mass: Tensor  # [R] int64: total weight of a filtered row
    found: Tensor  # [R, TILE] int64: (rank, id) of a filtered row's best tokens
    best: Tensor  # [R, chunks, BEST] int64: keys of each chunk's largest raw logits
    raw: Tensor  # [R, chunks, 2] float32: largest raw logit, sum of exp relative to it

    @classmethod
    def allocate(
        cls, rows: int, vocab: int, device: torch.device | str,
        filters: bool = True, logprobs: bool = True,
    ) -> Scratch:  # fmt: skip
        """Room for `rows` rows; `filters` takes rows * vocab * 4 bytes."""
        chunks = chunk_count(vocab)
        many, few = (rows if filters else 1), (rows if logprobs else 1)
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        wide = partial(torch.zeros, dtype=torch.int64, device=device)
        floats = partial(torch.zeros, dtype=torch.float32, device=device)
        return cls(
            peak=floats(rows, chunks),
            value=floats(rows, chunks),
            token=ints(rows, chunks),
            state=ints(rows, chunks),
            shaped=floats((many, vocab) if filters else (1, 1)),
            strips=floats(many, chunks * (BLOCK // STRIP)),
            row=ints(many, FACTS),
            mass=wide(many),
            found=wide(many, TILE),
            best=wide(few, chunks, BEST),
            raw=floats(few, chunks, 2),
        )


@dataclass(frozen=True, slots=True)
class Results:
    """What the host reads of a step; rows and groups beyond the counts keep what they held."""

    tokens: Tensor  # [R] int32; -1 for a row without a legal token or with NaN or +inf in it
    matched: Tensor  # [G] int32: leading drafts that are what the target drew
    own: Tensor  # [R] float32: logprob of the token, where asked for and the token is not -1
    best_ids: Tensor  # [R, BEST] int32: the n best, likewise; -1 beyond the vocabulary's size
    best_values: Tensor  # [R, BEST] float32: their logprobs

    @classmethod
    def allocate(cls, rows: int, groups: int, device: torch.device | str) -> Results:
        """Zeroed results."""
        return cls(
            tokens=torch.zeros(rows, dtype=torch.int32, device=device),
            matched=torch.zeros(groups, dtype=torch.int32, device=device),
            own=torch.zeros(rows, dtype=torch.float32, device=device),
            best_ids=torch.zeros(rows, BEST, dtype=torch.int32, device=device),
            best_values=torch.zeros(rows, BEST, dtype=torch.float32, device=device),
        )


def chunk_count(vocab: int) -> int:
    """How many programs share a row."""
    return -(-vocab // BLOCK)


class SlotParams:
    """The host's side of `SlotTables`: stages changed slots, uploads them in a few copies."""

    def __init__(self, tables: SlotTables) -> None:
        self.tables = tables
        self.vocab = tables.history.shape[1]
        self._records: dict[int, np.ndarray] = {}
        self._bias: dict[int, list[tuple[int, float]]] = {}
        self._history: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def write(
        self, slot: int, sampling: Sampling, stop_ids: Sequence[int], choice: int,
        prompt: Sequence[int], output: Sequence[int],
    ) -> int:  # fmt: skip
        """Stage a slot's parameters and return its FLAGS.

        `prompt` and `output` are the committed tokens, looked at only when a penalty is on.  What
        `refusal` refuses must not come here.
        """
        assert 0 <= slot < len(self.tables.records), f"slot {slot}"
        assert not (why := refusal(sampling, stop_ids)), why
        bias = sorted(_known(sampling.bias), key=lambda pair: pair[0])
        stops = _held(sampling, stop_ids)
        flags = _flags(sampling, bool(bias))
        record = _record(sampling, flags, choice)
        record[BIAS_COUNT], record[STOP_COUNT] = len(bias), len(stops)
        record[FIRST_STOP : FIRST_STOP + len(stops)] = stops
        self._records[slot] = record
        self._bias.pop(slot, None)
        self._history.pop(slot, None)
        if bias:
            self._bias[slot] = bias
        if flags & PENALTIES:
            assert len(self.tables.history) > slot, "the tables were made without penalties"
            self._history[slot] = _counts(prompt, output, self.vocab)
        return flags

    @property
    def records(self) -> dict[int, np.ndarray]:
        """The staged records by slot, int32 [WORDS]; whoever sent them clears this."""
        return self._records

    @property
    def staged(self) -> bool:
        """Something is left to be sent."""
        return bool(self._records or self._bias or self._history)

    def upload(self) -> None:
        """Send what was staged since the last call to the device, in stream order, and forget it.

        On a GPU nothing waits: the bytes go from pinned memory, which torch's allocator does not
        hand out again before the copy is done.
        """
        tables = self.tables
        device = tables.records.device
        if self._records:
            slots = np.fromiter(self._records, dtype=np.int64, count=len(self._records))
            records = np.stack(list(self._records.values()))
            tables.records.index_copy_(0, _sent(slots, device), _sent(records, device))
        for slot, pairs in self._bias.items():
            ids = np.array([token for token, _ in pairs], dtype=np.int32)
            values = np.array([value for _, value in pairs], dtype=np.float32)
            tables.bias_ids[slot, : len(ids)].copy_(_sent(ids, device))
            tables.bias_values[slot, : len(ids)].copy_(_sent(values, device))
        for slot, (seen, codes) in self._history.items():
            row = tables.history[slot]
            row.zero_().index_copy_(0, _sent(seen, device), _sent(codes, device))
        self._records.clear()
        self._bias.clear()
        self._history.clear()


def refusal(sampling: Sampling, stop_ids: Sequence[int]) -> str:
    """Why these parameters do not fit the tables, for the caller to read; empty when they do."""
    if (count := len(_known(sampling.bias))) > BIASES:
        return f"{count:,} tokens have a bias; this engine takes {BIASES:,}. Bias fewer."
    if (count := len(_held(sampling, stop_ids))) > STOPS:
        return f"min_tokens holds back {count} stop ids; this engine takes {STOPS}. Name fewer."
    if sampling.logprobs > BEST:
        return f"{sampling.logprobs} logprobs were asked for; this engine gives {BEST} at most."
    return ""


def _known(bias: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The bias of ids that a vocabulary can have."""
    return [(token, value) for token, value in bias if 0 <= token < 2**31 - 1]


def _held(sampling: Sampling, stop_ids: Sequence[int]) -> list[int]:
    """The stop ids that the kernels must know: min_tokens alone makes them look."""
    return [t for t in stop_ids if 0 <= t < 2**31 - 1] if sampling.min_tokens > 0 else []


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of `array` on the device, which the host need not wait for."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _flags(sampling: Sampling, biased: bool) -> int:
    """The FLAGS of these parameters; filters only count where a draw is made."""
    hot = sampling.temperature > 0
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    penalised = (sampling.repetition, sampling.frequency, sampling.presence) != (1.0, 0.0, 0.0)
    return (
        HOT * hot
        | FILTERED * (hot and filtered)
        | PENALTIES * penalised
        | BIASED * biased
        | SCORED * (sampling.logprobs >= 0)
    )


def _record(sampling: Sampling, flags: int, choice: int) -> np.ndarray:
    """The scalar words of a slot, int32 [WORDS]."""
    record = np.zeros(WORDS, dtype=np.int32)
    floats = record.view(np.float32)
    tiny = float(np.finfo(np.float32).tiny)
    heat = max(np.float32(sampling.temperature), np.float32(tiny))
    record[FLAGS] = flags
    floats[TEMPERATURE] = heat
    floats[RATE] = math.log2(math.e) / float(heat)
    record[TOP_K] = max(0, min(sampling.top_k, 2**31 - 1))
    top_p = sampling.top_p if sampling.top_p < 1 else OFF_TOP_P
    record[TOP_P : TOP_P + 2] = np.array([top_p], dtype=np.float64).view(np.int32)
    floats[FLOOR] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    floats[REPETITION] = sampling.repetition
    floats[FREQUENCY] = sampling.frequency
    floats[PRESENCE] = sampling.presence
    seed = np.array([sampling.seed % 2**64], dtype=np.uint64)
    record[SEED : SEED + 2] = seed.view(np.int32)
    record[CHOICE] = choice
    record[LOGPROBS] = sampling.logprobs
    return record


def _counts(
    prompt: Sequence[int], output: Sequence[int], vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ids seen, int64, and their history words, int32."""
    words = 2 * np.bincount(np.asarray(output, dtype=np.int64), minlength=vocab)
    words[np.asarray(prompt, dtype=np.int64)] |= 1
    seen = words.nonzero()[0]
    return seen, words[seen].astype(np.int32)
