"""Put the GPU's side of an engine together, its pages by the memory left.  Runs no plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cache.pages import Pages
from engine.cuda.runner import CudaRunner, Most
from engine.memory import profile

if TYPE_CHECKING:
    from engine.config import ResolvedConfig
    from engine.model_config import ModelConfig
    from engine.models import Model
    from engine.proposer import DeviceDraft
    from engine.timeline import Timeline

GRAPHS = 1 << 30  # bytes kept for captured graphs and what kernels load later
PROBE = 8  # blocks that the largest step is tried on


def sized_runner(
    model: Model, shape: ModelConfig, config: ResolvedConfig, *, size: int, max_len: int,
    dtype: torch.dtype, device: torch.device, head: DeviceDraft | None, drafts: int,
    timeline: Timeline,
) -> CudaRunner:  # fmt: skip
    """A runner whose pages fill the memory that `gpu_memory_utilization` leaves.

    The largest step is run once on a few pages; what it took, weights and graphs are subtracted.
    Raise MemoryError naming every part when nothing is left.
    """
    most = Most(config.max_batch_tokens, config.max_sequences, max_len, drafts)
    each = Pages.bytes_per_block(shape.layers, size, shape.kv_heads, shape.head_dim, dtype)

    def runner(blocks: int, capture: bool) -> CudaRunner:
        pages = Pages(
            shape.layers, blocks + 1, size, shape.kv_heads, shape.head_dim, dtype, device
        )
        return CudaRunner(model, shape, pages, most, head, capture=capture)

    if config.cache.given or device.type == "cpu":
        return runner(config.cache.pool_blocks(each), device.type == "cuda")
    def probe() -> None:
        trial = runner(PROBE, False)
        with timeline.span("kernels"):
            trial.compile()
        with timeline.span("largest step"):
            trial.largest()

    peak = profile(probe, device)
    room = peak.kv_bytes(GRAPHS, config.gpu_memory_utilization)
    with timeline.span("pages"):
        return runner(config.cache.pool_blocks(each, room) - 1, True)
