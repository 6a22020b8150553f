"""`slipstream bench decode|prefill`: the engine alone, beside what this machine allows.

Speaks no HTTP.  Random prompts, no stop ids, no cache hits: the work is the same every time.  On a
GPU the same work is measured stage by stage: engine/cuda/bench.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import torch

from engine.build import DTYPES
from engine.checkpoint import open_checkpoint
from engine.config import BadConfig, EngineConfig
from engine.device import pick
from engine.loop import Engine
from engine.messages import Abort, Out, Sampling, Step, Submit

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.config import ResolvedConfig
    from engine.model_config import ModelConfig

Row = dict[str, object]  # what, value, unit, beside
BATCHES = (1, 4, 16)
LENGTHS = (128, 512, 2048)
PROMPT = 128  # tokens before decoding starts
LEFT = 16  # tokens that a sequence keeps before its end
PATIENCE_S = 120.0  # no measurement may take longer to begin


def measured(what: str, model: str, device: str, **how: Any) -> Iterator[Row]:
    """`decode` or `prefill` of a model, as it comes; raise BadConfig or BadCheckpoint."""
    config = EngineConfig(model=model, device=device).check()
    measure: Any = {"decode": decode, "prefill": prefill}[what]
    found: Iterator[Row] = measure(config, open_checkpoint(model), **how)
    return found


def decode(
    config: EngineConfig, checkpoint: Checkpoint, seconds: float,
    batches: Sequence[int] = (), context: int = 0,
) -> Iterator[Row]:  # fmt: skip
    """A step beside its floor, with so many sequences of `context` tokens; () and 0 = the usual."""
    kind = pick(config.device).type
    resolved = _roomy(config, kind, batches)
    if kind == "cuda":
        from engine.cuda import bench  # late: needs Triton, which a CPU engine does not

        yield from bench.decode(resolved, checkpoint, seconds, batches, context)
    else:
        yield from _decode(resolved, checkpoint, seconds, batches or BATCHES, context or PROMPT)


def prefill(config: EngineConfig, checkpoint: Checkpoint, seconds: float) -> Iterator[Row]:
    """tok/s by prompt length, one prompt at a time; percent of a large matrix product's speed."""
    kind = pick(config.device).type
    if kind == "cuda":
        from engine.cuda import bench  # late: as above

        yield from bench.prefill(config.resolved(kind), checkpoint, seconds)
    else:
        yield from _prefill(config, checkpoint, seconds)


def _roomy(config: EngineConfig, kind: str, batches: Sequence[int]) -> ResolvedConfig:
    """With room for the largest batch."""
    resolved = config.resolved(kind)
    most = max(batches, default=0)
    if config.max_sequences is None and most > resolved.max_sequences:
        return msgspec.structs.replace(config, max_sequences=most).resolved(kind)
    return resolved


def _decode(
    config: EngineConfig, checkpoint: Checkpoint, seconds: float, batches: Sequence[int],
    context: int,
) -> Iterator[Row]:  # fmt: skip
    """ms a step and tok/s; percent of the time that memory needs."""
    engine = Engine(config, checkpoint)
    dtype = DTYPES[config.dtype]
    try:
        bandwidth = _bandwidth()
        yield row("memory read", bandwidth / 1e9, "GB/s", "measured: the sum of a large array")
        for batch in batches:
            with Decoders(engine, checkpoint.config, batch, context) as decoders:
                before = decoders.context
                run = decoders.run(seconds)
                mean = (before + decoders.context) / 2
            bytes_read = dtype.itemsize * (
                parameters(checkpoint.config) + batch * mean * kv_values(checkpoint.config)
            )
            step_s, bound_s = run.seconds / run.steps, bytes_read / bandwidth
            yield row(f"decode {batch:>2} sequences: step", step_s * 1e3, "ms",
                      f"{bound_s / step_s:.0%} of the memory roof, {bound_s * 1e3:.2f} ms")
            yield row(f"decode {batch:>2} sequences: output", run.tokens / run.seconds, "tok/s",
                      f"{bytes_read / step_s / 1e9:.1f} GB/s")
    finally:
        engine.close()


def _prefill(config: EngineConfig, checkpoint: Checkpoint, seconds: float) -> Iterator[Row]:
    engine = Engine(config, checkpoint)
    try:
        flops = _flops(DTYPES[config.dtype])
        yield row("matrix product", flops / 1e9, "GFLOP/s", "measured: 2048 cubed")
        for length in LENGTHS:
            if length + 1 > engine.hello.max_len:
                continue
            times = prefilling(engine, checkpoint.config, length, seconds)
            speed = length / float(np.median(times))
            share = speed * 2 * parameters(checkpoint.config) / flops
            yield row(f"prefill {length:>5} tokens", speed, "tok/s",
                      f"{share:.0%} of the arithmetic roof, median of {len(times)}")
    finally:
        engine.close()


