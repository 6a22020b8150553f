"""The acceptance rule: every kind of end at every place, and drafted = not drafted by equality."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from engine import sampling as sampling_module
from engine.accept import Accepted, End, accept
from engine.messages import Sampling, TokenLogprobs
from engine.sampling import History, SampleRow, needs_history, sample

VOCAB = 40
STOPS = [7, 11]


@pytest.fixture(autouse=True)
def threads():
    """One: tensors this small are slower on several, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Script:
    """A grammar that refuses some ids and is finished behind a certain number of tokens."""

    refused: tuple[int, ...] = ()
    length: int = 100
    accepting: bool = False
    ends: tuple[int, ...] = ()  # its stop ids
    seen: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.seen) >= self.length

    def allows(self, token: int) -> bool:
        assert token >= 0
        return self.accepting if token in self.ends else token not in self.refused

    def accept(self, token: int) -> bool:
        if token in self.refused:
            return False
        self.seen.append(token)
        return True


def test_the_walk_follows_the_draft_to_the_first_miss():
    end = End(remaining=9)
    assert accept([5], [], end) == Accepted([5], 0, "", False)
    assert accept([1, 2, 3, 4], [1, 2, 3], end) == Accepted([1, 2, 3, 4], 3, "", False)
    assert accept([1, 2, 3, 4], [1, 9, 3], end) == Accepted([1, 2], 1, "", False)
    assert accept([1, 2, 3, 4], [9, 2, 3], end) == Accepted([1], 0, "", False)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_each_kind_of_end_at_each_place_cuts_the_run(right, place):
    sampled = [1, 2, 3, 4]
    draft = [*sampled[:right], 99, 99, 99][:3]
    reached = place <= right
    kept = sampled[: min(place, right) + 1]
    matched = min(right, len(kept))

    def check(end: End, finish: str, stopped: bool) -> None:
        ending = (finish, stopped) if reached else ("", False)
        assert accept(sampled, draft, end) == Accepted(kept, matched, *ending)

    check(End(100, stop_ids={sampled[place]}), "stop", True)
    check(End(place + 1), "length", False)
    check(End(100, grammar=Script(length=place + 1)), "stop", False)


def test_a_stop_id_and_a_grammar_end_win_over_length():
    assert accept([1, 7, 3], [1, 7], End(2, stop_ids=[7])) == Accepted([1, 7], 2, "stop", True)
    grammar = Script(length=2)
    assert accept([1, 7, 3], [1, 7], End(2, (), grammar)) == Accepted([1, 7], 2, "stop", False)


def test_the_grammar_moves_over_exactly_the_kept_tokens_that_are_no_stop_id():
    for end, seen in [(9, [1, 2]), (1, [1])]:
        grammar = Script()
        accept([1, 2, 3, 4], [1, 8, 3], End(end, grammar=grammar))
        assert grammar.seen == seen
    grammar = Script()
    accept([1, 2, 3], [1, 2], End(9, stop_ids=[2], grammar=grammar))
    assert grammar.seen == [1]


def test_a_refused_or_missing_token_ends_with_an_error_only_when_the_walk_gets_there():
    end = End(9, grammar=Script(refused=(2,)))
    assert accept([1, 2, 3], [1, 2], end) == Accepted([1], 1, "error", False)
    assert accept([1, -1, 3], [1, 2], End(9)) == Accepted([1], 1, "error", False)
    assert accept([-1], [], End(9)) == Accepted([], 0, "error", False)
    assert accept([1, -1, -1], [4, 2], End(9)) == Accepted([1], 0, "", False)

def test_a_row_without_a_mask_that_drew_what_is_not_legal_is_to_be_drawn_again():
    """Behind the first token only: that one always had a mask, so there it is an error."""
    for refused, stop_ids in (((2,), ()), ((), (2,))):  # a stop id where the output may not end
        def end(lean: bool, refused=refused, stop_ids=stop_ids) -> End:
            return End(9, stop_ids, Script(refused, ends=stop_ids), lean=lean)

        assert accept([1, 2, 3], [1, 2], end(True)) == Accepted([1], 1, "", False, undrawn=True)
        assert accept([1, 2], [1], end(True)) == Accepted([1], 1, "", False, undrawn=True)
        other = "stop" if stop_ids else "error"
        assert accept([1, 2], [1], end(False)).finish == other
        assert accept([2, 3], [2], end(True)).finish == other
    assert accept([1, -1], [1], End(9, grammar=Script(), lean=True)).finish == "error"
    fine = End(9, [2], Script(accepting=True, ends=(2,)), lean=True)
    assert accept([1, 2], [1], fine) == Accepted([1, 2], 1, "stop", True)
    # A stop id of the request alone is a token like any other to the grammar.
    foreign = End(9, [2], Script((2,), accepting=True), lean=True)
    assert accept([1, 2], [1], foreign).undrawn


