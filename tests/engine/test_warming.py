"""What a start captures first, what an idle engine captures, and that it changes no token."""

from __future__ import annotations

import os
import sys
from collections import deque
from threading import Event

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.build as build  # noqa: E402
import engine.loop as loop  # noqa: E402
from cache.config import CacheConfig  # noqa: E402
from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.cuda import parts  # noqa: E402
from engine.cuda.buckets import bucket, sizes  # noqa: E402
from engine.cuda.done import Done  # noqa: E402
from engine.cuda.events import enter  # noqa: E402
from engine.cuda.runner import CudaRunner  # noqa: E402
from engine.cuda.warming import (  # noqa: E402
    FILTERED,
    PLAIN,
    Drawn,
    Forwarded,
    every,
    ordered,
    rare,
)
from engine.loop import Engine  # noqa: E402
from engine.messages import Abort, Sampling, Submit  # noqa: E402
from engine.models import family  # noqa: E402
from engine.timeline import Timeline  # noqa: E402
from engine.weights import BadWeights  # noqa: E402
from tests.driver import answers  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

HOT = Sampling(temperature=1.0, seed=5, repetition=1.2)


def test_a_start_captures_a_step_of_any_size_and_leaves_most_buckets_for_later():
    forwards, draws = sizes(2048), sizes(256)
    first, later = ordered(forwards, draws)
    assert len({*first, *later}) == len(first) + len(later)  # nothing twice
    assert len(first) < len(later)
    for power in range(9):
        assert Forwarded(bucket(forwards, 1 << power), False) in first
        assert Drawn(bucket(draws, 1 << power), PLAIN, False) in first
        assert Drawn(bucket(draws, 1 << power), FILTERED, False) in first
    assert {Forwarded(256, True), Forwarded(2048, True)} <= {*first}
    both = {*first, *later}
    assert {one.size for one in both if isinstance(one, Forwarded) and not one.chunks} == {
        *forwards}
    assert {one.size for one in both if isinstance(one, Drawn) and one.masked} == {*draws}
    assert [one.size for one in later] == sorted(one.size for one in later)
    assert both < {*every(forwards, draws)}


def test_sizes_that_are_no_powers_of_two_have_a_bucket_each_at_the_start():
    first, later = ordered([1, 3, 5, 40], [1, 5])
    assert [one.size for one in first if isinstance(one, Forwarded) and not one.chunks] == [
        1, 3, 5, 40]
    assert [one.size for one in first if isinstance(one, Drawn)] == [1, 1, 5, 5]
    assert all(isinstance(one, Drawn) and one.masked for one in later)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("warming") / "model", hidden=32, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=128,
    )


def make(folder) -> Engine:
    config = EngineConfig(
        model=str(folder), dtype="float32", device="auto", threads=1, max_sequences=4,
        max_batch_tokens=48, mixed_tokens=40, cache=CacheConfig(blocks=8),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "fused", lambda device: True)
        patch.setattr(CudaRunner, "compile", lambda *given: None)  # on a card: what is used
        patch.setattr(CudaRunner, "warm", lambda *given: None)
        return Engine(config, open_checkpoint(str(folder)))


def asks() -> list[Submit]:
    return [Submit(name, [7 * i + 1, 2, 3] * (i + 1), 6, HOT) for i, name in enumerate("abc")]


def test_buckets_captured_late_change_no_token(folder):
    alone = answers(make(folder), *asks())
    engine = make(folder)
    runner = engine.runner
    first, later = ordered(runner.forward.sizes, runner.settling.sizes)
    runner._later = deque([*first, *later])
    runner._rare = deque(rare(runner.settling.sizes))

    def idle(engine: Engine, step: int) -> None:
        """As if every request were paused here."""
        for _ in range(3):
            runner.idle()

    assert answers(engine, *asks(), disturb=idle) == alone
    assert len(first) + len(later) - len(runner._later) > 15