def parameters(shape: ModelConfig) -> int:
    """Weights that one token reads: all layers and the output head."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    feed_forward = 3 * shape.hidden * shape.intermediate
    return shape.layers * (attention + feed_forward) + shape.vocab * shape.hidden


def kv_values(shape: ModelConfig) -> int:
    """Numbers that one token of context adds to each step."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of the loop."""

    steps: int
    tokens: int
    seconds: float


class Decoders:
    """So many sequences that all decode, while the `with` block lasts."""

    def __init__(self, engine: Engine, shape: ModelConfig, batch: int, context: int) -> None:
        """Prompts of `context` tokens; raise BadConfig when the model takes no longer ones."""
        self._room = engine.hello.max_len - context
        if context < 1 or self._room <= 2 * LEFT:
            raise BadConfig(f"A context of {context} tokens leaves too little to decode of the "
                            f"{engine.hello.max_len} that this engine accepts; take fewer.")
        self._engine, self._shape, self._context = engine, shape, context
        self._names = [f"decode-{batch}-{i}" for i in range(batch)]

    def __enter__(self) -> Self:
        """Compute the prompts, and a few steps: the first ones allocate."""
        for number, name in enumerate(self._names):
            self._engine.inbox.put(_submit(name, self._shape, self._context, self._room, number))
        seen: set[str] = set()
        start = time.monotonic()
        while len(seen) < len(self._names):
            assert time.monotonic() - start < PATIENCE_S, "the prompts never finished"
            seen.update(out.id for out in _outs(self._engine))
        for _ in range(3):
            _outs(self._engine)
        if len(self._engine.scheduler.running) < len(self._names):
            raise BadConfig(f"The KV pages do not hold {len(self._names)} sequences of "
                            f"{self._context} tokens; take fewer, or shorter ones.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for name in self._names:
            self._engine.inbox.put(Abort(name))
        self._engine.step()
        self._engine.drain()

    @property
    def context(self) -> float:
        """Mean tokens of the sequences now."""
        running = self._engine.scheduler.running
        return sum(len(seq.tokens) for seq in running) / len(running)

    def run(self, seconds: float, most: int = 1 << 30) -> Stretch:
        """Steps for so long, or `most` of them, or until a sequence is near its end."""
        running = self._engine.scheduler.running
        most = min(most, min(seq.remaining for seq in running) - LEFT)
        steps = tokens = 0
        start = time.perf_counter()
        while not steps or ((took := time.perf_counter() - start) < seconds and steps < most):
            tokens += sum(len(out.tokens) for out in _outs(self._engine))
            steps += 1
        return Stretch(steps, tokens, took)


def prefilling(
    engine: Engine, shape: ModelConfig, length: int, seconds: float, name: str = "prefill"
) -> list[float]:
    """Seconds from arrival to first token, for as many prompts as fit into `seconds` (2 to 20)."""
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 2 or (time.monotonic() - begin < seconds and len(times) < 20):
        number = length * 100 + len(times)
        engine.inbox.put(_submit(f"{name}-{number}", shape, length, 1, number))
        start = time.perf_counter()
        while not _outs(engine):
            assert time.perf_counter() - start < PATIENCE_S, "the prompt never finished"
        times.append(time.perf_counter() - start)
    return times


def _submit(name: str, shape: ModelConfig, length: int, most: int, seed: int) -> Submit:
    prompt = np.random.default_rng(seed).integers(0, shape.vocab, length).tolist()
    return Submit(name, prompt, most, Sampling(temperature=0.0), namespace=name.encode())


def _outs(engine: Engine) -> list[Out]:
    return [out for reply in engine.step() if isinstance(reply, Step) for out in reply.outs]


def _bandwidth() -> float:
    """Bytes a second that the cores read together."""
    array = torch.ones(1 << 27, dtype=torch.float32)  # 512 MiB: far beyond any cache
    return array.nbytes / _best(lambda: array.sum())


def _flops(dtype: torch.dtype) -> float:
    """Operations a second of a large product in this type."""
    size = 2048
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best(lambda: left @ right)


def _best(work: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of the fastest of some runs: the machine, not its other guests."""
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def row(what: str, value: float, unit: str, beside: str) -> Row:
    """A line of a benchmark."""
    return {"what": what, "value": value, "unit": unit, "beside": beside}
