"""The GPU's runner as a whole: on a CPU by Triton's interpreter, without graphs.  Measures nothing.

Whatever the engine can be asked must give the CPU runner's tokens: same tiny model, same float32.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.build as build  # noqa: E402
from cache.config import CacheConfig  # noqa: E402
from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.config import BadConfig, EngineConfig  # noqa: E402
from engine.cuda import ops, parts  # noqa: E402
from engine.cuda import runner as cuda_runner  # noqa: E402
from engine.cuda.events import enter  # noqa: E402
from engine.cuda.plain import plain  # noqa: E402
from engine.cuda.runner import CudaRunner  # noqa: E402
from engine.kernels.matmul import NORMED  # noqa: E402
from engine.kernels.norm import norm  # noqa: E402
from engine.kernels.overlap import EAGER, OVERLAPS, possible  # noqa: E402
from engine.loop import Engine  # noqa: E402
from engine.messages import Abort, Grammar, Pause, Resume, Sampling, Submit  # noqa: E402
from engine.plan import Row  # noqa: E402
from engine.runner import Runner, StepTooLarge  # noqa: E402
from engine.sequence import Sequence  # noqa: E402
from tests.driver import Run, answers  # noqa: E402
from tests.proposers import (  # noqa: E402
    AdversarialDrafts,
    ForcedDrafts,
    OracleDrafts,
    RandomDrafts,
    RandomHead,
)
from tests.scripted import EOS  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

VOCAB = 259
GREEDY = Sampling(temperature=0.0)
HOT = Sampling(temperature=1.0, seed=11)
PENALISED = Sampling(temperature=0.7, repetition=1.3, frequency=0.4, presence=0.3, seed=13)
WORD = Grammar('start: "<a>" ("yes" | "no" | /[0-9]{2}/) "</a>"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("runner") / "model", hidden=32, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=256, attention_bias=True,
    )


def make(folder, fused: bool, *, blocks: int = 40, drafts=None, head=None, **settings) -> Engine:
    """A float32 engine on the CPU's runner, or on the GPU's."""
    settings = {"max_sequences": 16, "max_batch_tokens": 96, "mixed_tokens": 70} | settings
    config = EngineConfig(
        model=str(folder), dtype="float32", device=DEVICE if fused else "cpu", threads=1,
        cache=CacheConfig(blocks=blocks), **settings,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "fused", lambda device: fused)
        patch.setattr(CudaRunner, "compile", lambda *given: None)  # on a card: what is used
        patch.setattr(CudaRunner, "warm", lambda *given: None)
        engine = Engine(config, open_checkpoint(str(folder)), drafts=drafts, head=head)
    assert type(engine.runner) is (CudaRunner if fused else Runner)
    return engine


def prompt(length: int, seed: int = 1) -> list[int]:
    made = np.random.default_rng(seed)
    return made.integers(0, 256, length).tolist()


@pytest.fixture(scope="module")
def truth(folder):
    """One request at a time on the CPU's runner."""
    engine = make(folder, False, prefix_caching=False)

    def ask(*submits: Submit) -> dict:
        return {key: tokens for s in submits for key, tokens in answers(engine, s).items()}

    return ask


# ---- steps that are too large --------------------------------------------------------------------


def test_a_step_beyond_the_buffers_is_refused_before_anything_runs(folder):
    runner = make(folder, True, max_sequences=2, max_batch_tokens=24, mixed_tokens=8).runner
    seq = Sequence(Submit("a", prompt(61), 50), 0, b"", 0.0, prompt(61), 0.0)
    seq.blocks = [SimpleNamespace(id=0)]
    place = runner.slots.place(seq)
    runner.forward.model = None  # whatever runs would fail otherwise

    def given(rows):
        places = [place] * len(rows)
        return rows, places, plain(rows, places, runner.slots, runner.pages.size)

    with pytest.raises(StepTooLarge, match="25 flat tokens; the largest step has 24"):
        runner.forward.stage(*given([Row(seq, 0, 25, False)]))
    with pytest.raises(StepTooLarge, match="3 rows draw a token; the largest step has 2"):
        runner.settling.prepare(*given([Row(seq, 60, 1, True)] * 3))


def test_steps_are_paced_by_the_sizes_that_the_runner_pads_to(folder):
    engine = make(folder, True)
    assert engine.scheduler.pace._sizes == list(engine.runner.sizes) == engine.runner.forward.sizes