def test_an_engine_without_work_warms_and_a_message_stops_it(folder, monkeypatch):
    monkeypatch.setattr(loop, "QUIET_S", 30.0)  # the interpreter's steps take a while
    engine, calls = make(folder), []
    left = [3]

    def idle() -> bool:
        calls.append(engine.inbox.empty())
        left[0] -= 1
        return left[0] > 0

    engine.runner.idle = idle
    for _ in range(3):
        engine.wait(0.0)
    assert calls == [True] * 3
    engine.inbox.put(Abort("x"))
    engine.wait(5.0)  # returns at once
    assert len(calls) == 3
    engine.step()
    engine.inbox.put(asks()[0])
    engine.step()
    engine.wait(5.0)  # a step flies
    assert len(calls) == 3
    while engine.busy:
        engine.step()
    engine.wait(0.0)  # the client's next request may be on its way
    assert len(calls) == 3
    engine._ran -= loop.QUIET_S
    engine.wait(0.0)
    assert len(calls) == 4


def shaped(folder):
    """A model without memory, its config, and limits that make few buckets."""
    checkpoint = open_checkpoint(str(folder))
    config = EngineConfig(
        model=str(folder), max_sequences=4, max_batch_tokens=48, mixed_tokens=40
    ).resolved("cuda")
    return checkpoint, config


def compile_for(folder, device: torch.device, stop: Event) -> None:
    checkpoint, config = shaped(folder)
    build._compile(
        family(checkpoint.architecture), checkpoint.config, config, 128, torch.float32, device, 0,
        None, stop, Timeline(),
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="there kernels are compiled, see the next test")
def test_all_kernels_are_named_without_a_weight(folder, monkeypatch):
    """On the interpreter, which runs nothing here: a product of a weight would not work."""
    interpreted = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    named = []

    def warmup(kernel, *values, grid, **options):
        named.append((kernel.fn.__name__, values))

    monkeypatch.setattr(interpreted, "warmup", warmup, raising=False)
    compiling = parts.compile_kernels

    def on_a_cpu(*given, device, **more):
        compiling(*given, device=torch.device("cpu"), **more)

    monkeypatch.setattr(parts, "compile_kernels", on_a_cpu)
    compile_for(folder, torch.device("cpu"), Event())
    assert not named  # a CPU's engine needs none
    empty = torch.empty

    def here(*size, device=None, **more):
        return empty(*size, device="cpu" if str(device) == "cuda" else device, **more)

    monkeypatch.setattr(torch, "empty", here)
    compile_for(folder, torch.device("cuda"), Event())
    kernels = {name for name, _ in named}
    assert {"_product", "_project", "_norm", "_embed", "_short_kernel", "_chunk_kernel", "_score",
            "_pick", "_search", "_walk"} <= kernels
    assert "_chunk" in kernels  # of logprobs, which few ask for
    tensors = [value for _, values in named for value in values if isinstance(value, torch.Tensor)]
    assert tensors and not any(tensor.is_meta for tensor in tensors)  # see build._compile


@pytest.mark.skipif(DEVICE == "cpu", reason="compiles for a GPU")
def test_nothing_is_left_to_compile_when_the_weights_are_there(folder):
    import triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Done, "noted", lambda done: False)
        compile_for(folder, torch.device("cuda", 0), Event())
    compiled: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_compile", lambda *given: None)
        patch.setattr(triton.knobs.compilation, "listener",
                      lambda *, src, **more: compiled.append(src.name))
        engine = make(folder)
        runner = engine.runner
        for wanted in every(runner.forward.sizes, runner.settling.sizes):
            enter(runner._stream)
            with torch.inference_mode():
                runner._visit(wanted)
        torch.cuda.synchronize()
    assert not compiled


def test_a_start_that_fails_stops_what_runs_beside_it(folder, monkeypatch):
    """Bad weights are an error in a second, also where kernels would take twenty."""
    stopped = []

    def compile(*given) -> None:
        stopped.append(given[-2].wait(20))

    def bad(*given, **more):
        raise BadWeights("these are of another model")

    monkeypatch.setattr(build, "_compile", compile)
    monkeypatch.setattr(build, "load", bad)
    with pytest.raises(BadWeights, match="another model"):
        make(folder)
    assert stopped == [True]


def test_a_device_without_room_for_more_graphs_stops_warming(folder):
    runner = make(folder).runner
    runner._later = deque([Forwarded(1, False), Forwarded(2, False)])
    runner._rare = deque(rare([1]))

    def full(key, body):
        raise torch.OutOfMemoryError("no room for a graph")

    runner._graphs.run = full
    assert not runner.idle() and not runner._later and not runner._rare
    assert not runner.idle()


