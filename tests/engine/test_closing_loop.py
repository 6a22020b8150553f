"""Closing plans in the loop: what max_tokens would cut is whole, however the engine runs it.

The planner itself is tests/engine/test_closing.py's.  fp64 on the CPU's runner; one token a byte.
"""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
import torch
from msgspec.structs import replace

from engine.messages import UNLIKELY, Admitted, Grammar, Out, Sampling, Step, Submit
from engine.scheduler import Scheduler
from tests.driver import Run, make
from tests.proposers import AdversarialDrafts, ForcedDrafts, OracleDrafts, RandomDrafts, RandomHead
from tests.scripted import EOS
from tests.tiny import write_llama

VOCAB = 259
GREEDY = Sampling(temperature=0.0)
HOT = Sampling(temperature=1.0, seed=3)
DRAWS = [
    GREEDY,
    HOT,
    Sampling(temperature=0.7, repetition=1.2, frequency=0.4, presence=0.3, seed=5),
    Sampling(temperature=0.9, bias=((EOS, 4.0), (ord("<"), 3.0)), min_tokens=6, seed=6),
]
SCHEMA = {  # behind the end of `city` the model has choices of one length
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "day": {"enum": ["mo", "tu", "we"]},
        "days": {"type": "array", "items": {"enum": ["mo", "tu"]}},
        "n": {"type": "integer"},
    },
    "required": ["city", "day"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar(f"start: %json {json.dumps(SCHEMA)}", "response_format")
SHORTEST = len('{"city":"","day":"mo"}')
BEGIN, END = "<t>", "\n</t>"  # no JSON string holds a raw newline
CALL = len(BEGIN) + SHORTEST + len(END)


def tools(choice: str, more: bool) -> Grammar:
    """Calls from the first token on, or free text that may turn into calls."""
    body = f"body: %json {json.dumps(SCHEMA)} {json.dumps(END)}"
    again = f'("\\n" {json.dumps(BEGIN)} body)*' if more else ""
    if choice == "required":
        return Grammar(f"start: {json.dumps(BEGIN)} body {again}\n{body}")
    text = "/(.|\\n)*/"
    lines = f"start: TEXT | head body {again}\nTEXT: {text}\nhead[lazy]: {text} "
    return Grammar(f"{lines}{json.dumps(BEGIN)}\n{body}", "tools", BEGIN)


GRAMMARS = {
    "json": JSON, "required": tools("required", True), "named": tools("required", False),
    "auto": tools("auto", True), "one": tools("auto", False),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("closing") / "model", max_len=512)


@pytest.fixture(scope="module")
def plain(folder):
    """One request at a time, nothing drafted: what every other way must equal."""
    engine = make(folder, prefix_caching=False)
    known = {}

    def ask(submit: Submit) -> Run:
        key = repr(submit)
        if key not in known:
            known[key] = Run(engine).put(submit).drain()
        return known[key]

    return ask


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


def toward(text: str, strength: float = 40.0) -> tuple[tuple[int, float], ...]:
    """A bias to the letters of a text."""
    return tuple((byte, strength) for byte in sorted(set(text.encode())))


def said(run: Run, key: tuple[str, int]) -> tuple[bytes, Out]:
    """The text of a choice, and its last out."""
    last = run.outs[key][-1]
    tokens = run.tokens[key]
    return bytes(tokens[: len(tokens) - last.stopped]), last


def valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def calls(raw: bytes) -> int:
    """How many calls a text holds, each whole and valid; asserts that none is open."""
    _, *found = re.split(BEGIN, raw.decode("utf-8", "replace"), maxsplit=1)
    pieces = re.split(f"{END}(?:\n{BEGIN})?", found[0]) if found else [""]
    assert not pieces[-1].strip(), raw
    for arguments in pieces[:-1]:
        valid(arguments)
    return len(pieces) - 1


# ---- every budget --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draw", range(len(DRAWS)))
def test_an_answer_with_a_schema_is_whole_at_every_budget_or_was_not_begun(folder, draw, depth):
    engine = make(folder, depth=depth)
    run = Run(engine)
    asks = [
        Submit(f"r{most}", prompt(20, most), most, DRAWS[draw], stop_ids=[EOS], grammar=JSON)
        for most in range(1, 41)
    ]
    run.put(*asks).drain()
    assert not run.failed and not run.refused
    closed = 0
    for ask in asks:
        raw, last = said(run, (ask.id, 0))
        assert len(run.tokens[ask.id, 0]) <= ask.max_tokens
        if ask.max_tokens < SHORTEST:
            assert (raw, last.finish, last.overflow) == (b"", "length", "unopened")
            continue
        valid(raw.decode())
        assert (last.finish == "length") == (last.overflow == "closed")
        closed += last.overflow == "closed"
    stats = engine.stats()
    assert stats.closing_refusals == SHORTEST - 1
    assert closed == stats.closed_early > 10 and stats.closing_tokens >= closed
    assert engine.pool.used == 0 and not engine.intake.arrived


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("choice", ["required", "named", "auto", "one"])
def test_a_call_is_whole_at_every_budget_or_was_not_opened(folder, choice, depth):
    engine = make(folder, depth=depth)
    run = Run(engine)
    draws = [
        Sampling(temperature=1.0, seed=seed, bias=toward(letters))
        for seed, letters in enumerate(["<t>", '<t>{"city":', '{}"city<t>/\n'])
    ]
    asks = [
        Submit(f"r{most}-{i}", prompt(9, most), most, draw, stop_ids=[EOS],
               grammar=GRAMMARS[choice])
        for most in range(1, 81, 3)
        for i, draw in enumerate(draws)
    ]
    run.put(*asks).drain()
    assert not run.failed and not run.refused
    ends = {"": 0, "closed": 0, "unopened": 0}
    several = 0
    for ask in asks:
        raw, last = said(run, (ask.id, 0))
        assert len(run.tokens[ask.id, 0]) <= ask.max_tokens
        found = calls(raw)
        ends[last.overflow] += 1
        several += found > 1
        if choice in ("required", "named"):
            assert bool(found) == (ask.max_tokens >= CALL)
        assert last.finish == "length" or not last.overflow
        assert found or last.overflow != "closed"
    assert ends["closed"] > 2 and ends["unopened"] > 2
    assert (several > 2) == (choice == "required")
    assert engine.pool.used == 0


# ---- every way to run it -------------------------------------------------------------------------


def tight(grammar: str, n: int = 1) -> list[Submit]:
    """Requests of one grammar whose budgets leave little or much over its shortest output."""
    least = SHORTEST if grammar == "json" else CALL
    shared = prompt(70, 7)
    draws = DRAWS
    if grammar in ("auto", "one"):  # random weights would never open a call
        bias = toward(BEGIN, 9.0)
        draws = [replace(draw, bias=bias, temperature=0.9) for draw in DRAWS]
    return [
        Submit(
            f"c{i}", [*shared[: 70 * (i % 2)], *prompt(3 + i, i)], least + slack, draws[i % 4],
            n=n, stop_ids=[EOS], grammar=GRAMMARS[grammar],
        )
        for i, slack in enumerate([-9, 0, 1, 5, 9, 17, 30, 60])
    ]


def ends(run: Run) -> dict[tuple[str, int], tuple[list[int], str, str, bool]]:
    """All that must be equal of two runs."""
    found = {}
    for key, outs in run.outs.items():
        last = outs[-1]
        found[key] = run.tokens[key], last.finish, last.overflow, last.stopped
    return found


def truth(plain, asks: list[Submit]) -> dict:
    return {key: end for ask in asks for key, end in ends(plain(ask)).items()}


def preempt_some(engine, number):
    running = engine.scheduler.running
    if running and number % 3 == 2:
        engine.scheduler.preempt(running[number % len(running)])


def proposer(kind: str, expected: dict):
    known = {key: end[0] for key, end in expected.items()}
    match kind:
        case "random":
            return RandomDrafts(VOCAB, 1)
        case "oracle":
            return OracleDrafts(known, 2)
        case "adversarial":
            return AdversarialDrafts(known, VOCAB, EOS, 3)
        case "forced":
            return ForcedDrafts()
    return None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["json", "required", "auto"])
