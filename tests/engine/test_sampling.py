"""Sampling against a slow, obvious reference and enumerated distributions.  Runs no model."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch

from engine import sampling as module
from engine.messages import Sampling
from engine.noise import gumbel
from engine.sampling import History, SampleRow, needs_history, sample

GREEDY = Sampling(temperature=0.0)
CHI2_9 = 33.7  # nine degrees of freedom stay below it 9,999 times of 10,000


@pytest.fixture(autouse=True)
def threads():
    """One: tensors this small are slower on several, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Case:
    """A row and what the reference needs to know of it."""

    logits: list[float]
    row: SampleRow
    prompt: list[int]
    output: list[int]  # committed
    allowed: set[int] | None = None


def history(prompt: list[int], output: list[int]) -> History:
    seen = History(prompt)
    for token in output:
        seen.add(token)
    return seen


def plain(sampling: Sampling, position: int = 0, **changes) -> SampleRow:
    row = SampleRow(sampling, position, 0, position, (), None, ())
    return replace(row, **changes)


def mask_of(allowed: list[set[int] | None], vocab: int) -> torch.Tensor:
    """Bit masks out of one big integer a row."""
    width = -(-vocab // 32)
    rows = [sum(1 << t for t in (range(vocab) if ids is None else ids)) for ids in allowed]
    packed = b"".join(row.to_bytes(4 * width, "little") for row in rows)
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).view(len(rows), width)


def processed(case: Case) -> dict[int, float]:
    """The distribution of a row, step by step as the module's docstring lists them."""
    s, row = case.row.sampling, case.row
    x = dict(enumerate(case.logits))
    if case.allowed is not None:
        x = {token: value for token, value in x.items() if token in case.allowed}
    for token, value in s.bias:
        if token in x:
            x[token] += value
    output = Counter([*case.output, *row.drafted])
    for token in x:
        if token in output or token in case.prompt:
            x[token] = x[token] / s.repetition if x[token] > 0 else x[token] * s.repetition
        x[token] -= s.frequency * output[token] + s.presence * (output[token] > 0)
    if row.generated < s.min_tokens:
        x = {token: value for token, value in x.items() if token not in row.stop_ids} or x
    order = sorted(x, key=lambda token: (-x[token], token))
    if s.temperature == 0:
        return {order[0]: 1.0}
    order = order[: s.top_k or None]
    p = softmax({token: x[token] / s.temperature for token in order})
    mass, kept = 0.0, []
    for token in order:
        if mass < s.top_p or not kept:
            kept.append(token)
        mass += p[token]
    return softmax({t: x[t] / s.temperature for t in kept if p[t] >= s.min_p * p[order[0]]})


def softmax(x: dict[int, float]) -> dict[int, float]:
    top = max(x.values())
    weights = {token: math.exp(value - top) for token, value in x.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def expected(case: Case) -> int:
    """argmax(log p + noise) over the support."""
    row = case.row
    numbers = (row.sampling.seed, row.choice, row.position)
    noise = gumbel(*(torch.tensor([n]) for n in numbers), len(case.logits), torch.float64)[0]
    p = processed(case)
    return max(p, key=lambda token: math.log(p[token]) + float(noise[token]))


def random_case(rng: random.Random, vocab: int) -> Case:
    def often(value, off):
        return value if rng.random() < 0.5 else off

    s = Sampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=often(rng.uniform(0.05, 1), 1.0),
        top_k=often(rng.randrange(1, vocab + 3), 0),
        min_p=often(rng.uniform(0, 0.3), 0.0),
        seed=rng.randrange(-(2**63), 2**63),
        repetition=often(rng.uniform(0.7, 1.6), 1.0),
        frequency=often(rng.uniform(-1, 1), 0.0),
        presence=often(rng.uniform(-1, 1), 0.0),
        bias=often(tuple((rng.randrange(vocab), rng.uniform(-5, 5)) for _ in range(3)), ()),
        min_tokens=often(8, 0),
    )
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
    output = [rng.randrange(vocab) for _ in range(rng.randrange(6))]
    drafted = tuple(rng.randrange(vocab) for _ in range(rng.randrange(4)))
    seen = history(prompt, output) if needs_history(s) else None
    made = len(output) + len(drafted)
    stops = rng.sample(range(vocab), 2)
    row = SampleRow(s, len(prompt) + made, rng.randrange(3), made, stops, seen, drafted)
    allowed = often(set(rng.sample(range(vocab), rng.randrange(1, vocab))), None)
    return Case([rng.gauss(0, 2) for _ in range(vocab)], row, prompt, output, allowed)