def test_what_few_ask_for_is_run_once_all_is_captured_and_is_not_captured_itself(folder):
    runner = make(folder).runner
    runner._later, runner._rare = deque([Forwarded(1, False)]), deque(rare([1, 2]))
    assert len(runner._rare) == 12
    assert all(one.needs not in (PLAIN, FILTERED) for one in runner._rare)
    runner._graphs.capture = True
    seen = []
    runner._visit = lambda wanted: seen.append((type(wanted), runner._graphs.capture))
    while runner.idle():
        pass
    assert seen == [(Forwarded, True), *[(Drawn, False)] * 12] and runner._graphs.capture


@pytest.fixture
def named(monkeypatch):
    """What is named on the interpreter: kernels' names."""
    interpreted = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    found: list[str] = []

    def warmup(kernel, *values, grid, **options):
        found.append(kernel.fn.__name__)

    monkeypatch.setattr(interpreted, "warmup", warmup, raising=False)
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="watches the interpreter")
def test_a_start_after_a_complete_one_names_what_it_captures(folder, named, monkeypatch):
    runner = make(folder).runner
    assert not runner.load() and not named  # products were never measured
    monkeypatch.setattr(runner.picks, "known", lambda group, rows: True)
    assert runner.load(Event())
    few = len(named)
    assert {"_product", "_norm", "_embed", "_short_kernel", "_chunk_kernel", "_pick",
            "_search"} <= {*named}
    assert "_chunk" not in named  # of logprobs
    named.clear()
    runner.compile(Event())
    assert "_chunk" in named and len(named) > few


@pytest.mark.skipif(DEVICE == "cuda", reason="watches the interpreter")
def test_a_kernel_that_is_missing_after_all_ends_the_short_way(folder, named, monkeypatch):
    import triton

    interpreted = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    runner = make(folder).runner
    monkeypatch.setattr(runner.picks, "known", lambda group, rows: True)

    def warmup(kernel, *values, grid, **options):
        named.append(kernel.fn.__name__)
        triton.knobs.compilation.listener(cache_hit=False)

    monkeypatch.setattr(interpreted, "warmup", warmup, raising=False)
    assert not runner.load()
    assert len({*named}) < 10  # of one bucket


@pytest.mark.parametrize("load", [True, False, RuntimeError("unheard of"),
                                  torch.OutOfMemoryError("no room")])
def test_a_noted_start_loads_and_whatever_that_lacks_is_compiled(folder, monkeypatch, load):
    did = []

    def loaded(runner, stop):
        did.append("load")
        if isinstance(load, Exception):
            raise load
        return load

    monkeypatch.setattr(CudaRunner, "load", loaded)
    monkeypatch.setattr(CudaRunner, "compile", lambda runner, stop: did.append("compile"))
    notes = Notes(did)
    monkeypatch.setattr(parts.Done, "of", lambda *facts: notes)
    checkpoint, config = shaped(folder)
    kind, shape = family(checkpoint.architecture), checkpoint.config
    weights = {name: torch.empty(size, device="meta")
               for name, size in kind.expected(shape).items()}

    def start(stop: Event) -> list[str]:
        did.clear()
        parts.compile_kernels(
            kind(shape, {**weights}, 128, paired=True), shape, config, size=64, max_len=128,
            dtype=torch.float32, device=torch.device("cpu"), drafts=0, stop=stop,
        )
        return did

    given_up = Event()
    given_up.set()
    assert start(given_up) == ["compile"]  # and perhaps not everything
    assert start(Event()) == ["compile", "note"]
    enough = load is True or isinstance(load, torch.OutOfMemoryError)
    assert start(Event()) == ["load"] + ["compile", "note"] * (not enough)


class Notes:
    """A Done that writes down what happens in `did`."""

    def __init__(self, did: list[str]) -> None:
        self.did, self.there = did, False

    def noted(self) -> bool:
        return self.there

    def note(self) -> None:
        self.did.append("note")
        self.there = True


def test_the_threads_of_a_gpus_start_hand_pythons_lock_over_soon_and_then_as_before():
    before = sys.getswitchinterval()
    for wanted in (True, False):
        with pytest.raises(BadWeights), build._brisk(wanted):
            assert (sys.getswitchinterval() < before) is wanted
            raise BadWeights("these are of another model")
        assert sys.getswitchinterval() == before