def test_our_own_mistakes_are_named():
    with pytest.raises(AssertionError, match="2 sampled for 2 drafts"):
        accept([1, 2], [1, 2], End(9))
    with pytest.raises(AssertionError, match="without tokens left"):
        accept([1], [], End(0))


# A model of random tables: what comes next depends on the last three tokens, in fp64.
TABLE = torch.randn(211, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(6)) * 2


@dataclass
class Toy:
    """A grammar of random tables: the number of tokens and the last one say what is legal."""

    seed: int
    length: int
    used: int = 0
    last: int = 0

    def allowed(self) -> set[int]:
        if self.used >= self.length - 1:
            return {*STOPS, 1, 2}
        rng = random.Random(self.seed * 1_000_003 + self.used * 1009 + self.last)
        return set(rng.sample(range(VOCAB), 12))

    @property
    def finished(self) -> bool:
        return self.used >= self.length

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.used, self.last = self.used + 1, token
        return True


@dataclass
class Choice:
    """One running choice of a request."""

    prompt: list[int]
    sampling: Sampling
    budget: int
    index: int
    grammar: Toy | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""
    stopped: bool = False
    matched: int = 0
    steps: int = 0

    @property
    def story(self) -> tuple[object, ...]:
        return self.tokens, self.finish, self.stopped, self.logprobs


Drafter = Callable[[int, Choice], list[int]]


def requests(count: int, seed: int) -> list[Choice]:
    """Choices with every feature on or off at random."""
    rng = random.Random(seed)

    def often(value, off):
        return value if rng.random() < 0.5 else off

    return [
        Choice(
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))],
            Sampling(
                temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
                top_p=often(0.9, 1.0),
                top_k=often(12, 0),
                min_p=often(0.02, 0.0),
                seed=rng.randrange(2**64),
                repetition=often(1.3, 1.0),
                frequency=often(0.4, 0.0),
                presence=often(0.3, 0.0),
                bias=often(((3, 1.5), (5, -2.0), (STOPS[0], 1.0)), ()),
                min_tokens=often(rng.randrange(9), 0),
                logprobs=often(2, -1),
            ),
            rng.randrange(1, 18),
            rng.randrange(3),
            often(Toy(rng.randrange(99), rng.randrange(4, 14)), None),
        )
        for _ in range(count)
    ]


def words(allowed: set[int] | None) -> list[int]:
    """One row's mask as int32 words."""
    bits = sum(1 << t for t in (range(64) if allowed is None else allowed))
    return [(bits >> 32 * i & 0xFFFFFFFF ^ 2**31) - 2**31 for i in range(2)]


def rows_of(choice: Choice, draft: list[int]) -> tuple[list[SampleRow], list[list[int]], list[int]]:
    """Sample rows, mask rows and table rows of the places behind each draft token."""
    seen = None
    if needs_history(choice.sampling):
        seen = History(choice.prompt)
        for token in choice.tokens:
            seen.add(token)
    grammar = replace(choice.grammar) if choice.grammar else None
    rows, masks, contexts = [], [], []
    text = [*choice.prompt, *choice.tokens]
    legal = True
    for k in range(len(draft) + 1):
        made = len(choice.tokens) + k
        rows.append(
            SampleRow(choice.sampling, len(text), choice.index, made, STOPS, seen, draft[:k])
        )
        # Behind an illegal draft token nothing is legal: such a row must never matter.
        masks.append(words((grammar.allowed() if legal else set()) if grammar else None))
        contexts.append(sum(t * w for t, w in zip(text[-3:], (31, 7, 101), strict=False)) % 211)
        if k < len(draft):
            text.append(draft[k])
            legal = legal and (grammar is None or grammar.accept(draft[k]))
    return rows, masks, contexts