def test_rows_that_are_not_there_name_the_first_slot_whatever_a_buffer_held(folder):
    """A bucket's rows lie where a larger one had page slots: as slots they would name nothing."""
    runner = make(folder, True).runner
    forward = runner.forward
    for size in forward.sizes:
        for array in forward._mirror._arrays:
            array[:] = 10**8
        enter(runner._stream)
        with torch.inference_mode():
            forward.run(forward.empty(size))
        rows = forward._buckets[size].views.attention
        for row in (rows.slot, rows.first, rows.start, rows.count):
            assert not row.any()


def test_norms_within_the_products_of_a_small_layer_change_no_answer(folder, truth, monkeypatch):
    monkeypatch.setattr(cuda_runner, "overlapping", lambda layer_bytes: EAGER)
    alone = []

    def counted(x, gain, out, eps, **more):
        alone.append(len(out))
        norm(x, gain, out, eps, **more)

    monkeypatch.setattr(ops, "rms_norm", counted)
    asks = [Submit(f"r{i}", prompt(9 + i, i), 6, how) for i, how in enumerate((GREEDY, HOT))]
    engine = make(folder, True)
    assert answers(engine, *asks) == truth(*asks)
    assert alone and min(alone) > NORMED  # prompts; two decoding rows are normed on the way


def test_an_engine_short_of_attention_scratch_makes_smaller_steps(folder, truth, monkeypatch):
    asks = [Submit(f"r{i}", prompt(70, i), 8, GREEDY) for i in range(9)]
    monkeypatch.setattr(cuda_runner, "SCRATCH", 1)  # so that there is room for one row
    engine = make(folder, True, max_sequences=10, max_batch_tokens=80, mixed_tokens=75)
    refused = []
    stage = engine.runner.forward.stage

    def staged(rows, places, plain):
        try:
            return stage(rows, places, plain)
        except StepTooLarge as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(engine.runner.forward, "stage", staged)
    assert answers(engine, *asks) == truth(*asks)
    assert refused and all("attention splits; there is room for 16" in text for text in refused)
    assert engine.scheduler.preemptions > 0


def test_a_step_that_fails_half_way_counts_no_token_twice(folder, truth, monkeypatch):
    """A first step of its kind runs, then is captured; if that fails, its draws have been made."""
    asks = [Submit(name, prompt(5, i), 8, PENALISED) for i, name in enumerate("pq")]
    engine = make(folder, True)
    run, failed = engine.runner._graphs.run, []

    def short_of_memory(key, body):
        run(key, body)
        if not failed and key[0] == "settle":
            failed.append(key)
            raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(engine.runner._graphs, "run", short_of_memory)
    assert answers(engine, *asks) == truth(*asks)
    assert failed and engine.scheduler.preemptions == 1


@pytest.mark.parametrize(("sampling", "stops", "says"), [
    (Sampling(bias=tuple((i, 1.0) for i in range(1025))), [], "1,025 tokens have a bias"),
    (Sampling(min_tokens=1), list(range(17)), "holds back 17 stop ids; this engine takes 16"),
    (Sampling(logprobs=21), [], "21 logprobs were asked for"),
])
def test_what_does_not_fit_the_slots_is_refused_at_the_door(crowd, sampling, stops, says):
    run = Run(crowd.engine).put(Submit("much", [1], 2, sampling, stop_ids=stops)).drain()
    refused = run.refused["much"]
    assert refused.code == "invalid_value" and says in refused.message
    assert not crowd.engine.busy and "much" not in crowd.engine.intake.arrived


def test_a_lone_row_fits_however_many_tokens_it_has_and_wherever_it_stands(folder, truth):
    """Sixteen tokens at the end of a long prompt are two tiles over its whole context."""
    ask = Submit("tail", prompt(250), 2, GREEDY)
    engine = make(folder, True, max_sequences=1, max_batch_tokens=117, mixed_tokens=117)
    assert answers(engine, ask) == truth(ask)