def batch(
    cases: list[Case], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, list[SampleRow], torch.Tensor]:
    vocab = len(cases[0].logits)
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float64).to(dtype)
    return logits, [case.row for case in cases], mask_of([case.allowed for case in cases], vocab)


@pytest.mark.parametrize("vocab", [10, 33, 64])
def test_every_mix_of_features_gives_the_token_of_the_obvious_reference(vocab):
    rng = random.Random(vocab)
    cases = [random_case(rng, vocab) for _ in range(400)]
    result = sample(*batch(cases))
    assert result.tokens == [expected(case) for case in cases]
    assert result.empty == []


def test_a_history_without_the_draft_tokens_would_be_noticed(monkeypatch):
    rng = random.Random(3)
    cases = [random_case(rng, 10) for _ in range(200)]
    honest = module._penalise
    monkeypatch.setattr(
        module, "_penalise", lambda x, row, *rest: honest(x, replace(row, drafted=()), *rest)
    )
    wrong = sample(*batch(cases)).tokens
    assert wrong != [expected(case) for case in cases]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_a_batch(dtype):
    torch.set_num_threads(2)  # a lone row must not be summed by two
    rng = random.Random(8)
    cases = [random_case(rng, 3001) for _ in range(16)]
    for case in cases[::2]:
        case.row.sampling = msgspec.structs.replace(case.row.sampling, logprobs=rng.randrange(4))
    logits, rows, masks = batch(cases, dtype)
    before = logits.clone()
    whole = sample(logits, rows, masks)
    assert torch.equal(logits, before)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row], masks[i : i + 1])
        assert alone.tokens == whole.tokens[i : i + 1]
        assert alone.logprobs == whole.logprobs[i : i + 1]


def test_a_row_of_a_real_vocabulary_is_the_same_alone_and_in_a_batch():
    torch.set_num_threads(2)  # a lone row must not be summed by two
    torch.manual_seed(4)
    logits = torch.randn(6, 49_152) * torch.tensor([0.3, 1, 2, 3, 4, 6])[:, None]
    settings = [Sampling(top_p=p, seed=9) for p in (0.5, 0.9, 0.99)] + [Sampling(top_k=40)] * 3
    rows = [plain(s, position) for position, s in enumerate(settings)]
    whole = sample(logits, rows, None).tokens
    assert whole == [sample(logits[i : i + 1], [row], None).tokens[0] for i, row in enumerate(rows)]


def chi_square(logits: list[float], sampling: Sampling, law: dict[int, float]) -> float:
    """The statistic of 20,000 draws at positions 0, 1, ... against a law on the vocabulary."""
    draws = 20_000
    rows = [plain(sampling, position) for position in range(draws)]
    table = torch.tensor(logits, dtype=torch.float64).expand(draws, -1)
    counts = Counter(sample(table, rows, None).tokens)
    return sum(
        (counts[token] - draws * law.get(token, 0)) ** 2 / (draws * law.get(token, 0))
        if law.get(token, 0)
        else math.inf * counts[token]
        if counts[token]
        else 0.0
        for token in range(len(logits))
    )


LOGITS = [1.3, 0.2, -0.4, 2.1, 0.9, -1.5, 1.8, 0.0, 0.7, -2.2]
KNOBS = [
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.6),
    Sampling(seed=3, temperature=1.8, top_k=5),
    Sampling(seed=4, temperature=1.8, top_p=0.7),
    Sampling(seed=5, temperature=0.7, min_p=0.2),
    Sampling(seed=6, temperature=1.5, top_k=7, top_p=0.8, min_p=0.1, bias=((2, 2.0), (3, -1.0))),
]


@pytest.mark.parametrize("knobs", KNOBS)
def test_draws_have_the_enumerated_distribution(knobs):
    law = processed(Case(LOGITS, plain(knobs), [], []))
    assert chi_square(LOGITS, knobs, law) < CHI2_9


