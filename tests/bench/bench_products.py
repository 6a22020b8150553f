"""What row invariance costs: the best invariant product of each shape, of the best of all.

    python -m tests.bench.bench_products smollm2 [--rows 1,8,16,32,64,128] [--out FILE]

Times on a GPU what engine/cuda/picks.py may choose from, and cuBLAS whether or not its bits are
invariant, each behind a norm as in a step.  Serves nothing.  A projection is timed without its
rotation, for cuBLAS has none; the head is left out, for cuBLAS gives no fp32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import open_checkpoint
from engine.cuda import picks as measuring
from engine.cuda.picks import CUBLAS, Picks
from engine.kernels.norm import norm
from engine.kernels.overlap import OVERLAPS
from engine.model_config import ModelConfig

ROWS = (1, 8, 16, 32, 64, 128)
Key = tuple[int, int, str, str]  # columns, depth, epilogue, type of the result


def keys(shape: ModelConfig, kind: str = "bfloat16") -> dict[str, Key]:
    """The products of a layer and the head, by the names of `bench decode`."""
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate
    return {
        "qkv": (heads + 2 * kv_heads, hidden, "store", kind),
        "out": (hidden, heads, "add", kind),
        "gate_up": (2 * inner, hidden, "gate", kind),
        "down": (hidden, inner, "add", kind),
    }


def measured(shape: ModelConfig, rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """For each product: the best times, of a kernel with the invariant bits and of any, by rows."""
    for what, key in keys(shape).items():
        picks = Picks(torch.device("cuda"))
        nbytes = 2 * key[0] * key[1]
        weights = [torch.randn(key[0], key[1], device="cuda").to(torch.bfloat16)
                   for _ in range(max(2, measuring.WORKING_SET // nbytes + 1))]
        times = {count: _times(picks, key, weights, count) for count in rows}
        yield summary(what, key, times)


def _times(
    picks: Picks, key: Key, weights: list[torch.Tensor], rows: int
) -> tuple[dict[str, float], float]:
    """Milliseconds of each invariant kernel by name, and of cuBLAS, which may be one of them."""
    x, out, both = picks._operands(key, weights[0], rows)
    tiles = list(measuring._tiles(key, rows))
    source, gain = torch.randn_like(x), torch.ones_like(x[0])

    def runs(pick: measuring.Pick) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                norm(source, gain, x, 1e-5, overlap=OVERLAPS)
                picks._try(key, pick, x, weight, out, both)

        return run

    ours = {str(tile): measuring._timed(runs(tile)) / len(weights) for tile in tiles}
    library = measuring._timed(runs(CUBLAS)) / len(weights)
    if picks._same(key, x, weights[0], tiles[0]):
        ours["cuBLAS"] = library
    return ours, library


def summary(
    what: str, key: Key, times: dict[int, tuple[dict[str, float], float]]
) -> dict[str, Any]:
    """What an invariant product costs of the best of all, and which kernel that is."""
    best = {rows: min(ours, key=lambda name: ours[name]) for rows, (ours, _) in times.items()}
    return {
        "what": what, "columns": key[0], "depth": key[1],
        "best": best,
        "invariant_us": {rows: 1e3 * ours[best[rows]] for rows, (ours, _) in times.items()},
        "library_us": {rows: 1e3 * library for rows, (_, library) in times.items()},
        "costs": {rows: ours[best[rows]] / min(ours[best[rows]], library)
                  for rows, (ours, library) in times.items()},
    }


def main() -> None:
    """The command: see the head of this file."""
    parser = argparse.ArgumentParser(prog="tests.bench.bench_products", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--out", type=Path, help="JSON lines, one a product")
    given = parser.parse_args()
    shape = open_checkpoint(given.model).config
    lines = []
    with torch.inference_mode():
        for row in measured(shape, tuple(map(int, given.rows.split(",")))):
            ours, library = row["invariant_us"], row["library_us"]
            for rows, cost in row["costs"].items():
                print(f"{row['what']:<8} {row['columns']:>6} x {row['depth']:<6} {rows:>4} rows  "
                      f"{ours[rows]:8.2f} us, cuBLAS {library[rows]:8.2f}, {cost:.2f} of the best  "
                      f"{row['best'][rows]}", flush=True)
            lines.append(json.dumps(row))
            if given.out is not None:
                given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