@pytest.mark.parametrize("drafts, k", [
    ("random", 3), ("oracle", 1), ("oracle", 4), ("oracle", 8), ("adversarial", 2),
    ("adversarial", 7), ("forced", 5), ("head", 3),
])  # fmt: skip
def test_drafts_of_any_kind_change_neither_the_text_nor_its_end(folder, plain, drafts, k, kind, n):
    asks = tight(kind, n)
    expected = truth(plain, asks)
    head = RandomHead(64, VOCAB, (0, 1)) if drafts == "head" else None
    engine = make(folder, drafts=proposer(drafts, expected), head=head, max_drafts=k)
    run = Run(engine).put(*asks).drain()
    assert ends(run) == expected and not run.failed
    assert engine.stats().closing_tokens > 0
    if drafts == "oracle":
        assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", list(GRAMMARS))
@pytest.mark.parametrize("depth", [0, 1])
def test_neighbours_chunks_and_preemption_change_neither(folder, plain, kind, n, depth):
    asks = tight(kind, n)
    expected = truth(plain, asks)
    engine = make(folder, depth=depth, blocks=11, max_batch_tokens=40, mixed_tokens=11)
    run = Run(engine).put(*asks).drain(disturb=preempt_some if depth == 0 else None)
    assert ends(run) == expected and not run.failed
    assert engine.stats().closing_tokens > 0
    assert engine.pool.used == 0 and not engine.runner._last
    assert (engine.scheduler.wasted if depth else engine.stats().preemptions) > 0


@pytest.mark.parametrize("kind", ["json", "required", "auto"])
def test_one_that_is_preempted_while_a_row_flies_in_vain_for_it_goes_on_as_if_it_had_not(
    folder, plain, kind
):
    """Its block has another owner when that row is planned to write there."""
    asks = tight(kind, 3)
    expected = truth(plain, asks)
    engine = make(folder, depth=1, max_batch_tokens=64)
    run = Run(engine).put(*asks)
    preempted = 0
    while engine.busy or engine.intake.compiling or not engine.inbox.empty():
        run.step()
        for seq in list(engine.scheduler.running):
            if not seq.flying and seq.replaced and engine._out:
                engine.scheduler.preempt(seq)
                preempted += 1
    assert preempted > 3 and ends(run) == expected


