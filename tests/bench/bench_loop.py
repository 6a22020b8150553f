"""What a decoding row costs the engine's own Python: us a row and step, no model behind it.

    python -m tests.bench.bench_loop [rows] [depth]

The runner draws the same token for every row at once, so all that is left is plan, commit, the
messages and their encoding.  Compare two commits on the same quiet machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.messages import Sampling, Submit, frame
from engine.runner import Flight
from engine.scheduler import Scheduler
from tests.tiny import write_llama

PROMPT, OUTPUT = 256, 400  # tokens
WARM, STEPS, WINDOWS = 20, 25, 12  # steps before, steps of a window, windows


class NoModel:
    """A device that draws token 7 for every row, instantly."""

    keeps_history = True
    lookahead = 0

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.flights: deque[Flight] = deque()

    def launch(self, plan) -> Flight:
        self.flights.append(Flight(plan))
        return self.flights[-1]

    def settle(self, flight: Flight) -> None:
        flight.drawn = [[7] if row.last else [] for row in flight.plan.rows]

    def collect(self, depth: int) -> list[Flight]:
        ready = []
        while len(self.flights) > depth:
            ready.append(self.flights.popleft())
        return ready

    def forget(self, seq) -> None:
        pass


class Timed:
    """Adds up the CPU time of one method's calls, for all instances of its class."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        call = getattr(owner, name)

        def timed(*args):
            start = time.thread_time()
            result = call(*args)
            self.seconds += time.thread_time() - start
            return result

        setattr(owner, name, timed)


def make(folder: Path, rows: int, depth: int) -> Engine:
    """An engine with room for that many sequences and nothing to compute."""
    blocks = rows * (PROMPT + OUTPUT) // 64 + 2 * rows
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="bfloat16", max_sequences=rows,
        max_batch_tokens=8192, cache=CacheConfig(blocks=blocks), mixed_tokens=4096,
    )
    engine = Engine(config, open_checkpoint(str(folder)))
    engine.runner = NoModel(depth)
    return engine


def measure(engine: Engine, rows: int) -> dict[str, float]:
    """us a row of the best of some windows, by phase; the wire is the encoding of the replies."""
    phases = {"plan": Timed(Scheduler, "plan"), "commit": Timed(Engine, "_commit")}
    best: dict[str, float] = {}
    for _ in range(WINDOWS):
        took = dict.fromkeys(("step", "wire", *phases), 0.0)
        before = {name: phase.seconds for name, phase in phases.items()}
        for _ in range(STEPS):
            start = time.thread_time()
            replies = engine.step()
            middle = time.thread_time()
            for reply in replies:
                frame(reply)
            took["step"] += middle - start
            took["wire"] += time.thread_time() - middle
        for name, phase in phases.items():
            took[name] = phase.seconds - before[name]
        for name, seconds in took.items():
            best[name] = min(best.get(name, 1.0), seconds / STEPS / rows)
    return best


def main() -> None:
    """Print us a row: all of a step, of that the plan and the commit; the wire beside them."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    depth = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        engine = make(write_llama(Path(folder) / "model", max_len=2048), rows, depth)
    for i in range(rows):
        prompt = [i % 256, *(token % 256 for token in range(1, PROMPT))]
        engine.inbox.put(Submit(f"request-{i:06d}", prompt, OUTPUT, Sampling(seed=i)))
    while len(engine.scheduler.running) < rows or engine.scheduler.waiting:
        engine.step()
    for _ in range(WARM):
        engine.step()
    assert len(engine.scheduler.running) == rows
    for name, seconds in measure(engine, rows).items():
        print(f"{name:7} {seconds * 1e6:6.2f} us a row, {rows} rows, depth {depth}")
    engine.close()


if __name__ == "__main__":
    main()
