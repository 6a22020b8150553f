"""Put the GPU's side of an engine together, its pages by the memory left.  Runs no plan."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from cache.pages import Pages
from engine.config import BadConfig
from engine.cuda.done import Done
from engine.cuda.flight import Most
from engine.cuda.runner import SPLITS, CudaRunner
from engine.kernels.attention_plan import LINES
from engine.memory import profile
from engine.proposer import CapturedDraft

if TYPE_CHECKING:
    from threading import Event

    from engine.config import ResolvedConfig
    from engine.model_config import ModelConfig
    from engine.models import Model
    from engine.proposer import AnyDraft
    from engine.timeline import Timeline

log = logging.getLogger("engine.cuda.parts")

GRAPHS = 1 << 30  # bytes kept for captured graphs and what kernels load later
KINDS = (torch.bfloat16, torch.float32)
PROBE = 8  # blocks that the largest step is tried on


def check(shape: ModelConfig, dtype: torch.dtype) -> None:
    """Raise BadConfig for what the kernels do not know, before weights are loaded."""
    if dtype not in KINDS:
        raise BadConfig(
            f"dtype {str(dtype).removeprefix('torch.')} is not served on a GPU. Use bfloat16 "
            "(auto) or float32, or start with --device cpu."
        )
    group = shape.heads // shape.kv_heads
    for what, value, known in (("head_dim", shape.head_dim, sorted(SPLITS)),
                               ("query heads a key-value head", group, range(1, LINES + 1))):
        if value not in known:
            raise BadConfig(
                f"The model's {what} is {value}; on a GPU {', '.join(map(str, known))} are served. "
                "Start with --device cpu, or choose another model."
            )


def compile_kernels(
    model: Model, shape: ModelConfig, config: ResolvedConfig, *, size: int, max_len: int,
    dtype: torch.dtype, device: torch.device, drafts: int, stop: Event,
    head: CapturedDraft | None = None,
) -> None:  # fmt: skip
    """Compile and load what a runner of such a model launches; give up once `stop` is set.

    Of `model` and `head` only shapes and dtypes are looked at (those without values will do), so
    that this can be done while the weights are on their way.  Takes and gives back a runner's
    buffers.  After a start that compiled everything only what is launched at once is loaded.
    """
    most = Most(config.max_batch_tokens, config.max_sequences, max_len, drafts)
    pages = Pages(
        shape.layers, PROBE + 1, size, shape.kv_heads, shape.head_dim, dtype, device
    )
    drafted = head.shape if head is not None else None
    done = Done.of(device, type(model).__qualname__, shape, most, size, dtype, drafted)
    with suppress(torch.OutOfMemoryError):  # the weights came first: sizing the pages will tell
        runner = CudaRunner(model, shape, pages, most, head)
        if done.noted() and _loaded(runner, stop):
            return
        runner.compile(stop)
        if not stop.is_set():
            done.note()


def _loaded(runner: CudaRunner, stop: Event) -> bool:
    """Whether loading what a start needs was enough; if that goes wrong, everything is compiled."""
    try:
        return runner.load(stop)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        log.exception("kernels could not be loaded as after an earlier start")
        return False


def sized_runner(
    model: Model, shape: ModelConfig, config: ResolvedConfig, *, size: int, max_len: int,
    dtype: torch.dtype, device: torch.device, head: AnyDraft | None, drafts: int,
    timeline: Timeline,
) -> CudaRunner:  # fmt: skip
    """A runner whose pages fill the memory that `gpu_memory_utilization` leaves.

    The largest step is run once on a few pages; what it took, weights and graphs are subtracted.
    Kernels that are not ready are compiled there, one by one.  Raise MemoryError naming every part
    when nothing is left.
    """
    most = Most(config.max_batch_tokens, config.max_sequences, max_len, drafts)
    each = Pages.bytes_per_block(shape.layers, size, shape.kv_heads, shape.head_dim, dtype)

    if isinstance(head, CapturedDraft):
        each += head.block_bytes(size)

    def runner(blocks: int, capture: bool) -> CudaRunner:
        pages = Pages(
            shape.layers, blocks + 1, size, shape.kv_heads, shape.head_dim, dtype, device
        )
        return CudaRunner(model, shape, pages, most, head, capture=capture)

    if config.cache.given or device.type == "cpu":
        with timeline.span("pages"):
            return runner(config.cache.pool_blocks(each), device.type == "cuda")

    def probe() -> None:
        with timeline.span("buffers"):
            trial = runner(PROBE, False)
        with timeline.span("largest step"):
            trial.largest()
            torch.cuda.synchronize(device)

    with timeline.span("memory"):
        peak = profile(probe, device)
        room = peak.kv_bytes(GRAPHS, config.gpu_memory_utilization)
    with timeline.span("pages"):
        return runner(config.cache.pool_blocks(each, room) - 1, True)
