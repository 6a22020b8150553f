"""The engine's promise on a real card, in bf16, with captured graphs, a step ahead.  Times nothing.

    SLIPSTREAM_GGUF=... python -m pytest -m gpu -s tests/engine/test_card.py

What a request may ask for and go through is in test_card_requests.py.

Equal means equal bits: tokens, and the float32 log-probability of each, which moves when any logit
of its row does.  That is promised for steps of up to 128 rows (design: row-invariant decode), and
where layers are small for steps of any size, on one KV; where prompts are computed in other pieces,
the first differences must be near-ties.  Each property prints one line with what it counted.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.consistency import check
from engine.loop import Engine
from engine.messages import Abort, Grammar, Sampling, Submit
from tests import card_rig
from tests.card_rig import (
    DRAWS,
    NEAR,
    PROMPT,
    ROWS,
    Bits,
    Rig,
    boot,
    counted,
    differing,
    greedy,
    record,
    tokens_of,
)
from tests.driver import Run
from tests.engine.test_exactness import GRAMMARS, preempt_some
from tests.proposers import AdversarialDrafts, ForcedDrafts, OracleDrafts, RandomDrafts

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(300)]

CROWDS = [2, 3, 8, 9, 17, 33, 64, 65, 100, 128]
TEXTS = """The capital of France is|Water boils at|def fibonacci(n):|Once upon a time there was a
The three primary colours are|To make a good cup of tea, first|Dear Sir or Madam, I am writing
In 1969 the first human|SELECT name, age FROM users WHERE|The quick brown fox|My favourite season
import numpy as np|A prime number is|The mitochondria are|Roses are red, violets are
{"name": "Alice", "age":|Q: What is 7 times 8? A:|Breaking news: scientists|Chapter 1|Hello, my
""".replace("\n", "|").strip("|").split("|")


@pytest.fixture(scope="module")
def smol():
    return card_rig.smol()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    from tests.bench.make_shape import Shape, write_shape

    folder = tmp_path_factory.mktemp("wide") / "model"
    gguf = Path(os.environ["SLIPSTREAM_GGUF"])
    write_shape(folder, gguf, Shape(layers=2, max_len=2048), shards=2)
    return Rig("8B shape, 2 layers", boot(str(folder), 256))


@pytest.fixture(params=["smol", "wide"])
def rig(request):
    return request.getfixturevalue(request.param)


# ---- bit for bit ---------------------------------------------------------------------------------


def test_a_request_alone_is_the_same_among_1_to_127_others(rig):
    asks = rig.asks(ROWS)
    wanted = rig.alone(*asks)
    compared = 0
    for size in CROWDS:
        seen = rig.widest()
        crowd = random.Random(size).sample(asks, size)
        found = rig.run(*crowd)
        assert seen.rows == size, "the prompts were not in the cache"
        assert not differing(found, {key: wanted[key] for key in found}), size
        compared += tokens_of(found)
    record("alone = in a batch", f"{rig.name}: {compared} tokens, batches {CROWDS}: 0 differ")


def test_a_request_is_the_same_while_prompts_are_computed_beside_it(rig):
    asks = rig.asks(48)
    wanted = rig.alone(*asks)
    others = [Submit(f"p{i}", rig.prompt(300, 500 + i), 2, DRAWS[0]) for i in range(6)]
    with rig.using(max_batch_tokens=ROWS, mixed_tokens=70, prefix_caching=True) as engine:
        seen = rig.widest()
        run = Run(engine).put(*asks)
        run.step()
        run.put(*others).drain()
    found = {key: rig.bits(run, key) for key in wanted}
    assert 100 < seen.rows <= ROWS
    assert not differing(found, wanted)
    record("beside prompts, steps <= 128", f"{rig.name}: {tokens_of(found)} tokens: 0 differ")


def test_beside_prompts_in_larger_steps_too_where_layers_are_small(smol):
    asks = smol.asks(100)
    wanted = smol.alone(*asks)
    others = [Submit(f"q{i}", smol.prompt(900, 700 + i), 2, DRAWS[0]) for i in range(6)]
    with smol.using(mixed_tokens=500) as engine:
        seen = smol.widest()
        run = Run(engine).put(*asks)
        run.step()
        run.put(*others).drain()
    assert seen.rows > 2 * ROWS
    found = {key: smol.bits(run, key) for key in wanted}
    assert not differing(found, wanted)
    record("beside prompts, steps > 128", f"smol: {tokens_of(found)} tokens: 0 differ")


def proposer(kind: str, wanted: Bits, rig: Rig):
    texts = {key: [token for token, _ in text] for key, text in wanted.items()}
    vocab = rig.engine.hello.vocab
    match kind:
        case "oracle":
            return OracleDrafts(texts, 2)
        case "adversarial":
            return AdversarialDrafts(texts, vocab, rig.engine.hello.stop_ids[0], 3)
    return RandomDrafts(vocab, 1)


@pytest.mark.parametrize("kind", ["oracle", "random", "adversarial"])
def test_drafts_of_any_length_change_no_bit(rig, kind):
    asks = rig.asks(14)  # of 9 rows at most: 126
    wanted = rig.alone(*asks)
    accepted = rig.engine.guessing.accepted
    drafted = rig.engine.guessing.drafted
    for k in range(1, 9):
        seen = rig.widest()
        with rig.using(drafts=proposer(kind, wanted, rig), max_drafts=k):
            found = rig.run(*asks)
        assert 14 < seen.rows <= ROWS
        assert not differing(found, wanted), k
    guessing = rig.engine.guessing
    accepted, drafted = guessing.accepted - accepted, guessing.drafted - drafted
    assert drafted > 100 and (accepted > 100 or kind == "random")
    record("drafts = none", f"{rig.name}, {kind}, k = 1..8: {8 * tokens_of(wanted)} tokens, "
                            f"{accepted} of {drafted} drafts accepted: 0 differ")


def test_a_grammar_with_drafts_is_the_grammar_alone(smol):
    from tokenizers import Tokenizer

    reader = Tokenizer.from_str(open_checkpoint(os.environ["SLIPSTREAM_GGUF"]).tokenizer_json)
    shape = GRAMMARS["json"]
    choice = Grammar('start: "<a>" ("yes" | "no" | /[0-9]{3,9}/)+ "</a>"')
    asks = [
        Submit(f"s{i}", smol.prompt(PROMPT, 300 + i), 90, replace(DRAWS[i % 3], seed=i),
               stop_ids=smol.engine.hello.stop_ids, grammar=shape if i % 2 else choice)
        for i in range(12)
    ]
    wanted = smol.alone(*asks)
    for drafts in (None, ForcedDrafts(), proposer("oracle", wanted, smol),
                   proposer("adversarial", wanted, smol)):
        with smol.using(drafts=drafts, depth=0 if drafts else 1):
            assert not differing(smol.run(*asks), wanted), drafts
    ended = 0
    for ask in asks[1::2]:
        ids = [token for token, _ in wanted[ask.id, 0]]
        if len(ids) < ask.max_tokens:  # the grammar ended it
            assert set(json.loads(reader.decode(ids))) == {"city", "days", "n"}
            ended += 1
    assert ended
    record("grammar + drafts", f"{4 * tokens_of(wanted)} tokens, {ended} whole objects: 0 differ")


def test_running_a_step_ahead_changes_no_bit(rig):
    asks = rig.asks(40)
    wanted = rig.alone(*asks)
    for depth in (0, 1):
        with rig.using(depth=depth):
            assert not differing(rig.run(*asks), wanted), depth
    record("depth 0 = depth 1", f"{rig.name}: {2 * tokens_of(wanted)} tokens: 0 differ")


def test_a_host_far_ahead_of_a_long_prompt_changes_no_bit(smol):
    """The card is kept busy while every chunk is launched: no host buffer may be used too early."""
    ask = Submit("ahead", smol.prompt(5000, 77), 8, DRAWS[0])
    with smol.using(prefix_caching=False, max_batch_tokens=256):
        wanted = smol.run(ask, disturb=lambda engine, number: torch.cuda.synchronize())
        for _ in range(3):
            with torch.cuda.stream(smol.engine.runner._stream):
                torch.cuda._sleep(300_000_000)  # cycles: about 0.15 s
            assert not differing(smol.run(ask), wanted)
    record("host ahead of the card", f"{-(-5000 // 256)} chunks launched at once, 3 times: "
                                     "0 differ")


# ---- counted -------------------------------------------------------------------------------------


def test_preemption_costs_near_ties_only(smol):
    asks = greedy(smol, 48)
    wanted = smol.alone(*asks)
    before = smol.engine.scheduler.preemptions
    with smol.using(prefix_caching=False):  # or the cache would give everything back
        counted(smol, "preempted", asks, wanted, disturb=preempt_some)
    assert smol.engine.scheduler.preemptions - before >= 5


def test_a_cold_prompt_and_a_cached_one_differ_by_near_ties_only(smol):
    asks = greedy(smol, 48)
    wanted = smol.alone(*asks)
    hits = smol.engine.scheduler.prefix_hits
    with smol.using(prefix_caching=False):
        counted(smol, "cold against cached", asks, wanted)
    assert smol.engine.scheduler.prefix_hits == hits


def test_greedy_text_leaves_the_cpus_at_near_ties_only(smol):
    from tokenizers import Tokenizer

    model = os.environ["SLIPSTREAM_GGUF"]
    checkpoint = open_checkpoint(model)
    reader = Tokenizer.from_str(checkpoint.tokenizer_json)
    sampling = Sampling(temperature=0.0, logprobs=5)
    asks = [Submit(f"t{i}", reader.encode(text, add_special_tokens=False).ids, 32, sampling)
            for i, text in enumerate(TEXTS)]
    assert len(asks) == 20
    config = EngineConfig(
        model=model, device="cpu", dtype="float32", threads=8, cache=CacheConfig(blocks=64)
    )
    run = Run(Engine(config, checkpoint)).put(*asks).drain()
    ours = {key: [token for token, _ in text] for key, text in smol.run(*asks).items()}
    gaps, same = [], 0
    for key, text in ours.items():
        theirs = run.tokens[key]
        at = next((i for i, (a, b) in enumerate(zip(text, theirs, strict=False)) if a != b), None)
        same += len(text) if at is None else at
        if at is not None:
            entries = [entry for out in run.outs[key] for entry in out.logprobs]
            best = dict(entries[at].top)
            assert text[at] in best, f"{key}: not even the CPU's fifth choice"
            gaps.append(round(best[theirs[at]] - best[text[at]], 4))
    assert all(value < NEAR for value in gaps) and same > 200, (gaps, same)
    record("bf16 on the card against fp32 on the CPU",
           f"20 prompts: {20 - len(gaps)} equal to the end, {same} tokens before the first "
           f"difference; gaps there {sorted(gaps)}")


# ---- aborts --------------------------------------------------------------------------------------


def test_2000_random_aborts_leave_the_pool_full(smol):
    engine, chance = smol.engine, random.Random(4)
    control = smol.asks(6)
    wanted = smol.alone(*control)
    run, alive, aborts = Run(engine), [], 0
    with smol.using(mixed_tokens=500):  # so that most of them run
        while aborts < 2000:
            while len(alive) < 160:
                alive.append(f"a{aborts}-{len(alive)}")
                length, draw = chance.randint(1, 400), replace(chance.choice(DRAWS), seed=aborts)
                run.put(Submit(alive[-1], smol.prompt(length, 2000 + chance.randrange(9)),
                               chance.randint(1, 40), draw, n=chance.choice([1, 1, 2]),
                               grammar=chance.choice([None, None, GRAMMARS["json"]])))
            for _ in range(chance.randint(20, 60)):
                name = alive.pop(chance.randrange(len(alive)))
                run.put(Abort(name, chance.choice([-1, -1, 0])))
                aborts += 1
            for _ in range(chance.choice([1, 2, 3])):
                run.step()
        run.put(*(Abort(name) for name in alive)).drain()
    check(engine.scheduler)
    pool = engine.pool
    assert not run.failed and pool.used == 0 and not engine.intake.arrived
    assert pool.free_count + pool.cached == pool.total
    smol.known.clear()
    assert not differing(smol.alone(*control), wanted)
    record("aborts", f"{aborts} at random, {engine.scheduler.wasted} rows in vain: pool full, "
                     f"{tokens_of(wanted)} tokens afterwards: 0 differ")
