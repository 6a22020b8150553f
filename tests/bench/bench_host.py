"""Where the engine's thread spends a step on a GPU: us of CPU and of time, by phase.  No sockets.

    python -m tests.bench.bench_host --rows 200 --prompt 1024 --output 128 MODEL

So many requests are kept open, each with ids of its own.  Without a GPU a tiny model's runner is
measured with all launches left out, which shows our own Python alone.  `wait` is the time until a
step's results are there: what of it is CPU time, the host spins.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import tempfile
import time
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import engine.build as building
import engine.cuda.slots as slots
from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.cuda.forward import Forward
from engine.cuda.graphs import Graphs
from engine.cuda.runner import CudaRunner
from engine.cuda.settle import Settling
from engine.intake import Intake
from engine.loop import Engine
from engine.messages import Sampling, Step, Submit, frame
from engine.scheduler import Scheduler
from tests.tiny import write_llama

PHASES = (
    (Intake, "receive"), (Scheduler, "plan"), (CudaRunner, "launch"), (slots.Slots, "upload"),
    (Settling, "prepare"), (Forward, "stage"), (Graphs, "run"), (Settling, "fetch"),
    (CudaRunner, "_read"), (Engine, "_commit"),
)  # fmt: skip  # `launch` holds those from upload to run


class Timed:
    """Adds up what one method's calls take, for all instances of its class."""

    def __init__(self, owner: type, name: str) -> None:
        self.name = f"{owner.__name__}.{name}"
        self.cpu = self.wall = 0.0
        call = getattr(owner, name)

        def timed(*args, **named):
            cpu, wall = time.thread_time(), time.perf_counter()
            result = call(*args, **named)
            self.cpu += time.thread_time() - cpu
            self.wall += time.perf_counter() - wall
            return result

        setattr(owner, name, timed)


class Load:
    """Keeps `rows` requests open."""

    def __init__(self, engine: Engine, rows: int, prompt: int, output: int) -> None:
        self.engine, self.output = engine, output
        self.number = self.tokens = 0
        self.top = engine.hello.vocab - 20
        self.body = [3 + place * 31 % self.top for place in range(prompt - 1)]
        for _ in range(rows):
            self.send()

    def send(self) -> None:
        """One more request, with a prompt that no other has."""
        self.number += 1
        ids = [3 + self.number % self.top, *self.body]
        self.engine.inbox.put(Submit(
            f"request-{self.number:06d}", ids, self.output, Sampling(temperature=0.0),
        ))  # fmt: skip

    def run(self, steps: int) -> None:
        """So many steps; what ends is followed by another."""
        for _ in range(steps):
            for reply in self.engine.step():
                frame(reply)
                if isinstance(reply, Step):
                    self.tokens += sum(len(out.tokens) for out in reply.outs)
                    for out in reply.outs:
                        if out.finish:
                            self.send()


def stubbed(folder: Path, asked: argparse.Namespace) -> Engine:
    """An engine whose runner does all but launch."""
    building.fused = lambda device: True
    Graphs.run = lambda self, key, body: None
    slots.update_table = lambda *tensors: None
    write_llama(folder, hidden=64, heads=4, kv_heads=2, head_dim=32, vocab=259, max_len=4096)
    blocks = asked.rows * ((asked.prompt + asked.output) // 64 + 3)
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", threads=1, max_sequences=256,
        max_batch_tokens=2048, mixed_tokens=512, cache=CacheConfig(blocks=blocks),
    )  # fmt: skip
    return Engine(config, open_checkpoint(str(folder)))


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder; a tiny one without a GPU")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--warm", type=int, default=150, help="steps before")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="show functions as well")
    return parser.parse_args()


def main() -> None:
    """Print a line for each phase, then a step and a token."""
    asked = arguments()
    with tempfile.TemporaryDirectory() as folder:
        if torch.cuda.is_available():
            config = EngineConfig(model=asked.model, dtype="bfloat16")
            engine = Engine(config, open_checkpoint(asked.model))
        else:
            engine = stubbed(Path(folder) / "model", asked)
    gc.collect()
    gc.freeze()  # as the server does
    load = Load(engine, asked.rows, asked.prompt, asked.output)
    load.run(asked.warm)
    phases = [Timed(*phase) for phase in PHASES]
    before, process = load.tokens, time.process_time()
    cpu, wall = time.thread_time(), time.perf_counter()
    load.run(asked.steps)
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    process = time.process_time() - process
    tokens = load.tokens - before
    for phase in phases:
        print(f"{phase.name:20} {phase.cpu / asked.steps * 1e6:9.1f} us CPU"
              f" {phase.wall / asked.steps * 1e6:9.1f} us a step")
    print(f"{'step':20} {cpu / asked.steps * 1e6:9.1f} us CPU {wall / asked.steps * 1e6:9.1f} us,"
          f" {tokens / asked.steps:.1f} tokens a step; a token {cpu / tokens * 1e6:.2f} us CPU,"
          f" {process / tokens * 1e6:.2f} with other threads")
    if asked.profile:
        profile = cProfile.Profile()
        profile.runcall(load.run, asked.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    engine.close()


if __name__ == "__main__":
    main()
