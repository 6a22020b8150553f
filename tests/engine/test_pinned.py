"""Streaming files into tensors: values, splits, reuse of buffers, damage.  Loads no other way.

`LateLane` stands for a device: a copy reads its buffer only when somebody waits for it, so a buffer
that is filled again too early gives wrong values.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from engine import pinned
from engine.checkpoint import open_checkpoint
from engine.models.llama import Llama
from engine.pinned import CudaLane, HostLane, Part, ReadFailed, Source, read, split
from engine.weights import BadWeights, _in_safetensors, load, stream
from tests.tiny import write_llama
from tests.tiny_gguf import VOCAB, write_gguf


class LateLane(HostLane):
    """Copies in order, each as late as allowed; poisons what was not waited for."""

    made: list[LateLane]  # of this test, see `lanes`

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.queue: list[tuple[int, Sequence[Part]]] = []
        self.waits = 0
        self.finished = False
        LateLane.made.append(self)

    def copy(self, number: int, parts: Sequence[Part]) -> None:
        assert number not in [busy for busy, _ in self.queue], "two copies out of one buffer"
        self.queue.append((number, parts))

    def wait(self, number: int) -> None:
        self.waits += 1
        while number in [busy for busy, _ in self.queue]:
            super().copy(*self.queue.pop(0))

    def finish(self) -> None:
        while self.queue:
            super().copy(*self.queue.pop(0))
        self.finished = True


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """The lanes that a test opens."""
    LateLane.made = []
    return LateLane.made


def streamed(
    folder: Path, dtype: torch.dtype, lane=LateLane, device: str = "cpu", **how
) -> dict[str, torch.Tensor]:
    """What `load` does on a GPU, here on the CPU."""
    checkpoint = open_checkpoint(str(folder))
    expected = Llama.expected(checkpoint.config)
    with ExitStack() as files:
        found = {stored.name: stored for stored in _in_safetensors(checkpoint, files)}
        wanted = [found[name] for name in expected]
        tensors = {stored.name: torch.full(stored.shape, -77.0, dtype=dtype, device=device)
                   for stored in wanted}
        if device != "cpu":
            torch.cuda.synchronize()
        stream(wanted, tensors, lane, **how)
    return tensors


def plain(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(str(folder))
    return load(checkpoint, Llama.expected(checkpoint.config), dtype)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [8, 1000, 4104, 1 << 20])
@pytest.mark.parametrize("stored", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_streamed_tensors_are_those_of_the_plain_loader(tmp_path, stored, dtype, piece):
    folder = write_llama(tmp_path, dtype=stored, shards=2, tied=False, attention_bias=True,
                         layers=1, hidden=24, heads=3, kv_heads=1, intermediate=37, vocab=259)
    readers = 1 if piece == 8 else 3
    assert same(streamed(folder, dtype, readers=readers, piece=piece), plain(folder, dtype))


def test_tensors_that_begin_at_odd_bytes_are_cast_right(tmp_path):
    file, values = tmp_path / "f", torch.randn(1001)
    file.write_bytes(b"abc" + values.numpy().tobytes() + b"x" + values.double().numpy().tobytes())
    targets = [torch.empty(1001, dtype=torch.bfloat16) for _ in range(3)]
    at = [(3, torch.float32), (3 + 4004 + 1, torch.float64), (3, torch.float32)]
    read([Source("t", file, offset, dtype, target)
          for (offset, dtype), target in zip(at, targets, strict=True)], LateLane,
         lambda size: None, piece=100)
    for target in targets:
        assert target.equal(values.bfloat16())


def test_neighbours_share_a_read_and_long_tensors_are_cut(tmp_path):
    small = [torch.empty(3, dtype=torch.bfloat16) for _ in range(4)]
    sources = [Source(f"s{i}", tmp_path / "a", 100 + 6 * i, torch.bfloat16, target)
               for i, target in enumerate(small)]
    gap = Source("gap", tmp_path / "a", 200, torch.float32, torch.empty(10))
    other = Source("other", tmp_path / "b", 124, torch.float32, torch.empty(1))
    pieces = list(split([other, gap, *reversed(sources)], 24))
    assert [(one.file.name, one.offset, one.size, len(one.parts)) for one in pieces] == [
        ("a", 100, 24, 4), ("a", 200, 24, 1), ("a", 224, 16, 1), ("b", 124, 4, 1)]


@pytest.mark.parametrize("limit", [8, 13, 64, 1000])
def test_pieces_cover_every_value_once_whatever_the_limit(tmp_path, limit):
    draw, sources, at = torch.Generator().manual_seed(limit), [], 0
    for number in range(20):
        count = int(torch.randint(1, 60, (1,), generator=draw))
        dtype = (torch.float64, torch.float16, torch.float32)[number % 3]
        sources.append(Source(str(number), tmp_path, at, dtype, torch.empty(count)))
        at += sources[-1].size
    seen = {source.name: torch.zeros(source.target.numel(), dtype=torch.int64)
            for source in sources}
    for piece in split(sources, limit):
        assert 0 < piece.size <= limit
        for part in piece.parts:
            byte = part.source.offset + part.first * part.source.dtype.itemsize
            assert byte == piece.offset + part.start
            seen[part.source.name][part.first : part.first + part.count] += 1
    assert all((counts == 1).all() for counts in seen.values())


def test_buffers_are_no_larger_than_the_model_needs():
    assert pinned.piece_size(15 * 10**9, 8) == pinned.PIECE
    assert pinned.piece_size(270_000_000, 8) == 16 << 20
    assert pinned.piece_size(0, 8) == pinned.piece_size(5_000_000, 8) == 1 << 20
    for total in (20_000_000, 10**8, 4 * 10**8):
        size = pinned.piece_size(total, 8)
        assert total / 2 < size * 8 * pinned.BUFFERS <= total


# ---- buffers and threads -------------------------------------------------------------------------


def test_buffers_are_bounded_and_waited_for_before_they_are_filled_again(tmp_path, lanes):
    folder = write_llama(tmp_path)
    assert same(streamed(folder, torch.float32, readers=2, piece=512), plain(folder, torch.float32))
    assert len(lanes) == 2
    assert all(buffer.nbytes <= 512 for lane in lanes for buffer in lane.buffers)
    assert all(len(lane.buffers) == pinned.BUFFERS and lane.finished for lane in lanes)
    assert sum(lane.waits for lane in lanes) > 100


def test_the_late_device_would_show_a_buffer_filled_too_early(tmp_path):
    class Hasty(LateLane):
        def wait(self, number: int) -> None:
            self.queue = [(-1, parts) for _, parts in self.queue]  # forgets what it must wait for

        def copy(self, number: int, parts: Sequence[Part]) -> None:
            self.queue.append((number, parts))

        def finish(self) -> None:
            for number, parts in self.queue:
                HostLane.copy(self, max(number, 0), parts)

    folder = write_llama(tmp_path)
    hasty = streamed(folder, torch.float32, Hasty, readers=1, piece=512)
    assert not same(hasty, plain(folder, torch.float32))


def test_one_read_needs_one_reader_and_no_read_none(tmp_path, lanes):
    file, target = tmp_path / "f", torch.empty(4)
    file.write_bytes(torch.arange(4.0).numpy().tobytes())
    read([Source("t", file, 0, torch.float32, target)], LateLane, lambda size: None)
    assert target.tolist() == [0, 1, 2, 3]
    assert len(lanes) == 1
    read([], LateLane, lambda size: None)
    assert len(lanes) == 1


def test_progress_counts_bytes_up_to_the_whole_on_the_callers_thread(tmp_path):
    seen: list[tuple[int, int, int]] = []
    folder = write_llama(tmp_path)
    streamed(folder, torch.bfloat16, piece=4096,
             progress=lambda done, total: seen.append((done, total, threading.get_ident())))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert {thread for _, _, thread in seen} == {threading.get_ident()}


# ---- damage --------------------------------------------------------------------------------------


def test_a_file_that_ends_too_early_or_is_gone_names_a_tensor(tmp_path):
    target = torch.empty(1000)
    file = tmp_path / "f"
    for content in (b"x" * 3999, b"", None):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ReadFailed) as caught:
            read([Source("t", file, 0, torch.float32, target)], LateLane, lambda size: None,
                 piece=256)
        assert caught.value.source.name == "t"


def test_a_shard_cut_while_it_streams_is_our_error(tmp_path):
    folder = write_llama(tmp_path)
    file = folder / "model.safetensors"

    class Cutting(LateLane):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size - 1000)

    with pytest.raises(BadWeights, match=r"cannot be read from model\.safetensors"):
        streamed(folder, torch.float32, Cutting, piece=4096)


def test_a_reader_that_fails_ends_the_others_and_their_copies(tmp_path, lanes):
    folder = write_llama(tmp_path)

    class Failing(LateLane):
        def copy(self, number: int, parts: Sequence[Part]) -> None:
            super().copy(number, parts)
            if self.waits == 20:
                raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        streamed(folder, torch.float32, Failing, readers=3, piece=64)
    assert all(lane.finished for lane in lanes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]


# ---- the card ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [1000, 1 << 20])
@pytest.mark.parametrize("stored", ["float32", "float64", "bfloat16"])
def test_a_gpu_gets_the_same_bits(tmp_path, stored, piece):
    folder = write_llama(tmp_path, dtype=stored, shards=3, tied=False)
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (torch.bfloat16, torch.float32):
        tensors = streamed(folder, dtype, lambda size: CudaLane(size, device), str(device),
                           piece=piece)
        moved = {name: tensor.cpu() for name, tensor in tensors.items()}
        assert same(moved, plain(folder, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_load_puts_everything_on_the_gpu(tmp_path, kind):
    folder = write_llama(tmp_path / "hf", vocab=VOCAB)
    path = folder if kind == "safetensors" else write_gguf(folder, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(str(path))
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = load(checkpoint, Llama.expected(checkpoint.config), torch.bfloat16, None, device)
    assert {tensor.device for tensor in tensors.values()} == {device}
    moved = {name: tensor.cpu() for name, tensor in tensors.items()}
    assert same(moved, plain(path, torch.bfloat16))