def run(choices: list[Choice], drafter: Drafter) -> list[Choice]:
    """All choices to their ends, in one batch that shrinks."""
    while open_ones := [i for i, choice in enumerate(choices) if not choice.finish]:
        drafts = {i: drafter(i, choices[i]) for i in open_ones}
        packs = [rows_of(choices[i], drafts[i]) for i in open_ones]
        rows, masks, contexts = ([x for pack in packs for x in pack[part]] for part in range(3))
        result = sample(TABLE[contexts], rows, torch.tensor(masks, dtype=torch.int32))
        start = 0
        for i in open_ones:
            stop = start + len(drafts[i]) + 1
            commit(choices[i], drafts[i], result.tokens[start:stop], result.logprobs[start:stop])
            start = stop
    return choices


def commit(choice: Choice, draft: list[int], drawn: list[int], logprobs: list) -> None:
    end = End(choice.budget - len(choice.tokens), frozenset(STOPS), choice.grammar)
    accepted = accept(drawn, draft, end)
    choice.tokens += accepted.tokens
    if choice.sampling.logprobs >= 0:
        choice.logprobs += logprobs[: len(accepted.tokens)]
    choice.finish, choice.stopped = accepted.finish, accepted.stopped
    choice.matched += accepted.matched
    choice.steps += 1


def nothing(_: int, __: Choice) -> list[int]:
    return []


def oracle(truth: list[Choice], length: int = 5) -> Drafter:
    """The right tokens, and garbage behind the end."""
    return lambda i, choice: [*truth[i].tokens, 1, 2, 3, 4, 5][len(choice.tokens) :][:length]


def adversary(truth: list[Choice]) -> Drafter:
    """Right up to a place that moves, then something wrong that looks like an end."""

    def draft(i: int, choice: Choice) -> list[int]:
        right = oracle(truth)(i, choice)
        place = (i + len(choice.tokens)) % 4
        return [*right[:place], STOPS[i % 2], *right[place:]]

    return draft


def noise(seed: int) -> Drafter:
    """Random tokens, a random number of them."""
    rng = random.Random(seed)
    return lambda _, __: [rng.randrange(VOCAB) for _ in range(rng.randrange(9))]


CASES = 150


@pytest.fixture(scope="module")
def truth() -> list[Choice]:
    return run(requests(CASES, 1), nothing)


def stories(choices: list[Choice]) -> list[tuple[object, ...]]:
    return [choice.story for choice in choices]


def test_the_cases_reach_every_end(truth):
    assert {choice.finish for choice in truth} == {"stop", "length"}
    assert {choice.stopped for choice in truth if choice.finish == "stop"} == {True, False}


def test_any_draft_gives_the_output_of_none(truth):
    for drafter in (noise(4), oracle(truth, 1), oracle(truth), adversary(truth)):
        drafted = run(requests(CASES, 1), drafter)
        assert stories(drafted) == stories(truth)


def test_a_perfect_draft_is_wholly_accepted_and_saves_steps(truth):
    drafted = run(requests(CASES, 1), oracle(truth, 4))
    for choice in drafted:
        assert choice.steps == -(-len(choice.tokens) // 5)
        assert choice.matched >= len(choice.tokens) - choice.steps


def test_a_choice_alone_gives_what_it_gives_in_the_batch(truth):
    for i in range(0, CASES, 10):
        (alone,) = run(requests(CASES, 1)[i : i + 1], noise(i))
        assert alone.story == truth[i].story


def shifted_masks(honest):
    return lambda x, masks: honest(x, masks.roll(1, 0))


def one_key_for_all(honest):
    return lambda seeds, choices, positions, vocab, dtype: honest(
        seeds, choices, torch.full_like(positions, int(positions[0])), vocab, dtype
    )


def blind_history(honest):
    return lambda x, row, *rest: honest(x, replace(row, drafted=()), *rest)


@pytest.mark.parametrize(
    ("name", "mutation"),
    [("_mask", shifted_masks), ("gumbel", one_key_for_all), ("_penalise", blind_history)],
)
def test_the_comparison_notices_a_wrong_mask_noise_or_history_row(name, mutation, monkeypatch):
    # One choice at a time: without drafts a batch of one row is right even when rows are mixed up.
    honest = [run([choice], nothing)[0] for choice in requests(12, 2)]
    assert stories(run(requests(12, 2), oracle(honest))) == stories(honest)
    monkeypatch.setattr(sampling_module, name, mutation(getattr(sampling_module, name)))
    assert stories([run([choice], nothing)[0] for choice in requests(12, 2)]) == stories(honest)
    wrong = [
        run([c], lambda _, c, i=i: oracle(honest)(i, c))[0] for i, c in enumerate(requests(12, 2))
    ]
    assert stories(wrong) != stories(honest)
