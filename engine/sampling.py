"""Logits -> tokens: the processed distribution of each row, and its draw.  Accepts no draft.

Order, the same for every row, drafted or not: raw logits (logprobs are taken here), grammar mask,
bias, penalties, min_tokens, temperature, top-k, top-p, min-p, arg-max of what is left plus Gumbel
noise.  Every operation works on a row alone, in a way that does not depend on how many rows there
are: a row's token is a function of its logits, mask and `SampleRow`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from engine.messages import Sampling, TokenLogprobs
from engine.noise import gumbel, gumbel_at

HEADS = (512, 8192)  # how many of the best tokens top-p looks at before it sorts the whole row
FEW = 512  # tokens left of a row up to which only theirs get noise
NOTHING = -1  # the token of a row that has none


class History:
    """Which tokens one choice has seen, and how often it put each out; only made for penalties."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._ids = array("q", dict.fromkeys(prompt))
        self._counts = array("q", bytes(8 * len(self._ids)))
        self._slot = {token: slot for slot, token in enumerate(self._ids)}

    def add(self, token: int) -> None:
        """One more output token."""
        slot = self._slot.setdefault(token, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[slot] += 1

    def count(self, token: int) -> int:
        """How often it was put out."""
        slot = self._slot.get(token)
        return 0 if slot is None else self._counts[slot]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The ids seen in prompt or output, and how often each was put out: int64 [N] copies."""
        return torch.tensor(self._ids, device=device), torch.tensor(self._counts, device=device)


@dataclass(slots=True)
class SampleRow:
    """What one row needs besides its logits."""

    sampling: Sampling
    position: int  # absolute position of the token to draw
    choice: int  # index among the n choices of the request
    generated: int  # output tokens before this row, drafted ones included
    stop_ids: Sequence[int]  # masked until min_tokens exist
    history: History | None  # committed tokens; needed when `needs_history(sampling)`
    drafted: Sequence[int]  # draft tokens between `history` and this row


@dataclass(frozen=True, slots=True)
class Sampled:
    """One entry a row."""

    tokens: list[int]  # -1 where the row is in `empty`
    logprobs: list[TokenLogprobs | None]  # None where not asked for or empty
    empty: list[int]  # rows without a legal token, or whose logits hold NaN or +inf


def needs_history(sampling: Sampling) -> bool:
    """Whether some penalty is on."""
    return sampling.repetition != 1.0 or sampling.frequency != 0.0 or sampling.presence != 0.0


def sample(logits: Tensor, rows: Sequence[SampleRow], masks: Tensor | None) -> Sampled:
    """Draw each row's token: argmax(log p + noise), or argmax(log p) at temperature 0.

    `logits` [R, V] in any float type are not changed; arithmetic is in fp32, or fp64 when they are.
    `masks` int32 [R, ceil(V / 32)]: bit v % 32 of word v // 32 allows id v; ids beyond its width
    are not allowed.  The lowest id wins ties.  Bias and stop ids outside the vocabulary do nothing.
    """
    assert logits.shape[:-1] == (len(rows),), f"{len(rows)} rows, logits {logits.shape}"
    if not rows:
        return Sampled([], [], [])
    peak, best = logits.max(-1)
    sound = peak.isfinite().tolist()  # NaN is the maximum of any row that holds one
    tokens = _where(sound, best)
    bound = _bound(masks, logits.shape)
    drawn = [i for i, row in enumerate(rows) if sound[i] and (bound[i] or _shaped(row))]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        part = None if masks is None else masks[index]
        fresh = _draw(_wide(logits[index]), [rows[i] for i in drawn], part)
        for i, token in zip(drawn, fresh, strict=True):
            tokens[i] = token
    return Sampled(
        tokens,
        _logprobs(logits, rows, tokens),
        [i for i, token in enumerate(tokens) if token == NOTHING],
    )


def _shaped(row: SampleRow) -> bool:
    """Whether the row's token may differ from the arg-max of its masked logits."""
    sampling = row.sampling
    return (
        sampling.temperature > 0
        or bool(sampling.bias)
        or needs_history(sampling)
        or row.generated < sampling.min_tokens
    )


def _bound(masks: Tensor | None, shape: torch.Size) -> list[bool]:
    """Which rows have a mask that forbids something."""
    rows, vocab = shape
    if masks is None:
        return [False] * rows
    assert masks.dtype == torch.int32 and len(masks) == rows, f"masks {masks.dtype} {masks.shape}"
    if masks.shape[1] * 32 < vocab:
        return [True] * rows
    bound: list[bool] = (masks != -1).any(-1).tolist()
    return bound


def _wide(values: Tensor) -> Tensor:
    """`values` in the type we compute in."""
    return values if values.dtype == torch.float64 else values.float()


def _where(legal: Sequence[bool], tokens: Tensor) -> list[int]:
    """`tokens` [R] as a list, NOTHING where not legal."""
    pairs = zip(tokens.tolist(), legal, strict=True)
    return [token if fine else NOTHING for token, fine in pairs]


def _draw(x: Tensor, rows: Sequence[SampleRow], masks: Tensor | None) -> list[int]:
    """The token of each row of `x` [R, V], which is overwritten; NOTHING where none is legal."""
    if masks is not None:
        _mask(x, masks)
    _shape_rows(x, rows)
    peak, best = x.max(-1)
    legal = (peak > -inf).tolist()
    tokens = _where(legal, best)
    hot = [i for i, row in enumerate(rows) if legal[i] and row.sampling.temperature > 0]
    if hot:
        index = torch.tensor(hot, device=x.device)
        fresh = _draw_hot(x[index], peak[index], [rows[i] for i in hot])
        for i, token in zip(hot, fresh, strict=True):
            tokens[i] = token
    return tokens


def _draw_hot(x: Tensor, peak: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The sampled token of each row: temperature, top-k, top-p, min-p, noise."""
    heat = x.new_tensor([row.sampling.temperature for row in rows])
    # The best goes to 0: no temperature overflows, and noise keeps its low bits where they matter.
    x.sub_(peak[:, None]).div_(heat.clamp_min_(torch.finfo(x.dtype).tiny)[:, None])
    _filter(x, _top_k, {i: r.sampling.top_k for i, r in enumerate(rows) if r.sampling.top_k > 0})
    _filter(x, _top_p, {i: r.sampling.top_p for i, r in enumerate(rows) if r.sampling.top_p < 1})
    floors = [log(r.sampling.min_p) if r.sampling.min_p > 0 else -inf for r in rows]
    if max(floors) > -inf:
        x.masked_fill_(x < x.new_tensor(floors)[:, None], -inf)
    narrow = _few(x)
    tokens = [NOTHING] * len(rows)
    for few in (True, False):
        places = [i for i, is_narrow in enumerate(narrow) if is_narrow == few]
        if places:
            part = x if len(places) == len(rows) else x[torch.tensor(places, device=x.device)]
            fresh = _noisy(part, [rows[i] for i in places], few)
            for i, token in zip(places, fresh, strict=True):
                tokens[i] = token
    return tokens


def _few(x: Tensor) -> list[bool]:
    """Which rows have so few tokens left that noise for those alone is cheaper.

    A row's own business: what its neighbours do must not change the way it is drawn.
    """
    if x.shape[1] <= FEW:
        return [False] * len(x)
    few: list[bool] = ((x > -inf).sum(-1) <= FEW).tolist()
    return few


def _noisy(x: Tensor, rows: Sequence[SampleRow], few: bool) -> list[int]:
    """The arg-max of each row plus its noise; `few` when at most FEW entries are above -inf."""
    device = x.device
    # A seed is 64 bits without sign, a tensor's integers have one: the same bits, read differently.
    seeds = [(r.sampling.seed + 2**63) % 2**64 - 2**63 for r in rows]
    keys = (
        torch.tensor(seeds, device=device),
        torch.tensor([row.choice for row in rows], device=device),
        torch.tensor([row.position for row in rows], device=device),
    )
    if few:
        ids = x.topk(FEW, -1).indices.sort(-1).values  # rising: the lowest id wins ties here too
        best = (x.gather(1, ids) + gumbel_at(*keys, ids, x.dtype)).max(-1, keepdim=True).indices
        found: list[int] = ids.gather(1, best)[:, 0].tolist()
        return found
    tokens: list[int] = x.add_(gumbel(*keys, x.shape[1], x.dtype)).max(-1).indices.tolist()
    return tokens


def _mask(x: Tensor, masks: Tensor) -> None:
    """Set what the bit masks do not allow to -inf, in place."""
    # A table turns each byte of the masks into eight booleans; our machines are little-endian.
    codes = torch.arange(256, dtype=torch.uint8, device=x.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    table = (codes[:, None] >> shifts & 1 ^ 1).view(torch.int64).flatten()
    banned = table[masks.contiguous().view(torch.uint8).int()].view(torch.bool)
    width = min(banned.shape[1], x.shape[1])
    x[:, :width].masked_fill_(banned[:, :width], -inf)
    x[:, width:] = -inf


def _shape_rows(x: Tensor, rows: Sequence[SampleRow]) -> None:
    """Bias, penalties and min_tokens, in place and only where they are on."""
    bases: dict[int, tuple[Tensor, Tensor]] = {}  # the rows of one choice share its history
    for i, row in enumerate(rows):
        if row.sampling.bias:
            _bias(x[i], row.sampling.bias)
        if needs_history(row.sampling):
            history = row.history
            assert history is not None, f"row {i} has penalties and no history"
            if id(history) not in bases:
                bases[id(history)] = history.tensors(x.device)
            _penalise(x[i], row, history, bases[id(history)])
        if row.generated < row.sampling.min_tokens:
            _hold_back(x[i], row.stop_ids)


def _bias(x: Tensor, bias: Sequence[tuple[int, float]]) -> None:
    """Add to single logits of one row [V]."""
    known = [(token, value) for token, value in bias if 0 <= token < len(x)]
    ids = torch.tensor([token for token, _ in known], dtype=torch.int64, device=x.device)
    x.index_add_(0, ids, x.new_tensor([value for _, value in known]))


def _penalise(x: Tensor, row: SampleRow, history: History, base: tuple[Tensor, Tensor]) -> None:
    """Penalties of one row [V]: the committed counts, then again for what the draft tokens add."""
    ids, counts = base
    added = Counter(row.drafted)
    more = torch.tensor(list(added), dtype=torch.int64, device=x.device)
    before = x[more]
    x[ids] = _penalised(x[ids], counts, row.sampling)
    totals = torch.tensor([history.count(t) + n for t, n in added.items()], device=x.device)
    x[more] = _penalised(before, totals, row.sampling)


def _penalised(values: Tensor, counts: Tensor, sampling: Sampling) -> Tensor:
    """The logits of tokens that were seen, `counts` times of these in the output."""
    times = counts.to(values.dtype)
    rate = sampling.repetition
    values = torch.where(values > 0, values / rate, values * rate)
    return values - sampling.frequency * times - sampling.presence * (times > 0)


def _hold_back(x: Tensor, stop_ids: Sequence[int]) -> None:
    """Forbid the stop ids in one row [V], unless the grammar allows nothing else."""
    ids = torch.tensor([t for t in stop_ids if 0 <= t < len(x)], dtype=torch.int64, device=x.device)
    before = x[ids]
    x[ids] = -inf
    if x.max() == -inf:
        x[ids] = before


def _filter(
    x: Tensor, keep: Callable[[Tensor, Tensor], Tensor], limits: Mapping[int, float]
) -> None:
    """Set what `keep(rows, their limits)` leaves out to -inf in the rows that `limits` names."""
    if limits:
        index = torch.tensor(list(limits), device=x.device)
        part = x[index]
        # fp64: a mass of 0.9 rounded to fp32 would be a smaller one.
        kept = keep(part, torch.tensor(list(limits.values()), dtype=torch.float64, device=x.device))
        x[index] = part.masked_fill_(~kept, -inf)


def _top_k(x: Tensor, counts: Tensor) -> Tensor:
    """The `counts` best of each row."""
    counts = counts.long().clamp_max_(x.shape[1])
    head = x.topk(int(counts.max()), -1).values
    return _first(x, counts, head.gather(1, counts[:, None] - 1))


def _top_p(x: Tensor, masses: Tensor) -> Tensor:
    """The smallest set of each row whose probability reaches the row's mass; at least one token."""
    # softmax sums each row in one thread; sum() would split a lone row and round differently.
    probs = x.softmax(-1)
    vocab = x.shape[1]
    counts, bars = masses.new_zeros(len(x), dtype=torch.int64), x.new_zeros(len(x), 1)
    rest = torch.arange(len(x), device=x.device)
    for width in (*(head for head in HEADS if head < vocab), vocab):
        counts[rest], bars[rest], reached = _reach(x[rest], probs[rest], masses[rest], width)
        rest = rest[~reached]
        if not len(rest):
            break
    return _first(x, counts, bars)


def _reach(x: Tensor, probs: Tensor, masses: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many of the `width` best make the mass, the last one's logit [R, 1], whether they do."""
    head, order = x.topk(width, -1)
    sums = probs.gather(1, order).double().cumsum(-1)
    counts = ((sums < masses[:, None]).sum(-1) + 1).clamp_max_(width)
    return counts, head.gather(1, counts[:, None] - 1), sums[:, -1] >= masses


def _first(x: Tensor, counts: Tensor, bars: Tensor) -> Tensor:
    """Which are each row's `counts` [R] best, lower ids first; the last is worth `bars` [R, 1]."""
    kept = x >= bars
    tied = (kept.sum(-1) > counts).nonzero().flatten()
    if len(tied):
        above, level = x[tied] > bars[tied], x[tied] == bars[tied]
        room = counts[tied] - above.sum(-1)
        kept[tied] = above | (level & (level.cumsum(-1) <= room[:, None]))
    return kept


def _logprobs(
    logits: Tensor, rows: Sequence[SampleRow], tokens: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Natural-log probabilities under the raw logits, of the drawn token and of the row's best."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs >= 0 and tokens[i] != NOTHING]
    if asked:
        scores = _wide(logits[torch.tensor(asked, device=logits.device)]).log_softmax(-1)
        for score, i in zip(scores, asked, strict=True):
            own = float(score[tokens[i]])
            found[i] = TokenLogprobs(own, _best(score, rows[i].sampling.logprobs))
    return found


def _best(scores: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` best ids of one row [V] and their scores, lower ids first among equals."""
    count = min(count, len(scores))
    if count == 0:
        return []
    ids = (scores >= scores.topk(count).values[-1]).nonzero().flatten()
    values, order = scores[ids].sort(descending=True, stable=True)
    return list(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