def test_a_runner_that_is_let_go_gives_its_memory_back_at_once(folder):
    """The largest step is tried on one; the pages that follow are sized as if it were gone."""
    made = make(folder, True).runner
    gc.collect()
    gc.disable()
    try:
        tried = CudaRunner(made.model, open_checkpoint(str(folder)).config, made.pages, made.most)
        held = [weakref.ref(x) for x in (tried.forward.ops.x, tried.forward.ops._scratch.partial,
                                         tried.settling._logits, tried.slots.tables.history)]
        del tried
        assert [one() for one in held] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize(("changed", "dtype", "says"), [
    ({"head_dim": 80}, torch.bfloat16, "head_dim is 80; on a GPU 32, 64, 128 are served"),
    ({"heads": 34, "kv_heads": 2}, torch.bfloat16, "query heads a key-value head is 17"),
    ({}, torch.float64, "float64 is not served on a GPU"),
])
def test_a_model_that_the_kernels_do_not_know_is_refused_by_name(folder, changed, dtype, says):
    shape = open_checkpoint(str(folder)).config
    parts.check(shape, torch.float32)
    with pytest.raises(BadConfig, match=says):
        parts.check(replace(shape, **changed), dtype)


def test_kernels_overlap_where_the_instructions_are():
    """An Ampere or Ada GPU cannot even compile them."""
    assert not any(possible(at) for at in [(8, 0), (8, 9)])
    assert all(possible(at) for at in [(9, 0), (10, 0), (12, 0)])
    if DEVICE == "cuda":
        assert possible(torch.cuda.get_device_capability()) == OVERLAPS


# ---- whole runs ----------------------------------------------------------------------------------

REQUESTS = {
    "greedy": Submit("greedy", prompt(5), 7, GREEDY),
    "long": Submit("long", prompt(130, 2), 5, GREEDY),
    "hot": Submit("hot", prompt(40, 3), 7, HOT),
    "top": Submit("top", prompt(1, 4), 7, Sampling(0.8, top_p=0.8, top_k=40, min_p=0.02, seed=12)),
    "penalised": Submit("penalised", [*prompt(9, 5), 7, 7], 7, PENALISED),
    "biased": Submit(
        "biased", prompt(6, 6), 6,
        Sampling(0.9, bias=((65, 30.0), (EOS, 40.0)), min_tokens=4, seed=14), stop_ids=[EOS],
    ),
    "grammar": Submit("grammar", prompt(8, 7), 20, HOT, grammar=WORD, stop_ids=[EOS]),
    "choices": Submit("choices", prompt(68, 8), 5, HOT, n=2),
    "scored": Submit("scored", prompt(4, 9), 5, Sampling(seed=3, logprobs=3)),
    "one": Submit("one", prompt(3, 10), 1, GREEDY),
}


def requests(truth) -> dict[str, Submit]:
    """The above, and one that ends on an ordinary token which nobody can foresee."""
    text = truth(REQUESTS["greedy"])["greedy", 0]
    stops = Submit("stops", prompt(5), 7, GREEDY, stop_ids=[text[3]])
    return {**REQUESTS, "stops": stops}


@pytest.fixture(scope="module")
def crowd(folder, truth):
    """All of them at once on the GPU's runner, at its own depth."""
    asks = requests(truth)
    engine = make(folder, True)
    assert engine.runner.depth == 1
    run = Run(engine).put(*asks.values()).drain()
    assert not run.failed and not run.refused and engine.pool.used == 0
    run.asks = asks
    return run


@pytest.mark.parametrize("kind", [*REQUESTS, "stops"])
def test_a_request_in_a_crowd_gives_the_cpu_runners_tokens(crowd, truth, kind):
    wanted = truth(crowd.asks[kind])
    assert {key: crowd.tokens[key] for key in wanted} == wanted


def test_the_crowd_exercised_what_its_names_say(crowd):
    tokens = {key: crowd.tokens[key, 0] for key in crowd.asks}
    assert tokens["biased"][:-1] == [65] * 4 and tokens["biased"][-1] == EOS
    assert bytes(tokens["grammar"][:3]) == b"<a>" and crowd.finish(("grammar", 0)) == "stop"
    assert crowd.finish(("stops", 0)) == "stop" and len(tokens["stops"]) <= 4
    assert crowd.tokens["choices", 0] != crowd.tokens["choices", 1]
    assert crowd.engine.scheduler.wasted > 0, "nothing flew while the host read"
    assert len({tuple(text) for text in tokens.values()}) == len(tokens)


def test_logprobs_are_the_cpu_runners(crowd, folder):
    run = Run(make(folder, False)).put(REQUESTS["scored"]).drain()
    pairs = zip(crowd.outs["scored", 0], run.outs["scored", 0], strict=True)
    for found, wanted in ((ours.logprobs[0], theirs.logprobs[0]) for ours, theirs in pairs):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [id for id, _ in found.top] == [id for id, _ in wanted.top]
        assert [v for _, v in found.top] == pytest.approx([v for _, v in wanted.top], abs=1e-4)
    assert all(not out.logprobs for out in crowd.outs["hot", 0]), "nobody else asked"