@pytest.mark.parametrize("phase", ["logits", "forward"])
def test_a_step_without_room_that_holds_a_row_in_vain_loses_nothing(
    folder, plain, phase, monkeypatch
):
    asks = tight("required")
    expected = truth(plain, asks)
    engine = make(folder, depth=1)
    model, real = engine.runner.model, getattr(engine.runner.model, phase)
    vain = []

    def full(*args):
        rows = [row for flight in engine.runner._flights for row in flight.plan.rows]
        if any(row.vain for row in rows) and len(vain) < 4 and len(rows) > 1:
            vain.append(rows)
            raise torch.OutOfMemoryError("full")
        return real(*args)

    cancel = Scheduler.cancel

    def cancelled(self, plan):
        cancel(self, plan)
        assert all(row.seq.flying >= 0 <= row.seq.pending for row in plan.rows)

    setattr(model, phase, full)
    monkeypatch.setattr(Scheduler, "cancel", cancelled)
    run = Run(engine).put(*asks).drain()
    assert len(vain) == 4 and ends(run) == expected and engine.pool.used == 0


def test_plans_that_were_made_before_do_not_change_what_comes_out(folder, plain):
    asks = tight("required")
    expected = truth(plain, asks)
    engine = make(folder)
    for turn in (asks, asks[::-1]):
        assert ends(Run(engine).put(*turn).drain()) == expected


# ---- what goes along with the tokens -------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_plans_token_has_its_own_logprob_when_its_row_tells_it_and_openais_mark_else(
    folder, plain, depth
):
    """The row's best tokens are told, not the one that it had drawn."""
    drawn = {}
    for best in (20, 0):
        draw = Sampling(seed=8, logprobs=best)
        ask = Submit("r", prompt(20), SHORTEST + 4, draw, stop_ids=[EOS], grammar=JSON)
        run = Run(make(folder, depth=depth)).put(ask).drain()
        entries = [entry for out in run.outs["r", 0] for entry in out.logprobs]
        assert len(entries) == len(run.tokens["r", 0])
        assert ends(run) == truth(plain, [ask])
        found = zip(run.tokens["r", 0], entries, strict=True)
        assert run.outs["r", 0][-1].overflow == "closed"
        unlikely = [entry for entry in entries if entry.logprob == UNLIKELY]
        assert 0 < len(unlikely) < len(entries)
        for token, entry in found:
            assert len(entry.top) == best
            if token in dict(entry.top):
                assert entry.logprob == dict(entry.top)[token]
            assert entry in unlikely or entry.logprob > -100
        drawn[best] = run.tokens["r", 0]
    assert drawn[20] == drawn[0]


def test_the_counts_of_penalties_are_those_of_the_tokens_that_stand(folder, monkeypatch):
    engine = make(folder)
    seen = []

    def forgotten(seq):
        if seq.history is not None and seq.replaced:
            output = seq.tokens[seq.prompt_len :]
            assert all(seq.history.count(token) == output.count(token) for token in range(VOCAB))
            seen.append(seq)

    monkeypatch.setattr(engine.runner, "forget", forgotten)
    Run(engine).put(*tight("json")).drain()
    assert len(seen) > 1


def test_cut_is_what_max_tokens_did_before(folder):
    asks = [replace(ask, overflow="cut") for ask in tight("json")]
    engine = make(folder)
    run = Run(engine).put(*asks).drain()
    cut = 0
    for ask in asks:
        raw, last = said(run, (ask.id, 0))
        assert last.overflow == ""
        if last.finish == "length":
            assert len(run.tokens[ask.id, 0]) == ask.max_tokens
            with pytest.raises(json.JSONDecodeError):
                valid(raw.decode("utf-8", "replace"))
            cut += 1
    assert cut > 3 and engine.stats().closing_tokens == engine.stats().closing_refusals == 0


@pytest.mark.parametrize("n", [1, 3])
def test_what_cannot_be_satisfied_is_admitted_and_ends_at_once_with_nothing(folder, n):
    engine = make(folder)
    ask = Submit("r", prompt(70), SHORTEST - 1, HOT, n=n, grammar=JSON)
    replies = []
    engine.inbox.put(ask)
    while not any(isinstance(reply, Step) for reply in replies):
        engine.wait(5.0)
        replies += engine.step()
    admitted, step = (r for r in replies if isinstance(r, Admitted | Step))
    assert isinstance(admitted, Admitted) and not engine.busy
    assert step.outs == [Out("r", i, [], "length", overflow="unopened") for i in range(n)]
    assert engine.stats().prompt_tokens == 0 and not engine.intake.arrived
    again = Run(engine).put(replace(ask, max_tokens=SHORTEST)).drain()  # its id is free again
    assert all(valid(bytes(again.tokens["r", index]).decode()) is None for index in range(n))
