"""Sizes, layouts, host buffers and graphs of a GPU's step, one by one.  Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.cuda import layout
from engine.cuda.buckets import bucket, sizes, useful
from engine.cuda.forward import Forward
from engine.cuda.graphs import Graphs
from engine.cuda.layout import ALIGN, Layout, Mirror

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 40, 256, 1000, 2048])
def test_every_count_has_a_bucket_that_wastes_little(most):
    found = sizes(most)
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == most
    for count in range(1, most + 1):
        size = bucket(found, count)
        assert count <= size <= most
        assert size - count < max(8, count // 3), (count, size)
        assert size == min(s for s in found if s >= count)


def test_arrays_of_a_layout_lie_apart_and_host_and_device_agree():
    shapes = {"one": (1,), "flat": (7,), "pairs": (2, 5), "four": (4,), "tail": (3,)}
    made = Layout(shapes)
    places = made.device(torch.arange(made.words))
    words = torch.cat([place.flatten() for place in places.values()]).tolist()
    assert len(set(words)) == len(words) and max(words) < made.words
    assert all(place.flatten()[0] % ALIGN == 0 for place in places.values())
    mirror = Mirror(made.words + 8, 3, torch.device(DEVICE))
    number = mirror.next()
    for i, array in enumerate(mirror.hosts(made)[number].values()):
        array[...] = np.arange(array.size).reshape(array.shape) + 100 * i
    mirror.send(number, made.words)
    for i, (name, array) in enumerate(made.device(mirror.buffer).items()):
        assert tuple(array.shape) == shapes[name]
        assert (array.flatten().cpu() == torch.arange(array.numel()) + 100 * i).all()
    assert not mirror.buffer[made.words :].any(), "more was sent than asked for"


def test_a_mirrors_host_buffers_take_turns():
    made = Layout({"all": (4,)})
    mirror = Mirror(4, 3, torch.device(DEVICE))
    hosts, numbers = mirror.hosts(made), []
    for value in range(6):
        numbers.append(mirror.next())
        hosts[numbers[-1]]["all"][:] = value
    assert sorted(numbers[:3]) == [0, 1, 2] and numbers[3:] == numbers[:3]
    for value, number in enumerate(numbers[3:], start=3):
        mirror.send(number, 4)
        assert mirror.buffer.tolist() == [value] * 4


def test_a_host_buffer_is_given_out_again_only_when_its_copy_is_done(monkeypatch):
    said: list[str] = []

    class Mark:
        def __init__(self) -> None:
            self.copies = 0

        def record(self, stream) -> None:
            self.copies += 1
            said.append("sent")

        def synchronize(self) -> None:
            said.append(f"waited for {self.copies}")

    monkeypatch.setattr(layout, "_mark", lambda device: Mark())
    mirror = Mirror(4, 2, torch.device(DEVICE))
    for _ in range(4):
        mirror.send(mirror.next(), 4)
    assert said[::2] == ["waited for 0"] * 2 + ["waited for 1"] * 2
    assert said[1::2] == ["sent"] * 4


def test_without_capture_a_body_runs_every_time():
    graphs, ran = Graphs(capture=False), []
    for _ in range(3):
        graphs.run("key", lambda: ran.append(1))
    assert len(ran) == 3 and len(graphs) == 0 and "key" not in graphs


class Full(Graphs):
    """Captures on a device that is not there, and has no memory for a graph."""

    def __init__(self, error: Exception) -> None:
        super().__init__(capture=False)
        self.capture, self.error, self.tried = True, error, 0

    def _captured(self, body):
        self.tried += 1
        raise self.error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   RuntimeError("Triton Error [CUDA]: out of memory")])
def test_what_no_graph_can_hold_runs_without_and_is_not_captured_again(error, caplog):
    graphs, ran = Full(error), []
    for _ in range(3):
        graphs.run(("extend", 8), lambda: ran.append(1))
    assert len(ran) == 3 and graphs.tried == 1 and graphs.full and not len(graphs)
    assert len(caplog.records) == 1 and "--gpu-memory-utilization" in caplog.text
    for _ in range(2):
        with pytest.raises(type(error)):
            graphs.run("can do without", lambda: ran.append(1), must=False)
    assert len(caplog.records) == 1


def test_a_capture_that_fails_otherwise_is_an_error():
    graphs = Full(RuntimeError("operation not permitted when stream is capturing"))
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.run("key", lambda: None)
    assert not graphs.full


def test_the_reason_of_a_failed_capture_is_not_hidden_by_its_end(monkeypatch):
    class Graph:
        def capture_begin(self, **given) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("the capture was invalidated")

    def body() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    with pytest.raises(torch.OutOfMemoryError):
        Graphs(capture=False)._captured(body)


def test_a_size_that_a_larger_one_undercuts_is_not_used():
    costs = {1: 5.0, 2: 5.0, 4: 4.0, 8: 6.0, 16: 9.0, 24: 8.5, 32: 12.0}
    assert useful([*costs], costs.__getitem__) == [4, 8, 24, 32]
    assert useful([*costs], float) == [*costs]  # nothing to gain where costs rise
    assert useful([7], lambda size: 0.0) == [7], "the largest always stays"


def test_few_rows_take_no_bucket_whose_products_promise_nothing():
    """At 160 rows cuBLAS may split K, and be quicker than what 128 rows are allowed."""
    forward = SimpleNamespace(sizes=[64, 96, 128, 160, 192, 256])
    costs = {64: 1.0, 96: 3.0, 128: 2.9, 160: 2.0, 192: 2.5, 256: 2.2}
    Forward.keep(forward, costs.__getitem__)
    assert forward.sizes == [64, 128, 160, 256]
    forward.sizes = [16, 32, 48]  # of an engine with small steps
    Forward.keep(forward, float)
    assert forward.sizes == [16, 32, 48]
