"""`slipstream bench decode|prefill`: the engine alone, beside what this machine allows.

Speaks no HTTP.  Random prompts, no stop ids, no cache hits: the work is the same every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.build import DTYPES
from engine.loop import Engine
from engine.messages import Abort, Out, Sampling, Step, Submit

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.config import EngineConfig
    from engine.model_config import ModelConfig

Row = dict[str, object]  # what, value, unit, beside
BATCHES = (1, 4, 16)
LENGTHS = (128, 512, 2048)
PROMPT = 128  # tokens before decoding starts
PATIENCE_S = 120.0  # no measurement may take longer to begin


def decode(config: EngineConfig, checkpoint: Checkpoint, seconds: float) -> Iterator[Row]:
    """ms a step and tok/s with 1, 4 and 16 sequences; percent of the time that memory needs."""
    engine = Engine(config, checkpoint)
    dtype = DTYPES[config.dtype]
    try:
        bandwidth = _bandwidth()
        yield _row("memory read", bandwidth / 1e9, "GB/s", "measured: the sum of a large array")
        for batch in BATCHES:
            steps, tokens, context, took = _decoding(engine, checkpoint.config, batch, seconds)
            bytes_read = dtype.itemsize * (
                parameters(checkpoint.config) + batch * context * kv_values(checkpoint.config)
            )
            step_s, bound_s = took / steps, bytes_read / bandwidth
            yield _row(f"decode {batch:>2} sequences: step", step_s * 1e3, "ms",
                       f"{bound_s / step_s:.0%} of the memory roof, {bound_s * 1e3:.2f} ms")
            yield _row(f"decode {batch:>2} sequences: output", tokens / took, "tok/s",
                       f"{bytes_read / step_s / 1e9:.1f} GB/s")
    finally:
        engine.close()


def prefill(config: EngineConfig, checkpoint: Checkpoint, seconds: float) -> Iterator[Row]:
    """tok/s by prompt length, one prompt at a time; percent of a large matrix product's speed."""
    engine = Engine(config, checkpoint)
    try:
        flops = _flops(DTYPES[config.dtype])
        yield _row("matrix product", flops / 1e9, "GFLOP/s", "measured: 2048 cubed")
        for length in LENGTHS:
            if length + 1 > engine.hello.max_len:
                continue
            times = _prefilling(engine, checkpoint.config, length, seconds)
            speed = length / float(np.median(times))
            share = speed * 2 * parameters(checkpoint.config) / flops
            yield _row(f"prefill {length:>5} tokens", speed, "tok/s",
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


def _decoding(
    engine: Engine, shape: ModelConfig, batch: int, seconds: float
) -> tuple[int, int, float, float]:
    """(steps, tokens, mean context, seconds) of `batch` sequences that all decode."""
    room = engine.hello.max_len - PROMPT
    names = [f"decode-{batch}-{i}" for i in range(batch)]
    for number, name in enumerate(names):
        engine.inbox.put(_submit(name, shape, PROMPT, room, number))
    seen: set[str] = set()
    start = time.monotonic()
    while len(seen) < batch:
        assert time.monotonic() - start < PATIENCE_S, "the prompts never finished"
        seen.update(out.id for out in _outs(engine))
    for _ in range(3):
        _outs(engine)  # warm: the first decode steps allocate
    steps = tokens = 0
    start = time.perf_counter()
    while (took := time.perf_counter() - start) < seconds and tokens < batch * (room - 16):
        tokens += sum(len(out.tokens) for out in _outs(engine))
        steps += 1
    for name in names:
        engine.inbox.put(Abort(name))
    engine.step()
    return steps, tokens, PROMPT + tokens / batch / 2, took


def _prefilling(engine: Engine, shape: ModelConfig, length: int, seconds: float) -> list[float]:
    """Seconds from arrival to first token, for as many prompts as fit into `seconds` (2 to 20)."""
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 2 or (time.monotonic() - begin < seconds and len(times) < 20):
        number = length * 100 + len(times)
        engine.inbox.put(_submit(f"prefill-{number}", shape, length, 1, number))
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


def _row(what: str, value: float, unit: str, beside: str) -> Row:
    return {"what": what, "value": value, "unit": unit, "beside": beside}
