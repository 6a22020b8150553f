"""`slipstream bench decode|prefill` on a GPU: each stage of a step beside its floor.

Speaks no HTTP.  The floor of a stage is what its bytes need at the rate of a plain copy, or its
operations at that of a large product, both measured first; the stages' times are those of the
device's own trace of the real loop, and add up to the traced step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.bench import Decoders, Row, prefilling, row
from engine.build import DTYPES
from engine.cuda.events import event
from engine.cuda.trace import GAPS, OTHER, STAGES, Shares, Span, shares, waits
from engine.loop import Engine

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.config import ResolvedConfig
    from engine.model_config import ModelConfig

BATCHES = (1, 8, 32, 128, 200)
LENGTHS = (128, 512, 2048, 4096, 16_384)
CONTEXT = 512  # tokens before decoding starts
TRACED = 20  # steps of a trace
STEPS = 200  # of a timing, at most
COPIED, CUBED = 1 << 30, 8192  # bytes, rows and columns of what the roofs are measured with
UPLOADED = 16.0  # bytes of a token's integers: id, origin, position, page slot


@dataclass(frozen=True, slots=True)
class Roofs:
    """What the card does at most."""

    bytes_s: float  # read and written, of a copy
    operations_s: float  # of a product in the model's type

    def floor(self, read: float, operations: float = 0.0) -> float:
        """Seconds that so many bytes and operations take at least."""
        return max(read / self.bytes_s, operations / self.operations_s)


def decode(
    config: ResolvedConfig, checkpoint: Checkpoint, seconds: float,
    batches: Sequence[int] = (), context: int = 0,
) -> Iterator[Row]:  # fmt: skip
    """A step's time by stage, what the host does of it, and what draining costs; each batch."""
    shape, dtype = checkpoint.config, DTYPES[config.dtype]
    roofs = measured(dtype)  # first: the engine takes the memory
    yield row("copy", roofs.bytes_s / 1e9, "GB/s", "measured: read and written, 1 GiB")
    yield _product_row(roofs)
    engine = _warmed(config, checkpoint)
    try:
        traced(engine, 0)  # the profiler's own start takes seconds, once
        for batch in batches or BATCHES:
            yield from _of_batch(engine, shape, roofs, dtype.itemsize, batch,
                                 context or CONTEXT, seconds)
    finally:
        engine.close()


def prefill(config: ResolvedConfig, checkpoint: Checkpoint, seconds: float) -> Iterator[Row]:
    """tok/s by prompt length, one prompt at a time; percent of a large matrix product's speed."""
    shape = checkpoint.config
    roofs = measured(DTYPES[config.dtype])
    yield _product_row(roofs)
    engine = _warmed(config, checkpoint)
    try:
        for length in LENGTHS:
            if length + 1 > engine.hello.max_len:
                continue
            prefilling(engine, shape, length, 0.0, "warm")
            times = prefilling(engine, shape, length, seconds)
            took, floor_s = median(times), prompt_operations(shape, length) / roofs.operations_s
            yield row(f"prefill {length:>6} tokens", length / took, "tok/s",
                      f"{floor_s / took:.0%} of the matrix roof, {took * 1e3:.2f} ms, median of "
                      f"{len(times)}")
    finally:
        engine.close()


def _warmed(config: ResolvedConfig, checkpoint: Checkpoint) -> Engine:
    """An engine that has had its idle moments: no bucket is captured within a measurement."""
    engine = Engine(config, checkpoint)
    while engine.runner.idle():
        pass
    return engine


def _product_row(roofs: Roofs) -> Row:
    return row("matrix product", roofs.operations_s / 1e12, "TFLOP/s", f"measured: {CUBED} cubed")


