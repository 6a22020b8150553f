"""The GPU's benchmark: traces divided by stage, floors, its run of the loop.  Needs no GPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import bench
from engine.bench import Decoders, kv_values, parameters
from engine.checkpoint import open_checkpoint
from engine.config import BadConfig, EngineConfig
from engine.cuda import bench as gpu
from engine.cuda.bench import Roofs, Watch, prompt_operations, spans, stage_floors
from engine.cuda.trace import DRAFT, GAPS, OTHER, PRODUCTS, STAGES, Span, shares, waits
from engine.models.llama import Llama
from tests.driver import make
from tests.tiny import write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gpu_bench") / "model", max_len=512)


class Trace:
    """Kernels one after the other."""

    def __init__(self) -> None:
        self.now, self.spans = 100.0, []

    def add(self, name: str, took: float = 1.0, *, early: float = 0.0, late: float = 0.0) -> Trace:
        """`early`: begins so long before its forerunner ends; `late`: so long after."""
        start = self.now - early + late
        self.spans.append(Span(name, start, start + took))
        self.now = max(self.now, start + took)
        return self

    def step(self, layers: int, product: str = "_product") -> Trace:
        self.add("Memcpy HtoD (Pinned -> Device)", 0.5).add("_embed")
        for _ in range(layers):
            self.add("_norm").add("_project", 2).add("_short_kernel", 5).add(product, 3)
            self.add("_norm").add(product, 4).add(product, 6)
        self.add("_norm").add(product, 7).add("_score").add("_pick").add("_walk")
        return self.add("Memcpy DtoH (Device -> Pinned)", 0.25)


def test_a_trace_is_divided_by_stage_and_nothing_is_lost():
    trace = Trace()
    for _ in range(3):
        trace.now += 10
        trace.step(layers=2)
    found = shares(reversed(trace.spans), 2)
    assert {stage: took / 3 for stage, took in found.times.items() if took} == pytest.approx({
        "qkv": 4, "out": 6, "gate_up": 8, "down": 12, "head": 7, "attention": 10,
        "norms, rope, embed": 6, "sampler": 3, "copies": 0.75, GAPS: 20 / 3,
    })  # fmt: skip
    assert found.total == pytest.approx(trace.now - trace.spans[0].start)
    assert not found.unknown and set(found.times) == set(STAGES)


def test_products_keep_their_kind_whoever_computes_them_and_in_how_many_kernels():
    trace = Trace().add("_embed", 0)
    for _ in range(2):
        trace.add("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 1)
        trace.add("void cublasLt::splitKreduce_kernel<32, 16>", 2)  # of the same product
        trace.add("_rotate_kernel", 0).add("_short_kernel", 0).add("_chunk_kernel", 0)
        trace.add("sm90_xmma_gemm_bf16bf16", 4)
        trace.add("void cutlass::Kernel2<sm90>", 8).add("_gate", 16)
        trace.add("_product", 32).add("_norm", 0)
    trace.add("void gemv2T_kernel_val<int>", 64)
    found = shares(trace.spans, 2)
    times = {stage: took for stage, took in found.times.items() if took}
    assert times == {"qkv": 2 * 3, "out": 2 * 4, "gate_up": 2 * 24, "down": 2 * 32, "head": 64}
    assert not found.unknown


def test_an_overlap_belongs_to_the_kernel_that_came_first():
    trace = Trace().add("_embed", 4).add("_norm", 3, early=2).add("_short_kernel", 1, early=0.5)
    found = shares(trace.spans, 1)
    assert found.times["norms, rope, embed"] == 5 and found.times["attention"] == 0.5
    inside = shares([Span("_norm", 0, 10), Span("_score", 2, 3)], 1)
    assert inside.times["sampler"] == 0 and inside.total == 10


def test_what_a_draft_launches_behind_a_step_is_its_own_whatever_its_name():
    trace = Trace()
    for _ in range(2):
        trace.step(layers=1).add("_take", 2).add("nvjet_tst_64x8", 3).add("_inputs", 1)
        trace.add("_rotate_kernel", 1).add("_begin", 1).add("_attend", 2).add("_norm", 1)
        trace.add("_gate", 1).add("void at::native::index_select", 1).add("_draw", 2)
        trace.add("Memcpy DtoH (Device -> Pinned)", 0.5).add("_update", 0.5)
    found, bare = shares(trace.spans, 1), shares(Trace().step(layers=1).spans, 1)
    assert found.times[DRAFT] == 2 * 15 and not found.unknown
    for stage in set(STAGES) - {DRAFT, "copies"}:
        assert found.times[stage] == 2 * bare.times[stage], stage
    assert found.times["copies"] == 2 * (bare.times["copies"] + 1)


def test_every_kernel_of_ours_has_a_stage():
    """A new one belongs into engine/cuda/trace.py, or the benchmark calls it `other`."""
    launched = {
        name for file in (Path(gpu.__file__).parents[1] / "kernels").glob("*.py")
        for name in re.findall(r"enqueue\((_[a-z_]+), ", file.read_text(), re.MULTILINE)
    }
    assert {"_product", "_project", "_embed", "_score"} <= launched
    for name in launched:
        assert not shares([Span(name, 0, 1)], 1).unknown, name


def test_what_is_not_known_is_shown_by_name():
    found = shares(Trace().add("_embed").add("void at::native::fill", 2).spans, 1)
    assert found.times[OTHER] == 2 and found.unknown == {"void at::native::fill"}
    empty = shares([], 1)
    assert empty.total == 0


def test_a_drained_step_waits_from_its_last_kernel_to_the_next_ones_first():
    trace = Trace()
    for late in (0.0, 30.0, 50.0):
        trace.now += late
        trace.step(layers=1)
    assert waits(trace.spans) == pytest.approx([0.25 + 30 + 0.5, 0.25 + 50 + 0.5])
    assert waits(trace.spans[:5]) == []


def test_a_models_products_come_in_the_order_that_tells_them_apart(folder):
    """Of the real forward pass, on operations that only write down what was asked for."""
    shape = open_checkpoint(str(folder)).config
    weights = {name: torch.zeros(size) for name, size in Llama.expected(shape).items()}
    model = Llama(shape, weights, 16)
    kinds = {id(getattr(layer, kind)): kind for layer in model.layers
             for kind in PRODUCTS if kind != "head"}  # fmt: skip
    trace, wanted = Trace(), []

    class Ops:
        def product(self, linear) -> None:
            wanted.append(kinds[id(linear)])
            trace.add("_product", 10.0 ** PRODUCTS.index(wanted[-1]))

        def embed(self, table):
            trace.add("_embed", 0)

        def attend(self, layer, x, norm, qkv):
            trace.add("_norm", 0)
            self.product(qkv)
            trace.add("_short_kernel", 0)

        def add(self, x, inner, linear):
            self.product(linear)

        def gated(self, x, norm, gate_up):
            trace.add("_norm", 0)
            self.product(gate_up)

    model.run(Ops())
    trace.add("_product", 10.0**4)
    found = shares(trace.spans, shape.layers).times
    assert len(wanted) == 4 * shape.layers
    for at, kind in enumerate(PRODUCTS):
        assert found[kind] == 10.0**at * (1 if kind == "head" else shape.layers), kind


def test_floors_are_the_bytes_and_operations_of_the_model(folder):
    shape = open_checkpoint(str(folder)).config
    reading = Roofs(bytes_s=1.0, operations_s=math.inf)
    floors = stage_floors(shape, reading, 2, 1, 1000)
    twice = stage_floors(shape, reading, 2, 2, 1000)
    for kind in PRODUCTS:
        assert twice[kind] > floors[kind]  # activations; without them both would be the weights
    weights = sum(2 * floors[kind] - twice[kind] for kind in PRODUCTS)
    assert weights == 2 * parameters(shape)
    heads = 2 * shape.heads * shape.head_dim
    assert floors["attention"] == 2 * (1000 * kv_values(shape) + shape.layers * heads)
    assert floors["sampler"] == 4 * shape.vocab
    computing = Roofs(bytes_s=math.inf, operations_s=1.0)
    floors = stage_floors(shape, computing, 2, 64, 1000)
    assert sum(floors[kind] for kind in PRODUCTS) == 2 * 64 * parameters(shape)
    both = stage_floors(shape, Roofs(5.0, 3.0), 2, 64, 1000)
    assert both["down"] >= floors["down"] / 3
    assert set(floors) == set(STAGES) - {DRAFT, OTHER, GAPS}


def test_a_prompts_operations_grow_with_its_square_and_the_head_counts_once(folder):
    shape = open_checkpoint(str(folder)).config
    one, two, four = (prompt_operations(shape, length) for length in (1, 2, 4))
    attention = 2.0 * shape.heads * shape.head_dim * shape.layers
    assert one == 2 * parameters(shape) + attention * 2
    per_token = 2 * (parameters(shape) - shape.vocab * shape.hidden)
    assert two - one == per_token + attention * 4
    assert four - two == 2 * per_token + attention * 14


def test_only_what_ran_on_the_device_is_a_span():
    def seen(name, kind, **more):
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=kind),
                               time_range=SimpleNamespace(start=1.5, end=2.5), **more)

    events = [seen("aten::mm", "CPU"), seen("_norm", "CUDA"), seen("Stream Sync", "CUDA"),
              seen("mine", "CUDA", is_user_annotation=True),
              seen("Memset (Device)", "CUDA", is_user_annotation=False)]
    assert spans(events) == [Span("_norm", 1.5, 2.5), Span("Memset (Device)", 1.5, 2.5)]


def test_a_watch_adds_up_calls_and_leaves_the_object_as_it_was():
    class Thing:
        def double(self, x):
            if not x:
                raise ValueError(x)
            return 2 * x

    thing, watch = Thing(), Watch()
    with watch.over(thing, "double"):
        assert thing.double(3) == 6
        with pytest.raises(ValueError):
            thing.double(0)
    assert watch.seconds["double"] > 0 and "double" not in vars(thing)


def _fake(monkeypatch) -> None:
    """No card: roofs that are given, and a trace of as many steps as were asked for."""

    def traced(engine, steps):
        trace = Trace()
        for _ in range(steps):
            engine.step()
            trace.step(engine.runner.model.config.layers)
        engine.drain()
        return trace.spans

    monkeypatch.setattr(gpu, "measured", lambda dtype: Roofs(1e12, 1e14))
    monkeypatch.setattr(gpu, "traced", traced)


def test_decode_shows_every_stage_the_host_and_the_wait(folder, monkeypatch):
    _fake(monkeypatch)
    config = EngineConfig(model=str(folder), dtype="float32", threads=1).resolved("cpu")
    checkpoint = open_checkpoint(str(folder))
    rows = list(gpu.decode(config, checkpoint, 0.2, (1, 3), 20))
    named = {str(row["what"]): row for row in rows}
    layers = checkpoint.config.layers
    for batch in ("  1", "  3"):
        at = f"decode {batch} x 20: "
        stages = {what.removeprefix(at): row for what, row in named.items() if what.startswith(at)}
        assert stages["down"]["value"] == pytest.approx(6 * layers)
        assert "of what the card allows" in str(stages["down"]["beside"])
        assert float(stages["down"]["floor"]) > 0 and "floor" not in stages["all stages"]
        summed = sum(float(stages[stage]["value"]) for stage in STAGES if stage in stages)
        assert summed == pytest.approx(stages["all stages"]["value"])
        assert stages["wait of a step for its host"]["value"] == pytest.approx(0.75)
        host = [float(row["value"]) for what, row in stages.items() if what.startswith("host, ")]
        assert len(host) == 5 and sum(host) == pytest.approx(stages["step"]["value"])
        assert stages["output"]["value"] > 0


def test_prefill_shows_each_length_that_the_model_takes(folder, monkeypatch):
    _fake(monkeypatch)
    monkeypatch.setattr(gpu, "LENGTHS", (32, 100_000))
    config = EngineConfig(model=str(folder), dtype="float32", threads=1).resolved("cpu")
    rows = list(gpu.prefill(config, open_checkpoint(str(folder)), 0.05))
    assert [row["what"] for row in rows] == ["matrix product", "prefill     32 tokens"]
    assert "of the matrix roof" in str(rows[1]["beside"])


@pytest.mark.parametrize("depth", [0, 1])
def test_decoders_decode_together_and_leave_an_empty_engine(folder, depth):
    engine = make(folder, depth=depth)
    shape = open_checkpoint(str(folder)).config
    with Decoders(engine, shape, 3, 20) as decoders:
        before = decoders.context
        run = decoders.run(60.0, 10)
        assert (run.steps, run.tokens) == (10, 30)
        assert decoders.context == before + 10
        assert decoders.run(60.0).steps < 512 - 20  # ends before the sequences do
        assert len(engine.scheduler.running) == 3
    assert not engine.busy and engine.pool.used == 0


def test_what_cannot_be_measured_is_said(folder):
    shape = open_checkpoint(str(folder)).config
    with pytest.raises(BadConfig, match="leaves too little to decode of the 512"):
        Decoders(make(folder), shape, 1, 500)
    with pytest.raises(BadConfig, match="do not hold 4 sequences"):
        Decoders(make(folder, blocks=8), shape, 4, 120).__enter__()


def test_a_batch_beyond_the_usual_gets_its_slots(folder):
    config = EngineConfig(model=str(folder))
    assert bench._roomy(config, "cuda", (1, 300)).max_sequences == 300
    assert bench._roomy(config, "cuda", (1, 200)).max_sequences == 256
    assert bench._roomy(config, "cpu", ()).max_sequences == 64
