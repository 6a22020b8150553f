"""What a grammar dictates is verified in the step that ends the prompt, and no answer changes."""

from __future__ import annotations

import itertools
import os
import random

import msgspec
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from cache.config import CacheConfig  # noqa: E402
from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.grammar.schema import check, embed  # noqa: E402
from engine.kernels import chain_attention as attention  # noqa: E402
from engine.loop import Engine  # noqa: E402
from engine.messages import Grammar, Sampling, Submit  # noqa: E402
from engine.proposer import ASLEEP, FREE, HOST  # noqa: E402
from speculative.captured import CapturedEagle3  # noqa: E402
from speculative.hybrid import Hybrid  # noqa: E402
from tests.driver import Run, make  # noqa: E402
from tests.exact import preempt_some  # noqa: E402
from tests.heads import config, head_of  # noqa: E402
from tests.proposers import AdversarialDrafts, OracleDrafts  # noqa: E402
from tests.schemas import record  # noqa: E402
from tests.scripted import EOS  # noqa: E402
from tests.speculative.test_captured import F32  # noqa: E402
from tests.speculative.test_captured import make as make_device  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

SCHEMA = record({"name": {"const": "weather"}, "n": {"type": "integer", "maximum": 9999}})
CALL = Grammar(f"start: %json {embed(check(SCHEMA, strict=False, root='any').schema)}\n")
OPENING = b'{"name": "weather", "n": '
LENGTHS = (9, 64, 61, 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("opening") / "model", hidden=64, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=512)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """An interpreter takes them one by one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "FULL", 8)


def ask(number: int = 0, tokens: int = 40, **more) -> Submit:
    sampling = more.pop("sampling", None) or Sampling(temperature=0.9 * (number % 2), seed=number)
    prompt = [(number + 3 * i) % 250 for i in range(LENGTHS[number % 4])]
    return Submit(f"r{number}", prompt, tokens, sampling, stop_ids=[EOS], grammar=CALL, **more)


def asks() -> list[Submit]:
    free = Submit("free", [7, 8, 9], 20, Sampling(temperature=0.8, seed=8))
    return [*map(ask, range(4)), free, ask(4, n=2), ask(5, sampling=Sampling(
        temperature=0.7, repetition=1.3, seed=3))]


@pytest.fixture(scope="module")
def truth(folder):
    plain, found = make(folder, prefix_caching=False), {}
    for one in asks():
        found |= Run(plain).put(one).drain().tokens
    return found


def begun(run: Run) -> None:
    """Step until there is a token: the grammar is compiled first."""
    while not run.outs:
        run.engine.wait(1.0)
        run.step()


def wide(engine):
    """Rows of any length may hold drafts: what is computed here is exact."""
    engine.guessing._short = engine.scheduler.short_row = 1 << 30
    return engine


def firsts(run: Run) -> dict:
    return {key: outs[0].tokens for key, outs in run.outs.items()}


@pytest.mark.parametrize("limit", [5, 16, 31])
def test_the_first_tokens_come_at_once(folder, truth, limit):
    engine = wide(make(folder, drafts=Hybrid(0.1), max_drafts=limit, max_batch_tokens=300))
    run = Run(engine).put(ask())
    begun(run)
    assert bytes(firsts(run)["r0", 0]).startswith(OPENING[:limit])
    assert len(firsts(run)["r0", 0]) >= min(limit, len(OPENING)) + 1
    assert run.drain().tokens == {("r0", 0): truth["r0", 0]}
    assert engine.guessing.matched["forced"] == engine.guessing.verified["forced"] >= min(limit, 22)


@pytest.mark.parametrize("waits", [True, False])
def test_what_texts_make_likely_comes_with_it_where_steps_wait(folder, truth, waits):
    whole = truth["r0", 0]
    engine = wide(make(folder, drafts=Hybrid(0.1), max_drafts=31, max_batch_tokens=300))
    engine.guessing._runs_ahead = not waits
    run = Run(engine).put(ask(predicted=whole))
    begun(run)
    found = firsts(run)["r0", 0]
    assert found == whole[: len(found)]
    assert (len(found) > len(OPENING) + 2) == waits, "a prediction is as good as certain"
    assert run.drain().tokens == {("r0", 0): whole}
    assert engine.guessing.matched["prediction"] > 1 or not waits


@pytest.mark.parametrize("more", [{"drafts": "off"}, {"drafts": "suffix"}, {"max_drafts": 0}],
                         ids=str)
def test_who_wants_no_such_draft_gets_none(folder, truth, more):
    engine = wide(make(folder, drafts=Hybrid(0.1), max_drafts=16, max_batch_tokens=300))
    run = Run(engine).put(ask(**more))
    begun(run)
    assert len(firsts(run)["r0", 0]) == 1
    assert run.drain().tokens == {("r0", 0): truth["r0", 0]}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batch", [20, 70, 300])
def test_chunks_forks_and_preemption_change_nothing(folder, truth, batch, depth):
    """Also where a prompt's last chunk leaves no room for all of it, or is the next step's."""
    for drafts in (Hybrid(0.1), OracleDrafts(truth), AdversarialDrafts(truth, 259, EOS)):
        for disturb in (None, preempt_some):
            engine = wide(make(folder, drafts=drafts, max_drafts=16, max_batch_tokens=batch,
                               depth=depth, max_sequences=8))
            run = Run(engine).put(*asks()).drain(disturb=disturb)
            assert run.tokens == truth and not run.failed and engine.pool.used == 0


def test_a_draft_that_found_no_room_is_not_kept_for_later_tokens(folder, truth):
    """Of 30 tokens a step the prompt takes all: what was guessed behind it is then another text."""
    engine = wide(make(
        folder, drafts=Hybrid(0.1), max_drafts=16, max_batch_tokens=32, mixed_tokens=32))
    seen = []

    def look(engine, _):
        for seq in engine.scheduler.running:
            if seq.decoding and seq.draft:
                seen.append(bytes(seq.draft))
                done = bytes(seq.tokens[seq.prompt_len :])
                assert OPENING[len(done) :].startswith(seen[-1]) or len(done) > len(OPENING)

    one = Submit("r0", [5] * 32, 40, Sampling(temperature=0.0, seed=0), stop_ids=[EOS],
                 grammar=CALL)
    wanted = Run(make(folder)).put(one).drain().tokens
    assert Run(engine).put(one).drain(disturb=look).tokens == wanted and seen


@pytest.mark.parametrize("way", ["asleep", "changing"])
@pytest.mark.skipif(DEVICE == "cuda", reason="its heads lie on the CPU")
def test_a_head_reads_prompts_with_drafts_behind_them(folder, truth, way):
    draft = CapturedEagle3(head_of(config(head_dim=32, heads=4, kv_heads=2), 3, F32), 512)
    engine = wide(make_device(folder, draft, True, max_drafts=16, max_batch_tokens=96))
    lengths = itertools.cycle([ASLEEP] if way == "asleep" else [3, HOST, FREE, 0, ASLEEP, 2])
    engine.guessing.ahead = lambda *given: next(lengths)
    engine.guessing.host = Hybrid(0.002, piped=True)
    greedy = [one for one in asks() if one.sampling.temperature == 0]
    run = Run(engine).put(*greedy).drain()
    assert run.tokens == {key: truth[key] for key in run.tokens}
    assert len(run.tokens) == sum(one.n for one in greedy)
    assert any(len(tokens) > 10 for tokens in firsts(run).values())


def test_a_row_that_is_no_short_one_holds_no_draft_behind_its_prompt(folder, truth):
    """There a token's bits are others than by itself.  What is cached is no part of the row."""
    engine = make(folder, drafts=Hybrid(0.1), max_drafts=31, max_batch_tokens=300)
    short, rows = engine.runner.short, []
    launch = engine.runner.launch

    def noted(plan):
        rows.extend(plan.rows)
        return launch(plan)

    engine.runner.launch = noted
    plain = make(folder, prefix_caching=False)
    for number in range(4):  # prompts of 9, 64, 61, 100 tokens
        for more in (0, 5):  # the second time all but the end is cached
            one = msgspec.structs.replace(ask(number), prompt=ask(number).prompt + [7] * more)
            wanted = Run(plain).put(one).drain().tokens
            assert Run(engine).put(one).drain().tokens == wanted
    ends = [row for row in rows if row.last and row.count > 1 + len(row.draft)]
    assert all(row.count <= short for row in ends if row.draft)
    assert {row.count - len(row.draft) for row in ends if row.draft} == {9, 5}
    # One that was queued with a draft, as what it would find in the cache was there then.
    seq_row = make(folder, drafts=Hybrid(0.1), max_drafts=31, max_batch_tokens=300)
    seq_row.guessing._short = 1 << 30
    rows.clear()
    seq_row.runner.launch, launch = noted, seq_row.runner.launch
    assert Run(seq_row).put(ask(3)).drain().tokens == {("r3", 0): truth["r3", 0]}
    assert not rows[0].draft and rows[0].count == 100