def _of_batch(
    engine: Engine, shape: ModelConfig, roofs: Roofs, itemsize: int, batch: int, context: int,
    seconds: float,
) -> Iterator[Row]:  # fmt: skip
    name = f"decode {batch:>3} x {context}"
    with Decoders(engine, shape, batch, context) as decoders:
        watch = Watch()
        with watch.over(engine.runner, "launch", "settle", "collect"), \
                watch.over(engine, "_commit"):  # fmt: skip
            run = decoders.run(seconds, STEPS)
        at = decoders.context
        found = shares(traced(engine, TRACED), shape.layers)
        with _drained(engine):
            alone = decoders.run(seconds / 4, STEPS // 4)
            drained = waits(traced(engine, TRACED))
    step_s = run.seconds / run.steps
    floors = stage_floors(shape, roofs, itemsize, batch, at)
    yield from stage_rows(name, found, floors, TRACED)
    whole = sum(floors.values())
    yield row(f"{name}: step", step_s * 1e6, "us", _beside(whole * 1e6, step_s * 1e6))
    yield row(f"{name}: output", run.tokens / run.seconds, "tok/s", f"{run.steps} steps")
    yield from host_rows(name, watch.seconds, run.seconds, run.steps)
    if drained:
        yield row(f"{name}: wait of a step for its host", median(drained), "us",
                  f"when it drafts: depth 0, step {alone.seconds / alone.steps * 1e6:,.1f} us")


@contextmanager
def _drained(engine: Engine) -> Iterator[None]:
    """Let no step fly while the next is planned, as with a proposer on the host."""
    engine.drain()
    runner: Any = engine.runner
    depth, runner.depth = runner.depth, 0
    try:
        yield
    finally:
        runner.depth = depth


# ---- arithmetic ----------------------------------------------------------------------------------


def stage_floors(
    shape: ModelConfig, roofs: Roofs, itemsize: int, rows: int, context: float
) -> dict[str, float]:
    """Seconds that each stage of a decode step takes at least; `context` tokens a row.

    Activations are counted as read and written once by each kernel.
    """
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate

    def product(columns: int, depth: int, out: int, size: int = itemsize) -> float:
        moved = itemsize * (columns * depth + rows * depth) + size * rows * out
        return roofs.floor(moved, 2.0 * rows * columns * depth)

    norms = 2 * shape.layers + 1
    return {
        "qkv": shape.layers * product(heads + 2 * kv_heads, hidden, heads + 2 * kv_heads),
        "out": shape.layers * product(hidden, heads, 2 * hidden),  # adds to what it writes
        "gate_up": shape.layers * product(2 * inner, hidden, inner),
        "down": shape.layers * product(hidden, inner, 2 * hidden),
        "head": product(shape.vocab, hidden, shape.vocab, 4),
        "attention": shape.layers * roofs.floor(
            itemsize * rows * (2 * kv_heads * context + 2 * heads), 4.0 * rows * heads * context),
        "norms, rope, embed": roofs.floor(2.0 * itemsize * rows * hidden * (norms + 1)),
        "sampler": roofs.floor(4.0 * rows * shape.vocab),
        "copies": roofs.floor(UPLOADED * rows),
    }  # fmt: skip


def prompt_operations(shape: ModelConfig, length: int) -> float:
    """Of a whole prompt: every layer for each token, causal attention, the head for the last."""
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * heads + 2 * kv_heads) + 3 * shape.hidden * shape.intermediate
    attention = 2.0 * heads * length * (length + 1)  # scores and values, half of the square
    return 2.0 * length * shape.layers * layer + shape.layers * attention + (
        2.0 * shape.vocab * shape.hidden)


def stage_rows(
    name: str, found: Shares, floors: dict[str, float], steps: int
) -> Iterator[Row]:
    """A row a stage that took time, then their sum; microseconds of one step."""
    for stage in STAGES:
        took = found.times[stage] / steps
        if not took:
            continue
        floor = {"floor": floors[stage] * 1e6} if stage in floors else {}
        beside = _beside(floor["floor"], took) if floor else ""
        if stage == OTHER:
            beside = ", ".join(sorted(known[:40] for known in found.unknown))
        if stage == GAPS:
            beside = f"{found.times[GAPS] / found.total:.0%} of the traced step"
        yield {**row(f"{name}: {stage}", took, "us", beside), **floor}
    yield row(f"{name}: all stages", found.total / steps, "us", "a step while it is traced")


def host_rows(name: str, parts: dict[str, float], total: float, steps: int) -> Iterator[Row]:
    """What the host does in a step, and how long it waits for the device; microseconds."""
    titles = {"launch": "pack, launch forward", "settle": "launch settle", "_commit": "commit",
              "collect": "wait for the device"}  # fmt: skip
    rest = total - sum(parts.values())
    for part, title in titles.items():
        yield row(f"{name}: host, {title}", parts.get(part, 0.0) / steps * 1e6, "us", "")
    yield row(f"{name}: host, plan and messages", rest / steps * 1e6, "us", "")


def _beside(floor: float, took: float) -> str:
    return f"{floor / took:.0%} of what the card allows, {floor:,.1f} us"


# ---- measuring -----------------------------------------------------------------------------------


class Watch:
    """Adds up the seconds spent in some methods of some objects."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def over(self, owner: object, *names: str) -> Iterator[None]:
        """Watch these methods of one instance while the block lasts."""
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(owner, name)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[name] = 0.0

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


def traced(engine: Engine, steps: int) -> list[Span]:
    """What the device ran in so many steps of the loop, from an idle device to an idle device."""
    engine.drain()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            engine.step()
        engine.drain()
        torch.cuda.synchronize()
    return spans(recorded.events() or [])


def spans(events: Sequence[Any]) -> list[Span]:
    """Kernels and copies among a profiler's events."""
    return [
        Span(one.name, one.time_range.start, one.time_range.end)
        for one in events
        if one.device_type.name == "CUDA" and " Sync" not in one.name
        and not getattr(one, "is_user_annotation", False)
    ]  # fmt: skip


def measured(dtype: torch.dtype) -> Roofs:
    """The card's roofs now."""
    copied = 2 * COPIED / _best(_copy())
    product = 2 * CUBED**3 / _best(_product(dtype))
    torch.cuda.empty_cache()
    return Roofs(copied, product)


def _copy() -> Callable[[], object]:
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(dtype: torch.dtype) -> Callable[[], object]:
    left, right = (torch.randn(CUBED, CUBED, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _best(work: Callable[[], object], rounds: int = 10) -> float:
    """Device seconds of the fastest of some runs."""
    work()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = event(timing=True), event(timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return min(times)