def test_a_second_run_finds_the_first_ones_blocks(crowd, truth):
    hits = crowd.engine.scheduler.prefix_hits
    again = Submit("again", REQUESTS["long"].prompt, 3, HOT)
    assert answers(crowd.engine, again) == truth(again)
    assert crowd.engine.scheduler.prefix_hits - hits >= 128


def test_an_abort_with_a_step_out_leaves_the_others_alone(crowd, truth):
    asks = [Submit(f"q{i}", prompt(20 + i, i), 4, HOT) for i in range(3)]
    run = Run(crowd.engine).put(*asks)
    run.step(), run.step()
    run.put(Abort("q1")).drain()
    assert {key: run.tokens[key] for key in truth(asks[0], asks[2])} == truth(asks[0], asks[2])
    assert crowd.engine.pool.used == 0
    assert not set(run.engine.runner.slots._places) & set(run.engine.scheduler.running)


def test_a_sequence_that_lost_its_slot_comes_back(folder, truth):
    """Two slots, three sequences: who is paused is written to the device anew, history and all."""
    asks = [Submit(f"p{i}", prompt(10, i), 9, PENALISED) for i in range(3)]
    engine = make(folder, True, max_sequences=2)
    run = Run(engine).put(*asks[:2])
    for _ in range(3):
        run.step()
    run.put(Pause("p0"), asks[2])
    for _ in range(3):
        run.step()
    assert len(engine.runner.slots._places) == 2 and len(engine.scheduler.running) == 3
    run.put(Resume("p0")).drain()
    assert run.tokens == truth(*asks)


def test_preempted_sequences_give_the_same_tokens(folder, truth):
    asks = [Submit(f"r{i}", prompt(62, i), 5, HOT if i else PENALISED) for i in range(3)]
    engine = make(folder, True, blocks=5, max_sequences=3, max_batch_tokens=190,
                  mixed_tokens=180, prefix_caching=False)
    assert answers(engine, *asks) == truth(*asks)
    assert engine.scheduler.preemptions > 0


# ---- drafts --------------------------------------------------------------------------------------


def proposer(kind: str, expected: dict):
    match kind:
        case "random":
            return RandomDrafts(VOCAB, 1)
        case "oracle":
            return OracleDrafts(expected, 2)
        case "adversarial":
            return AdversarialDrafts(expected, VOCAB, EOS, 3)
    return ForcedDrafts()


@pytest.mark.parametrize("kind", ["random", "oracle", "adversarial", "forced"])
def test_drafts_change_no_token(folder, truth, kind):
    asks = [
        Submit("cold", prompt(62, 1), 7, GREEDY),
        Submit("again", prompt(5, 2), 7, PENALISED),
        Submit("shaped", prompt(8, 7), 12, HOT, grammar=WORD, stop_ids=[EOS]),
    ]
    expected = truth(*asks)
    engine = make(folder, True, drafts=proposer(kind, expected), max_drafts=4)
    assert answers(engine, *asks) == expected
    assert engine.guessing.drafted > 0
    if kind in ("oracle", "forced"):
        assert engine.guessing.accepted > 0


def test_a_device_draft_changes_no_token(folder, truth):
    asks = [Submit("h0", prompt(6, 1), 5, GREEDY), Submit("h1", prompt(70, 2), 4, HOT)]
    head = RandomHead(32, VOCAB, (0, 1))
    engine = make(folder, True, head=head, max_drafts=2)
    assert answers(engine, *asks) == truth(*asks)
    assert head.steps > 0 and engine.guessing.drafted > 0


def test_blocks_that_a_device_draft_wants_ahead_lie_in_the_sequences_own_row(folder, truth):
    """At the end of the longest sequence they are more than the model's length needs."""
    ask = Submit("full", prompt(250, 3), 6, GREEDY)
    engine = make(folder, True, head=RandomHead(32, VOCAB, (0, 1)), max_drafts=2, blocks=6)
    slots, most = engine.runner.slots, []
    upload = slots.upload

    def watched():
        most.append(max(index for _, index, _ in slots._fresh or [(0, 0, 0)]))
        upload()

    slots.upload = watched
    assert answers(engine, ask) == truth(ask)
    assert max(most) == 256 // 64, "nothing was wanted beyond the model's length"
    assert max(most) < slots.table.shape[1]
