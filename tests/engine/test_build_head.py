"""A start with a head on a GPU: what it is probed on, and its kernels beside the model's.  No GPU.
"""

from __future__ import annotations

import os
from threading import Event

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.build as build
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.cuda import parts
from engine.cuda.done import Done
from engine.kernels import chain_attention as attention
from engine.layers import Linear
from engine.model_config import BadCheckpoint
from engine.models import family
from engine.timeline import Timeline
from engine.weights import load
from speculative.captured import CapturedEagle3
from speculative.witness import Witness
from tests.heads import config, head_of
from tests.tiny import write_llama

CPU, F32 = torch.device("cpu"), torch.float32
BIASES = {"attention_bias": True, "mlp_bias": True}


class Maker:
    """A HeadMaker that writes down what it is shown."""

    source = "eagle3"

    def __init__(self, error: Exception | None = None, **shape) -> None:
        self.error, self.met, self.asked = error, [], []
        self.config = config(hidden=32, target_hidden=32, head_dim=32, heads=2, kv_heads=1, **shape)

    def open(self, shape, weights, max_len, dtype, device, blank=False):
        self.asked.append((shape.layers, blank))
        if self.error is not None:
            raise self.error
        return CapturedEagle3(head_of(self.config, 3, F32), 128)

    def meet(self, draft, model, shape) -> None:
        self.met.append(model)
        if self.error is not None:
            raise self.error


def started(folder, monkeypatch, maker: Maker):
    """The tensors as they were loaded, the checkpoint, and the model that is served."""
    monkeypatch.setattr(build, "fused", lambda device: True)
    checkpoint = open_checkpoint(str(folder))
    kind, shape = family(checkpoint.architecture), checkpoint.config
    weights = load(checkpoint, kind.expected(shape), F32, None, CPU)
    loaded = dict(weights)
    draft = CapturedEagle3(head_of(maker.config, 3, F32), 128)
    model = build._met(kind, shape, weights, 128, draft, maker, CPU, Timeline())
    return loaded, checkpoint, model


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["plain", "biases"])
def test_the_model_that_a_head_is_probed_on_copies_no_weight(tmp_path, monkeypatch, biases):
    maker = Maker()
    loaded, checkpoint, served = started(
        write_llama(tmp_path, max_len=128, **biases), monkeypatch, maker)
    (plain,) = maker.met
    theirs = {tensor.data_ptr() for tensor in loaded.values()}
    found = [tensor for layer in plain.layers for linear in
             (layer.qkv, layer.out, layer.gate_up, layer.down)
             for part in linear._parts for tensor in part if tensor is not None]
    found += [plain.embedding, plain.norm, plain.head.weight]
    assert {tensor.data_ptr() for tensor in found} <= theirs
    assert sum(tensor.numel() for tensor in found) > 0.9 * sum(t.numel() for t in loaded.values())
    assert served.layers[0].qkv.weight is not None, "what is served is joined"
    # And it computes what a joined model computes.
    joined = family(checkpoint.architecture)(checkpoint.config, dict(loaded), 128)
    assert type(joined.layers[0].qkv) is Linear
    ids, taps = [3, 1, 4, 1, 5, 9, 2, 6], (0, 1, 2)
    (ours, said), (wanted, best) = (
        Witness(one, checkpoint.config).read(ids, taps) for one in (plain, joined))
    torch.testing.assert_close(ours, wanted)
    assert torch.equal(said, best)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
                                   RuntimeError("CUDA error: out of memory")])
def test_a_device_without_memory_for_a_probe_serves_without_it(
    tmp_path, monkeypatch, caplog, error
):
    maker = Maker(error)
    _, _, served = started(write_llama(tmp_path, max_len=128), monkeypatch, maker)
    assert len(maker.met) == 1 and served.layers[0].qkv.weight is not None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "no memory left" in record.message
    assert "give another head" in record.message


@pytest.mark.parametrize("error", [BadCheckpoint("it is of no use"), RuntimeError("odd")])
def test_what_else_a_probe_finds_ends_the_start(tmp_path, monkeypatch, error):
    with pytest.raises(type(error), match=str(error)):
        started(write_llama(tmp_path, max_len=128), monkeypatch, Maker(error))


# ---- kernels


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """What a start on a GPU names: a function of its maker to kernels' names and a note's facts."""
    interpreted = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    folder = write_llama(
        tmp_path, hidden=32, heads=2, kv_heads=1, head_dim=32, intermediate=48, max_len=128)
    names: set[str] = set()
    notes: list[str] = []
    compiling, of, empty = parts.compile_kernels, Done.of, torch.empty

    def here(*size, device=None, **more):
        return empty(*size, device="cpu" if str(device) == "cuda" else device, **more)

    def noted(device, *facts):
        notes.append(repr(facts))
        return of(device, *facts)

    monkeypatch.setattr(interpreted, "warmup", lambda kernel, *values, grid, **options:
                        names.add(kernel.fn.__name__), raising=False)
    monkeypatch.setattr(attention, "FULL", 8)
    monkeypatch.setattr(torch, "empty", here)
    monkeypatch.setattr(parts.Done, "of", noted)
    monkeypatch.setattr(parts, "compile_kernels", lambda *given, device, **more:
                        compiling(*given, device=CPU, **more))
    given = EngineConfig(
        model=str(folder), max_sequences=4, max_batch_tokens=16, mixed_tokens=16
    ).resolved("cuda")
    checkpoint = open_checkpoint(str(folder))

    def start(maker: Maker | None) -> tuple[set[str], str]:
        names.clear()
        build._compile(family(checkpoint.architecture), checkpoint.config, given, 128, F32,
                       torch.device("cuda"), 3, maker, Event(), Timeline())
        return {*names}, notes[-1]

    return start


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the interpreter")
def test_a_heads_kernels_are_compiled_with_the_models(compiled):
    bare, without = compiled(None)
    maker = Maker(norm_before_fc=True)
    both, with_one = compiled(maker)
    assert maker.asked == [(2, True)], "the head is of the whole model, and has no weights"
    assert both - bare == {
        "_take", "_begin", "_inputs", "_norms", "_attend", "_merge", "_draw", "_gate",
    } - bare
    assert {"_take", "_begin", "_inputs", "_norms", "_attend", "_draw"} <= both
    _, other = compiled(Maker())
    assert len({without, with_one, other}) == 3, "a note of one says nothing of another"


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the interpreter")
def test_a_head_that_cannot_be_opened_costs_the_model_no_kernel(compiled):
    assert compiled(Maker(BadCheckpoint("no such folder"))) == compiled(None)
