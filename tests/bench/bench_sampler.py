"""What a captured settle costs on the card, beside the time that its bytes take.  Checks no token.

    python -m tests.bench.bench_sampler [us | kernels]

`us` prints microseconds a replay by rows, vocabulary and kind; the floor reads the logits (and the
masks) once at 4.28 TB/s, the card's copy rate.  `kernels` prints the time of each kernel of some
kinds, from torch's profiler.  "wide" is a top-p whose cut holds thousands of tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from engine.kernels.sampler import Needs, settle
from engine.kernels.sampler_tables import Results, Rows, Scratch, SlotParams, SlotTables
from engine.messages import Sampling

RATE = 4.28e12  # bytes a second
WARM, REPLAYS, ROUNDS = 5, 40, 5
KINDS = {
    "greedy": Sampling(temperature=0.0),
    "T": Sampling(temperature=0.8),
    "T+top-p": Sampling(temperature=0.8, top_p=0.9),
    "T+top-k+p": Sampling(temperature=0.8, top_k=50, top_p=0.9),
    "wide top-p": Sampling(temperature=2.5, top_p=0.99),
    "mask": Sampling(temperature=0.8),
    "penalties": Sampling(temperature=0.8, frequency=0.5),
    "logprobs": Sampling(temperature=0.8, logprobs=5),
}
SHAPES = [(rows, vocab) for vocab in (49_152, 128_256) for rows in (1, 32, 256)]


def prepared(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> Callable[[], None]:
    """A settle of `rows` sequences, each with one row."""
    sampling, device = KINDS[kind], "cuda"
    tables = SlotTables.allocate(rows, vocab, device, penalties=kind == "penalties")
    params = SlotParams(tables)
    for slot in range(rows):
        params.write(slot, sampling, (), 0, (1, 2, 3), (4, 5))
    params.upload()
    batch = Rows.allocate(rows, rows, rows, device)
    order = torch.arange(rows, dtype=torch.int32, device=device)
    for column in (batch.slot, batch.mask, batch.first, batch.group_row):
        column.copy_(order)
    batch.position.fill_(100)
    batch.group_rows.fill_(1)
    batch.count.fill_(rows)
    batch.groups.fill_(rows)
    # A language model's logits: most of the mass on few tokens, a long tail.
    logits = (torch.randn(rows, vocab, device=device) * 2.5).to(dtype)
    masks = None
    if kind == "mask":
        masks = torch.randint(-(2**31), 2**31, (rows + 1, -(-vocab // 32)), device=device).int()
    scratch = Scratch.allocate(rows, vocab, device)
    results = Results.allocate(rows, rows, device)
    needs = Needs(
        shaped=kind == "penalties",
        filters=sampling.top_p < 1 or sampling.top_k > 0,
        logprobs=sampling.logprobs >= 0,
    )
    return lambda: settle(logits, batch, tables, masks, scratch, results, needs)


def replay_us(step: Callable[[], None]) -> float:
    """The fastest round's microseconds a replay, the graph's launch included."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(WARM):
        graph.replay()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / REPLAYS)
    return min(found)


def show_us() -> None:
    """A line a shape and type, a column a kind."""
    print("us a settle; floor = one read of the logits")
    print("rows   vocab type  floor " + " ".join(f"{kind:>10}" for kind in KINDS))
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for rows, vocab in SHAPES:
            floor = rows * vocab * dtype.itemsize / RATE * 1e6
            times = []
            for kind in KINDS:
                times.append(replay_us(prepared(kind, rows, vocab, dtype)))
                torch.cuda.empty_cache()
            print(f"{rows:4} {vocab:7} {name} {floor:6.1f} "
                  + " ".join(f"{us:10.1f}" for us in times), flush=True)  # fmt: skip


def show_kernels() -> None:
    """Microseconds of every kernel at two shapes."""
    from torch.profiler import ProfilerActivity, profile

    for kind in ("T", "T+top-p", "wide top-p", "logprobs"):
        for rows, vocab in ((1, 49_152), (256, 128_256)):
            step = prepared(kind, rows, vocab, torch.float32)
            step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(10):
                    step()
                torch.cuda.synchronize()
            parts = [
                f"{event.key} {event.device_time_total / event.count:.1f}"
                for event in seen.key_averages()
                if event.key.startswith("_")
            ]
            print(f"{kind}, {rows} x {vocab}: " + ", ".join(parts), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("bench_sampler needs a CUDA device")
    {"us": show_us, "kernels": show_kernels}[sys.argv[1] if len(sys.argv) > 1 else "us"]()
