"""Known bugs, continued: what a sequence holds between steps, and what an answer tells.

The list is in test_known_bugs.py: matchers, preemption, lengths that change, aborts, logprobs,
tenants.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.grammar.masks import Masks
from engine.messages import Abort, Grammar, Sampling, Submit
from engine.proposer import FREE
from tests.driver import Run, answers, make
from tests.exact import DRAWS, JSON, requests
from tests.heads import Watched, eagle_of, one_thread
from tests.proposers import Eager
from tests.scripted import EOS
from tests.tiny import write_llama
from tests.watching import KINDS, drafting

alone = pytest.fixture(autouse=True, scope="module")(one_thread)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("known") / "model", max_len=512)


@pytest.fixture(scope="module")
def truth(folder):
    """One request at a time, no cache, no drafts, whole prompts: what all others must equal."""
    engine = make(folder, prefix_caching=False, max_batch_tokens=4096)
    known: dict[bytes, Run] = {}

    def ask(submit: Submit) -> Run:
        key = msgspec.msgpack.encode(submit)
        if key not in known:
            known[key] = Run(engine).put(submit).drain()
        return known[key]

    return ask


def expected(truth, asks: list[Submit]) -> dict:
    return {key: text for one in asks for key, text in truth(one).tokens.items()}


def prompt(count: int, seed: int = 3) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(count)]


# ---- 12: matchers -------------------------------------------------------------------------------

CALLS = Grammar(f'start: TEXT | head body\nTEXT: /(.|\\n)*/\nhead[lazy]: /(.|\\n)*/ "<"\nbody: '
                f"%json {JSON.partition('%json ')[2]}", "tools", "<")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grammar", ["json", "choice", "tight", "lazy"])
def test_after_each_step_a_matcher_stands_where_a_fresh_one_would(
    folder, truth, kind, grammar
):
    asks = requests("hot", "json" if grammar == "lazy" else grammar, 2)
    if grammar == "lazy":
        hot = msgspec.structs.replace(DRAWS["hot"], bias=((ord("<"), 6.0),))
        asks = [msgspec.structs.replace(one, grammar=CALLS, sampling=hot) for one in asks]
    asks[1:3] = [msgspec.structs.replace(one, overflow="cut") for one in asks[1:3]]  # no plan
    texts = expected(truth, asks)
    engine = drafting(folder, kind, asks, texts, depth=0 if kind in ("eagle3", "both") else 1)
    checked = []

    def mask(state):
        return Masks(259, 1).fill([(0, state, ())], 1).tolist()

    def look(engine, _):
        for seq in engine.scheduler.running:
            said = seq.tokens[seq.prompt_len :]
            fresh = engine._compiler.cached(seq.submit.grammar).start()
            assert fresh.accept_all(said) == len(said) == seq.grammar.steps
            assert mask(seq.grammar) == mask(fresh)
            for name in ("finished", "accepting", "broken", "lexical"):
                assert getattr(seq.grammar, name) == getattr(fresh, name), name
            assert seq.grammar.prose_keys([]) == fresh.prose_keys([])
            assert seq.grammar.valid_prefix(seq.draft) == len(seq.draft)
            checked.append(len(said))

    assert answers(engine, *asks, disturb=look) == texts
    assert len(checked) > 30 and max(checked) > 20
    assert engine.guessing.accepted > 10 or kind == "random"


# ---- 14, 22, 28: preemption, lengths, aborts ----------------------------------------------------


@pytest.mark.parametrize("kind", ["hybrid", "both"])
def test_a_preemption_at_each_step_leaves_the_answers(folder, truth, kind):
    """All that run lose their blocks, once or twice in a row: amid a prompt, before a copy, with a
    draft that waits, behind a replaced token."""
    asks = [*requests("hot", "tight", 2)[:2], requests("penalised", "free", 2)[2]]
    texts = expected(truth, asks)
    found: set[str] = set()
    steps = 0
    while True:
        engine = drafting(folder, kind, asks, texts, max_batch_tokens=64,
                          depth=int(kind == "hybrid"), max_sequences=8)  # fmt: skip
        last = [0]

        def disturb(engine, number, steps=steps, last=last):
            last[0] = number
            if number not in (steps, steps + 1 + steps % 2):
                return
            for seq in list(engine.scheduler.running):
                found.add("draft" if seq.draft else "prompt" if seq.want > 1 else "newest")
                if seq.replaced:
                    found.add("replaced")
                if engine.scheduler._copies:
                    found.add("copy")
                engine.scheduler.preempt(seq)

        assert answers(engine, *asks, disturb=disturb) == texts, steps
        if steps > last[0]:
            break
        steps += 1
    assert steps > 15 and found == {"draft", "prompt", "newest", "replaced", "copy"}


class Moody(Eager):
    """What it believes of rows changes with every step: now they are free, now beyond all price.

    Whether the next step waits for it changes as often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chance, self.lengths = random.Random(4), set()

    def propose(self, turns, beside=0):
        row = self.chance.choice([1e-9, 0.2, 0.8, 1e9])
        for ahead in self._ahead:
            ahead.alone._row = row
        found = super().propose(turns, beside)
        self.lengths |= {len(draft.tokens) for draft in found}
        return found

    def ahead(self, load, most):
        return self.chance.choice([FREE, super().ahead(load, most)])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("grammar", ["free", "json"])
