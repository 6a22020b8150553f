"""One read of the logits: the candidate of every chunk of every row, then the row's token.

Filters nothing (see sampler_filter.py) and takes no logprobs.

A row is cut into chunks of BLOCK ids whatever the number of rows, and chunks meet only in maxima
with ties broken by id, so the cut cannot change a bit.  Within a chunk the sampled candidate is the
minimum of E * exp((top - x) / T), E exponential: the arg-max of x / T plus Gumbel noise
(exponential race) with one logarithm a token instead of two.  The chunks' candidates are then
compared by the very expression of engine/sampling.py.  Where two tokens of one chunk lie within a
few float units of each other the race may order them otherwise: a near-tie, decided the same way in
every batch.
"""

# mypy: disable-error-code="no-untyped-def,no-any-unimported,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import sampler_tables as tables
from engine.kernels.launch import enqueue
from engine.kernels.philox import exponential, gumbel, quad_words, words_at
from engine.kernels.sampler_tables import BLOCK, STRIP, WORDWISE, Results, Rows, Scratch, SlotTables

FLAGS, TEMPERATURE = tl.constexpr(tables.FLAGS), tl.constexpr(tables.TEMPERATURE)
RATE, SEED, CHOICE = (tl.constexpr(n) for n in (tables.RATE, tables.SEED, tables.CHOICE))
REPETITION = tl.constexpr(tables.REPETITION)
FREQUENCY, PRESENCE = tl.constexpr(tables.FREQUENCY), tl.constexpr(tables.PRESENCE)
BIAS_COUNT, STOP_COUNT = tl.constexpr(tables.BIAS_COUNT), tl.constexpr(tables.STOP_COUNT)
FIRST_STOP, WORDS = tl.constexpr(tables.FIRST_STOP), tl.constexpr(tables.WORDS)
BIASES = tl.constexpr(tables.BIASES)
HOT, FILTERED, PENALTIES, BIASED = (
    tl.constexpr(bit) for bit in (tables.HOT, tables.FILTERED, tables.PENALTIES, tables.BIASED)
)
# A chunk's state: only stop ids that min_tokens holds back are legal in it, and they were kept.
HELD = tl.constexpr(1)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def number(record, COLUMN: tl.constexpr):
    """A float of a slot's record."""
    return tl.load(record + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _masked(x, ids, quads, vocab, masks, stride, place):
    """The logits whose bit is set; a quad of ids never crosses a word.

    Where `place` is no row of the masks the one id that it stands for is left.
    """
    allowed = masks + tl.maximum(place, 0).to(tl.int64) * stride
    word = tl.load(allowed + (quads >> 3), mask=quads * 4 < vocab, other=0)
    legal = ((word[:, None] >> (ids & 31)) & 1) != 0
    return tl.where(tl.where(place < 0, ids == -1 - place, legal), x, -float("inf"))


@triton.jit
def _biased(x, ids, bias_ids, bias_values, slot, record, start, BLOCK: tl.constexpr):
    """Add the bias of the ids in this chunk; the list is sorted, so its part is a range."""
    count = tl.load(record + BIAS_COUNT)
    places = tl.arange(0, BIASES)
    base = slot * BIASES
    listed = tl.load(bias_ids + base + places, mask=places < count, other=NO_ID)
    begin = tl.sum((listed < start).to(tl.int32))
    end = tl.sum((listed < start + BLOCK).to(tl.int32))
    for place in range(begin, end):
        token = tl.load(bias_ids + base + place)
        x = tl.where(ids == token, x + tl.load(bias_values + base + place), x)
    return x


@triton.jit
def _penalised(x, ids, inside, history, slot, vocab, record, tokens, first, drafts):
    """Repetition, frequency and presence over the committed tokens and this row's drafts."""
    code = tl.load(history + slot * vocab + ids, mask=inside, other=0)
    for place in range(1, drafts + 1):
        code = tl.where(ids == tl.load(tokens + first + place), code + 2, code)
    times = (code >> 1).to(tl.float32)
    rate = number(record, REPETITION)
    less = tl.where(x > 0, tl.div_rn(x, rate), x * rate)
    less = less - number(record, FREQUENCY) * times
    less = less - tl.where(times > 0, number(record, PRESENCE), 0.0)
    return tl.where(code > 0, less, x)


@triton.jit
def _shaped(
    x, ids, inside, chunk, slot, vocab, record, flags, bias_ids, bias_values, history,
    tokens, first, drafts, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bias, then penalties, where the slot has them."""
    if (flags & BIASED) != 0:
        x = _biased(x, ids, bias_ids, bias_values, slot, record, chunk * BLOCK, BLOCK)
    if (flags & PENALTIES) != 0:
        x = _penalised(x, ids, inside, history, slot, vocab, record, tokens, first, drafts)
    return x


@triton.jit
def _held(x, ids, record):
    """The logits without the stop ids, or HELD and with them where nothing else is left."""
    kept = x
    for place in range(tl.load(record + STOP_COUNT)):
        kept = tl.where(ids == tl.load(record + FIRST_STOP + place), -float("inf"), kept)
    state = tl.full((), 0, tl.int32)
    if (tl.max(kept) == -float("inf")) & (tl.max(x) > -float("inf")):
        kept = x
        state = tl.full((), HELD, tl.int32)
    return kept, state


@triton.jit
def _race(x, peak, record, position, quads, BLOCK: tl.constexpr):
    """The race of each token of the chunk [BLOCK]: the smallest wins; +inf where not legal."""
    words = quad_words(
        tl.load(record + SEED), tl.load(record + SEED + 1), position,
        tl.load(record + CHOICE), quads,
    )  # fmt: skip
    # The chunk's best has exponent 0, so that no temperature makes the whole chunk overflow.
    top = tl.where(peak > -float("inf"), peak, 0.0)
    words = tl.reshape(words, [BLOCK])
    return exponential(words) * tl.exp2((top - x) * number(record, RATE))


@triton.jit
def _strip_tops(x, into, BLOCK: tl.constexpr, STRIP: tl.constexpr):
    """Store the largest logit of each STRIP neighbours."""
    tops = tl.max(tl.reshape(x, [BLOCK // STRIP, STRIP]), axis=1)
    tl.store(into + tl.arange(0, BLOCK // STRIP), tops)


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _score(
    logits, stride, vocab, count, row_slot, row_position, row_hold, row_mask, row_first, row_offset,
    tokens, records, bias_ids, bias_values, history, masks, mask_stride,
    peaks, values, candidates, states, shaped, strips,
    BLOCK: tl.constexpr, STRIP: tl.constexpr, CHUNKS: tl.constexpr,
    MASKED: tl.constexpr, SHAPED: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row < tl.load(count):
        slot = tl.load(row_slot + row).to(tl.int64)
        record = records + slot * WORDS
        flags = tl.load(record + FLAGS)
        quads = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        ids = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
        inside = ids < vocab
        at = logits + row.to(tl.int64) * stride
        x = tl.load(at + ids, mask=inside, other=-float("inf")).to(tl.float32)
        wrong = (x != x) | (x == float("inf"))
        x = tl.where(wrong, -float("inf"), x)
        if MASKED:
            x = _masked(x, ids, quads, vocab, masks, mask_stride, tl.load(row_mask + row))
        if SHAPED:
            first, drafts = tl.load(row_first + row), tl.load(row_offset + row)
            x = _shaped(
                x, ids, inside, chunk, slot, vocab, record, flags, bias_ids, bias_values, history,
                tokens, first, drafts, BLOCK,
            )  # fmt: skip
        state = tl.full((), 0, tl.int32)
        if tl.load(row_hold + row) != 0:
            x, state = _held(x, ids, record)
        # A wrong logit shows as a peak of +inf, which nothing else can be: one reduction less.
        x = tl.reshape(tl.where(wrong, float("inf"), x), [BLOCK])
        peak, best = tl.max(x, axis=0, return_indices=True)
        place = row * CHUNKS + chunk
        tl.store(peaks + place, peak)
        tl.store(states + place, state)
        plain = flags >= 0
        if FILTERS:
            plain = (flags & FILTERED) == 0
            if (flags & FILTERED) != 0:
                at_row = shaped + row.to(tl.int64) * vocab + chunk * BLOCK
                flat = tl.arange(0, BLOCK)
                tl.store(at_row + flat, x, mask=chunk * BLOCK + flat < vocab)
                _strip_tops(x, strips + place * (BLOCK // STRIP), BLOCK, STRIP)
        if plain:
            value = peak
            if (flags & HOT) != 0:
                race = _race(x, peak, record, tl.load(row_position + row), quads, BLOCK)
                _, best = tl.min(race, axis=0, return_indices=True)
                value = tl.max(tl.where(tl.arange(0, BLOCK) == best, x, -float("inf")))
            tl.store(candidates + place, chunk * BLOCK + best)
            tl.store(values + place, value)


@triton.jit
def chunk_tops(peaks, states, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """The row's largest logit or 0, whether it has a token, the state of chunks that do not count.

    HELD chunks count when no other chunk has a legal token: min_tokens then gives way.
    """
    places = tl.arange(0, PADDED)
    real = places < CHUNKS
    peak = tl.load(peaks + row * CHUNKS + places, mask=real, other=-float("inf"))
    state = tl.load(states + row * CHUNKS + places, mask=real, other=0)
    free = tl.max(tl.where((state & HELD) == 0, peak, -float("inf")))
    most = tl.max(peak)
    banned = tl.where(free == -float("inf"), 0, HELD)
    top = tl.where(free == -float("inf"), most, free)
    legal = (top > -float("inf")) & (most < float("inf"))
    return tl.where(legal, top, 0.0), legal, banned


@triton.jit(do_not_specialize_on_alignment=WORDWISE)
def _pick(
    count, row_slot, row_position, records, peaks, values, candidates, states, results,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(count):
        record = records + tl.load(row_slot + row).to(tl.int64) * WORDS
        flags = tl.load(record + FLAGS)
        plain = flags >= 0
        if FILTERS:
            plain = (flags & FILTERED) == 0
        if plain:
            top, legal, banned = chunk_tops(peaks, states, row, CHUNKS, PADDED)
            places = tl.arange(0, PADDED)
            real = places < CHUNKS
            at = row * CHUNKS + places
            state = tl.load(states + at, mask=real, other=0)
            score = tl.load(values + at, mask=real, other=-float("inf"))
            tokens = tl.load(candidates + at, mask=real, other=NO_ID)
            if (flags & HOT) != 0:
                words = words_at(
                    tl.load(record + SEED), tl.load(record + SEED + 1),
                    tl.load(row_position + row), tl.load(record + CHOICE), tokens,
                )  # fmt: skip
                score = tl.div_rn(score - top, number(record, TEMPERATURE)) + gumbel(words)
            usable = real & ((state & banned) == 0)
            score = tl.where(usable, score, -float("inf"))
            best = tl.max(score)
            token = tl.min(tl.where(usable & (score == best), tokens, NO_ID))
            tl.store(results + row, tl.where(legal, token, -1))


def score(
    logits: Tensor, rows: Rows, slots: SlotTables, masks: Tensor | None, scratch: Scratch,
    shaped: bool, filters: bool,
) -> None:  # fmt: skip
    """Fill the chunk fields of `scratch`, and for filtered rows `shaped` and `strips`."""
    count, vocab = logits.shape
    chunks = scratch.peak.shape[1]
    assert logits.stride(1) == 1, f"logits with strides {logits.stride()}"
    assert chunks == tables.chunk_count(vocab), f"scratch of {chunks} chunks for {vocab} ids"
    if masks is not None:
        assert masks.shape[1] * 32 >= vocab, f"masks of {masks.shape[1]} words for {vocab} ids"
    bits = rows.tokens if masks is None else masks
    enqueue(_score, (count, chunks))(
        logits, logits.stride(0), vocab, rows.count, rows.slot, rows.position, rows.hold, rows.mask,
        rows.first, rows.offset, rows.tokens, slots.records, slots.bias_ids, slots.bias_values,
        slots.history, bits, bits.stride(0), scratch.peak, scratch.value, scratch.token,
        scratch.state, scratch.shaped, scratch.strips,
        BLOCK=BLOCK, STRIP=STRIP, CHUNKS=chunks,
        MASKED=masks is not None, SHAPED=shaped, FILTERS=filters,
        # A fused multiply-add would round penalties otherwise than engine/sampling.py does.
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def pick(
    rows: Rows, slots: SlotTables, scratch: Scratch, results: Results, count: int, filters: bool
) -> None:
    """Write the token of each unfiltered row; `count` is the bucket's number of rows."""
    chunks = scratch.peak.shape[1]
    enqueue(_pick, (count,))(
        rows.count, rows.slot, rows.position, slots.records, scratch.peak, scratch.value,
        scratch.token, scratch.state, results.tokens,
        CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), FILTERS=filters,
        num_warps=1 if chunks <= 64 else 4, enable_fp_fusion=False,
    )  # fmt: skip