@pytest.mark.model
@pytest.mark.parametrize("cached", [False, True])
def test_bits_are_those_without_drafts_behind_prompts_of_all_lengths(cached):
    """In bf16, where another order of sums is another number: logprobs are compared."""
    engine = Engine(
        EngineConfig(model="smollm2", device="cpu", dtype="bfloat16", prefix_caching=cached,
                     cache=CacheConfig(blocks=64)), open_checkpoint("smollm2"), drafts=Hybrid(0.1))
    chance, opened = random.Random(7), []
    for length in (3, 9, 14, 15, 16, 17, 40, 120):
        prompt = [chance.randrange(1000, 40000) for _ in range(length)]
        if cached:  # for both of them
            Run(engine).put(Submit(f"warm{length}", prompt, 1, Sampling(temperature=0.0))).drain()
        found = []
        for mode in ("off", "forced"):
            sampling = Sampling(temperature=0.0, seed=length, logprobs=0)
            run = Run(engine).put(Submit(
                f"{mode}{length}", prompt, 30, sampling, stop_ids=engine.hello.stop_ids,
                grammar=CALL, drafts=mode)).drain()
            outs = run.outs[f"{mode}{length}", 0]
            found.append(([*run.tokens.values()], [one for out in outs for one in out.logprobs]))
        assert found[0] == found[1] and found[0][1], f"behind {length} tokens"
        opened += [length] if len(outs[0].tokens) > 1 else []
    assert opened == ([3, 9, 14, 15, 16, 17, 40, 120] if cached else [3, 9, 14, 15])