def test_a_length_that_changes_with_every_step_changes_no_answer(folder, truth, grammar, depth):
    asks = requests("hot", grammar, 2)
    engine = make(folder, drafts=Moody(), max_drafts=8, depth=depth)
    for turn in range(2):
        again = [msgspec.structs.replace(one, session=b"s" * 16) for one in asks]
        assert answers(engine, *again) == expected(truth, asks), turn
    assert 0 in engine.guessing.host.lengths and len(engine.guessing.host.lengths) > 3


def test_a_head_drafts_behind_steps_without_drafts_as_if_there_were_none(folder):
    """Its KV is extended in those, too."""
    asks = [Submit("a", prompt(150), 60, Sampling(seed=1)),
            Submit("b", prompt(90, 5), 60, Sampling(temperature=0.0, seed=2))]  # fmt: skip
    seen = []
    for moody in (False, True):
        head, chance = Watched(eagle_of()), random.Random(6)
        engine = make(folder, head=head, max_drafts=4)

        def change(engine, number, moody=moody, chance=chance):
            if moody:
                engine.runner.max_drafts = chance.choice([0, 0, 1, 2, 4])

        texts = answers(engine, *asks, disturb=change)
        seen.append((texts, head.chains))
    (calm, whole), (other, cut) = seen
    assert calm == other
    both = whole.keys() & cut.keys()
    assert len(both) > 40
    assert all(cut[key] == whole[key][: len(cut[key])] for key in both)
    assert {len(chain) for chain in cut.values()} == {1, 2, 4}


@pytest.mark.parametrize("kind", ["hybrid", "both"])
def test_random_aborts_amid_drafts_leave_the_pool_full(folder, kind):
    engine = drafting(folder, kind, [], {}, 3, blocks=24, max_batch_tokens=96, mixed_tokens=32,
                      max_sequences=6, depth=int(kind == "hybrid"))  # fmt: skip
    chance, run, alive, number = random.Random(3), Run(engine), [], 0
    for _ in range(300):
        while len(alive) < 12:
            number += 1
            alive.append(f"q{number}")
            run.put(Submit(
                alive[-1], prompt(chance.randint(1, 300), chance.randrange(5)),
                chance.randint(1, 40), Sampling(seed=number), n=chance.choice([1, 2, 3]),
                stop_ids=[EOS], predicted=prompt(20), session=chance.choice([None, b"s" * 16]),
                grammar=chance.choice([None, None, Grammar(JSON)]),
            ))  # fmt: skip
        for _ in range(chance.randint(0, 6)):
            run.put(Abort(alive.pop(chance.randrange(len(alive))), chance.choice([-1, -1, 0])))
        run.step()
    for name in range(1, number + 1):
        run.put(Abort(f"q{name}"))
    run.drain()
    assert number > 700 and engine.guessing.drafted > 100
    assert engine.pool.used == 0 and not engine.intake.arrived
    assert engine.pool.free_count + engine.pool.cached == engine.pool.total
    host = engine.guessing.host
    assert not host._suffix._choices and not host._suffix._requests


# ---- 19, 35: logprobs, tenants ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grammar", ["free", "json", "tight"])
def test_logprobs_are_those_without_drafts_beside_requests_that_want_none(
    folder, truth, kind, grammar
):
    asks = [
        msgspec.structs.replace(
            one, sampling=msgspec.structs.replace(one.sampling, logprobs=[3, -1, 0, 5][i])
        )
        for i, one in enumerate(requests("top", grammar, 2))
    ]
    texts = expected(truth, asks)
    engine = drafting(folder, kind, asks, texts)
    run = Run(engine).put(*asks).drain()
    assert run.tokens == texts
    for one in asks:
        for index in range(2):
            key = one.id, index
            (found, wanted) = (
                [entry for out in outs[key] for entry in out.logprobs]
                for outs in (run.outs, truth(one).outs)
            )
            assert len(found) == len(wanted) == len(texts[key]) * (one.sampling.logprobs >= 0)
            for ours, right in zip(found, wanted, strict=True):
                assert ours.logprob == pytest.approx(right.logprob, abs=1e-9)
                assert [id for id, _ in ours.top] == [id for id, _ in right.top]
                assert len(ours.top) == one.sampling.logprobs


class Told(Eager):
    """Notes what it drafts, by request."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: dict[str, list[list[int]]] = {}

    def propose(self, turns, beside=0):
        found = super().propose(turns, beside)
        for turn, draft in zip(turns, found, strict=True):
            self.drafts.setdefault(turn.key[0], []).append(draft.tokens)
        return found


def test_another_tenant_with_the_same_session_gets_no_word_of_it(folder):
    """Neither blocks nor drafts: they are those of an engine to which nobody had spoken."""
    said = Submit("said", prompt(70), 40, Sampling(seed=3), session=b"k" * 16, namespace=b"one")
    spies = [msgspec.structs.replace(said, id=name, namespace=name.encode())
             for name in ("two", "one")]  # fmt: skip
    used, fresh = (make(folder, drafts=Told(), max_drafts=8) for _ in range(2))
    text = answers(used, said)["said", 0]
    answers(fresh, spies[0])
    cached = []
    for spy in spies:
        run = Run(used).put(spy).drain()
        assert run.tokens[spy.id, 0] == text
        cached.append(run.outs[spy.id, 0][-1].cached)
    assert cached == [0, 64]
    told = used.guessing.host.drafts
    assert told["two"] == fresh.guessing.host.drafts["two"]
    assert text[1:9] in told["one"] and text[1:9] not in told["two"]