def test_the_bound_notices_a_wrong_temperature_and_a_wrong_order():
    hot = Sampling(seed=1, temperature=1.1)
    assert chi_square(LOGITS, hot, processed(Case(LOGITS, plain(Sampling()), [], []))) > 3 * CHI2_9
    # top-p before temperature: a smaller set, because the distribution is still peaked
    both = Sampling(seed=4, temperature=1.8, top_p=0.7)
    early = processed(Case(LOGITS, plain(Sampling(top_p=0.7)), [], []))
    wrong = softmax({token: LOGITS[token] / 1.8 for token in early})
    assert len(wrong) < len(processed(Case(LOGITS, plain(both), [], [])))
    assert chi_square(LOGITS, both, wrong) > 3 * CHI2_9


def test_choices_of_one_seed_are_independent_draws():
    draws = 20_000
    table = torch.zeros(2 * draws, 4, dtype=torch.float64)
    rows = [plain(Sampling(), i // 2, choice=i % 2) for i in range(2 * draws)]
    tokens = sample(table, rows, None).tokens
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    fair = draws / 16
    assert sum((pairs[a, b] - fair) ** 2 / fair for a in range(4) for b in range(4)) < 44.3


def support(logits: list[float], sampling: Sampling) -> set[int]:
    """Which tokens 400 positions give."""
    rows = [plain(sampling, position) for position in range(400)]
    table = torch.tensor(logits, dtype=torch.float64).expand(400, -1)
    return set(sample(table, rows, None).tokens)


def test_equal_tokens_at_the_edge_of_top_k_and_top_p_are_kept_by_lowest_id():
    flat = [0.0] * 8
    assert support(flat, Sampling(top_k=3)) == {0, 1, 2}
    assert support(flat, Sampling(top_p=0.5)) == {0, 1, 2, 3}
    assert support([-3.0, 0.0, -3.0, 0.0, 0.0], Sampling(top_k=2)) == {1, 3}
    assert support(flat, Sampling(top_p=1e-9)) == {0}
    assert support([0.0, 0.5, 0.5], Sampling(top_p=0.0)) == {1}
    assert support([0.0, 0.5, 0.5], Sampling(min_p=1.0)) == {1, 2}


def test_top_p_looks_beyond_its_first_guesses_and_reads_the_mass_in_full():
    flat = [0.0] * 20_000
    masses = torch.tensor([0.01, 0.1, 0.85], dtype=torch.float64)
    kept = module._top_p(torch.tensor([flat] * 3), masses)
    assert [abs(int(row.sum()) - size) for row, size in zip(kept, (200, 2000, 17_000))] <= [1] * 3
    assert int(kept[2].nonzero().max()) == int(kept[2].sum()) - 1
    # the first two tokens weigh 0.9 - 1e-9, which is less than 0.9 and more than 0.9 in fp32
    near = [math.log(p) for p in (0.5, 0.4 - 1e-9, 0.1 + 1e-9)]
    assert support(near, Sampling(top_p=0.9)) == {0, 1, 2}


def test_a_mask_hides_a_token_whatever_its_logit_and_bias():
    rng = random.Random(2)
    for vocab in (31, 32, 33, 70):
        allowed = [set(rng.sample(range(vocab), 3)) for _ in range(50)]
        logits = torch.randn(50, vocab)
        bias = tuple((token, 90.0) for token in range(0, vocab, 2))
        for s in (GREEDY, Sampling(), Sampling(bias=bias), Sampling(top_p=0.5)):
            tokens = sample(logits, [plain(s)] * 50, mask_of(allowed, vocab)).tokens
            assert all(token in ids for token, ids in zip(tokens, allowed, strict=True))


def test_ids_beyond_the_width_of_the_mask_are_not_allowed():
    logits = torch.arange(70.0)[None]
    assert sample(logits, [plain(GREEDY)], mask_of([None], 64)).tokens == [63]
    assert sample(logits, [plain(GREEDY)], mask_of([None], 70)).tokens == [69]


def test_rows_without_a_legal_token_are_named_and_spoil_no_other():
    logits = torch.tensor([LOGITS] * 6)
    logits[1, 4] = math.nan
    logits[2] = -math.inf
    logits[5, 3] = math.inf
    allowed: list[set[int] | None] = [None, None, None, set(), {5}, None]
    for s in (GREEDY, Sampling(seed=5, top_p=0.9), Sampling(top_k=3, logprobs=1)):
        result = sample(logits, [plain(s)] * 6, mask_of(allowed, 10))
        assert result.empty == [1, 2, 3, 5]
        assert [result.tokens[i] for i in result.empty] == [-1] * 4
        assert result.tokens[0] == sample(logits[:1], [plain(s)], None).tokens[0]
        assert result.tokens[4] == 5
        assert [entry is None for entry in result.logprobs] == [
            s.logprobs < 0 or i in result.empty for i in range(6)
        ]


def test_min_tokens_hides_the_stop_ids_until_they_may_come_and_the_grammar_goes_first():
    logits = torch.tensor([LOGITS] * 3)
    s = msgspec.structs.replace(GREEDY, min_tokens=2)
    rows = [plain(s, generated, stop_ids=[3, 6, 99]) for generated in range(3)]
    assert sample(logits, rows, None).tokens == [0, 0, 3]
    assert sample(logits, rows, mask_of([{6}, {6, 9}, {6, 9}], 10)).tokens == [6, 9, 6]


def test_greedy_ties_go_to_the_lowest_id_on_every_path():
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for s in (GREEDY, msgspec.structs.replace(GREEDY, bias=((0, 1.0),))):
            assert sample(logits.to(dtype), [plain(s)], None).tokens == [1]


def test_the_smallest_temperature_is_greedy_without_overflow():
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([LOGITS], dtype=dtype)
        cold = Sampling(temperature=1e-320, top_p=0.5, min_p=0.1, top_k=4)
        assert sample(logits, [plain(cold)], None).tokens == [3]


def test_plain_greedy_rows_are_neither_copied_nor_processed(monkeypatch):
    monkeypatch.setattr(module, "_draw", None)
    logits = torch.tensor([LOGITS] * 2)
    rows = [plain(msgspec.structs.replace(GREEDY, logprobs=0)), plain(GREEDY)]
    assert sample(logits, rows, None).tokens == [3, 3]
    assert sample(logits, rows, torch.full((2, 1), -1, dtype=torch.int32)).tokens == [3, 3]
    assert sample(logits[:0], [], None).tokens == []


def test_logprobs_are_those_of_the_raw_logits_whatever_is_done_to_them():
    raw = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(-1)
    s = Sampling(temperature=0.2, top_k=1, bias=((1, 50.0),), repetition=2.0, logprobs=3)
    rows = [plain(msgspec.structs.replace(s, logprobs=n), history=History([3])) for n in (3, 0, 50)]
    logits = torch.tensor([LOGITS] * 3, dtype=torch.float64)
    three, none, all_of_them = sample(logits, rows, mask_of([{1, 2}] * 3, 10)).logprobs
    assert three and none and all_of_them
    assert three.logprob == none.logprob == float(raw[1])
    assert three.top == [(token, float(raw[token])) for token in (3, 6, 0)]
    assert none.top == [] and len(all_of_them.top) == 10


def test_equal_logprobs_are_listed_by_id():
    tied = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    entry = sample(tied, [plain(msgspec.structs.replace(GREEDY, logprobs=3))], None).logprobs[0]
    assert entry and [token for token, _ in entry.top] == [1, 3, 0]


def test_a_history_counts_output_and_only_remembers_the_prompt():
    seen = history([5, 5, 7], [7, 9, 9])
    ids, counts = seen.tensors(torch.device("cpu"))
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {5: 0, 7: 1, 9: 2}
    assert [seen.count(token) for token in (5, 7, 9, 11)] == [0, 1, 2, 0]


def test_seeds_use_all_64_bits_signed_or_not():
    logits = torch.zeros(1, 50_000)
    tokens = [
        sample(logits, [plain(Sampling(seed=seed))], None).tokens[0]
        for seed in (1, 1 + 2**32, 1 + 2**63, 1 - 2**63)
    ]
    assert len(set(tokens[:3])) == 3
    assert tokens[2] == tokens[3]


def test_a_row_with_few_tokens_left_is_drawn_as_if_it_had_noise_everywhere(monkeypatch):
    import engine.sampling as sampling

    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    kinds = [Sampling(top_p=0.6), Sampling(top_k=30), Sampling(min_p=0.2), Sampling()]
    rows = [
        SampleRow(msgspec.structs.replace(kinds[i % 4], seed=i), 10 + i, i % 3, 0, [], None, ())
        for i in range(40)
    ]
    quick = sample(logits * 3, rows, None).tokens
    monkeypatch.setattr(sampling, "FEW", 1 << 30)
    assert sample(logits * 3, rows, None).tokens == quick
