"""What is left of a GPU for KV pages: the sum, refusals, the reading of peaks.  Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from engine.config import BadConfig
from engine.memory import GIB, Peak, kv_bytes, profile

GPU = torch.device("cuda", 0)


class Device:
    """torch.cuda's counters over a made-up device; `use` and `release` are what a step does."""

    def __init__(self, total: int, foreign: int, weights: int) -> None:
        self.total, self.foreign = total, foreign
        self.allocated = self.reserved = weights
        self.peak = 10 * total  # of something long gone: must not be read without a reset
        self.waits = 0

    def use(self, size: int) -> None:
        if self.foreign + self.reserved + size > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.reserved)

    def release(self, size: int) -> None:
        self.allocated -= size

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.reserved

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.foreign - self.reserved, self.total


def test_what_is_left_is_the_share_less_everything_else():
    assert kv_bytes(1000, 100, 300, 50, 20, 0.9) == 430
    assert kv_bytes(1000, 0, 0, 0, 0, 1.0) == 1000
    assert kv_bytes(1000, 100, 300, 50, 20, 0.471) == 1


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(utilization):
    with pytest.raises(BadConfig, match="above 0, at most 1"):
        kv_bytes(1000, 0, 0, 0, 0, utilization)


def test_a_model_that_needs_a_larger_share_is_told_a_share_that_works():
    parts = (80 * GIB, 2 * GIB, 60 * GIB, 3 * GIB, GIB)
    with pytest.raises(MemoryError, match=r"weights need 60\.00 GiB.*--gpu-mem\S+ \d\.\d\d") as it:
        kv_bytes(*parts, 0.8)
    advised = float(str(it.value).partition("--gpu-memory-utilization ")[2].split()[0])
    assert kv_bytes(*parts, advised) > 0


def test_a_crowded_gpu_is_told_to_be_emptied_and_a_small_one_to_be_changed():
    with pytest.raises(MemoryError, match=r"50\.00 GiB are held by others.*nvidia-smi"):
        kv_bytes(80 * GIB, 50 * GIB, 30 * GIB, 2 * GIB, 0, 0.9)
    with pytest.raises(MemoryError, match="Choose a smaller model"):
        kv_bytes(24 * GIB, 0, 28 * GIB, 2 * GIB, 0, 0.9)


def test_a_profiled_step_tells_its_worst_moment_and_what_others_hold():
    device = Device(total=1000, foreign=100, weights=300)
    device.reserved = 420  # freed, not given back: must not count as weights

    def step() -> None:
        device.use(200)
        device.release(150)
        device.use(120)
        device.release(170)
        device.foreign += 30  # kernels are loaded while it runs

    peak = profile(step, GPU, device)
    assert peak == Peak(total=1000, others=130, weights=300, activation=200)
    assert device.reserved == 300
    assert device.waits == 2
    assert peak.kv_bytes(20, 0.9) == 900 - 130 - 300 - 200 - 20


def test_a_step_that_takes_nothing_leaves_everything():
    assert profile(lambda: None, GPU, Device(1000, 0, 10)) == Peak(1000, 0, 10, 0)


def test_a_step_that_does_not_fit_says_what_to_do_and_other_errors_pass():
    device = Device(1000, 100, 300)
    with pytest.raises(MemoryError, match="--max-num-batched-tokens"):
        profile(lambda: device.use(5000), GPU, device)
    with pytest.raises(ZeroDivisionError):
        profile(lambda: print(1 / 0), GPU, device)


@pytest.mark.gpu
def test_the_real_counters_see_a_real_allocation():
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    size = 512 << 20

    def step() -> None:
        torch.empty(size, dtype=torch.uint8, device=device).fill_(1)

    peak = profile(step, device)
    assert size <= peak.activation < size + (64 << 20)
    assert peak.weights >= kept.nbytes
    assert 0 < peak.others < peak.total
    assert peak.kv_bytes(GIB, 0.9) < 0.9 * peak.total
