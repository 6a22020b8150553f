"""Time a decode step's layer by how its kernels overlap and by where its rows are normed.

    python tests/bench/bench_variants.py smol       1, 8 and 32 rows of SmolLM2-135M
    python tests/bench/bench_variants.py 8b         1, 32 and 128 rows of an 8B

Checks no result (tests/engine does).  First each product alone, behind a small kernel that writes
its input, with each of its candidates.  Then whole layers, as a step launches them: norm, project,
attend, out, norm, gate and up, down, captured, over weights beyond the cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.cuda.picks import NORMS
from engine.cuda.picks import _tiles as candidates
from engine.kernels.decode_attention import DecodeScratch, decode_attention, workers
from engine.kernels.launch import compiling
from engine.kernels.matmul import NORMED, Tile, gate, product
from engine.kernels.norm import norm
from engine.kernels.overlap import EAGER, LATE, OFF
from engine.kernels.project import project
from tests.bench.bench_attention import LLAMA, SMOL, Model, Work

DEVICE = "cuda"
EPS = 1e-5
EACH = 32  # attention programs a KV head and token, as engine/cuda/ops.py
PRODUCTS = ("qkv", "out", "gate_up", "down")
NORMED_ONES = ("qkv", "gate_up")


@dataclass(frozen=True)
class Shape:
    """A model and the steps to time."""

    model: Model
    hidden: int
    inner: int
    layers: int  # as many as the cache cannot hold
    context: int
    split: int
    rows: tuple[int, ...]


SHAPES = {
    "smol": Shape(SMOL, 576, 1536, 30, 600, 128, (1, 8, 32)),
    "8b": Shape(LLAMA, 4096, 14336, 4, 1100, 256, (1, 32, 128)),
}


@dataclass(frozen=True)
class Way:
    """How a layer is computed."""

    tiles: dict[str, Tile]
    overlap: int = LATE
    normed: bool = False  # norms within the products


class Layers:
    """Weights, pages and activations of a shape at so many rows."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.shape, self.rows, model = shape, rows, shape.model
        spread = np.random.default_rng(1).integers(-shape.context // 10, shape.context // 10, rows)
        self.work = Work(model, [shape.context + int(x) for x in spread], [1] * rows, shape.layers)
        self.meta = self.work.meta(shape.split, 128)
        room = max(self.meta.short_items.shape[1], 64)
        self.scratch = DecodeScratch.allocate(room, model.kv_heads, model.dim, DEVICE)
        columns = (model.heads + 2 * model.kv_heads) * model.dim
        mixed = model.heads * model.dim
        sizes = {"qkv": (columns, shape.hidden), "out": (shape.hidden, mixed),
                 "gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        self.weights = {
            name: [self.made(*size) * size[1] ** -0.5 for _ in range(shape.layers)]
            for name, size in sizes.items()
        }
        self.gain = self.made(shape.hidden)
        self.x, self.normed, self.source = (self.made(rows, shape.hidden) for _ in range(3))
        self.both, self.mixed = self.made(rows, columns), self.made(rows, mixed)
        self.inner = self.made(rows, shape.inner)
        starts = torch.from_numpy(self.work.starts).to(DEVICE)
        block = self.work.table[torch.arange(rows, device=DEVICE), (starts // 64).long()]
        self.positions, self.slots = starts, (block * 64 + starts % 64).int()
        self.angles = torch.rand(2 * shape.context, model.dim // 2, device=DEVICE)
        most = workers(132, model.kv_heads)
        self.workers = min(most, EACH * (rows + 1))

    @staticmethod
    def made(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE).bfloat16()

    # ---- one kernel each -------------------------------------------------------------------------

    def norm(self, way: Way) -> None:
        norm(self.x, self.gain, self.normed, EPS, overlap=way.overlap)

    def product(self, name: str, layer: int, way: Way) -> None:
        """One of PRODUCTS; those that read normed rows norm them first, or themselves."""
        w, tile = self.weights[name][layer], way.tiles[name]
        more = {"gain": self.gain, "eps": EPS} if way.normed else {}
        if name in NORMED_ONES and not way.normed:
            self.norm(way)
        x = self.x if way.normed else self.normed
        if name == "qkv":
            project(x, w, self.both, self.work.pages[layer], self.positions, self.slots,
                    self.angles, self.angles, tile, overlap=way.overlap, **more)
        elif name == "gate_up":
            product(x, w, self.inner, tile, swiglu=True, overlap=way.overlap, **more)
        else:
            x = self.mixed if name == "out" else self.inner
            product(x, w, self.x, tile, residual=self.x, overlap=way.overlap)

    def attend(self, layer: int, way: Way) -> None:
        decode_attention(
            self.both, self.work.pages[layer], self.mixed, self.meta, self.scratch,
            scale=self.shape.model.dim**-0.5, split=self.shape.split, workers=self.workers,
            overlap=way.overlap,
        )  # fmt: skip

    def layer(self, layer: int, way: Way) -> None:
        self.product("qkv", layer, way)
        self.attend(layer, way)
        for name in ("out", "gate_up", "down"):
            self.product(name, layer, way)

    # ---- one kernel behind a small one -----------------------------------------------------------

    def alone(self, name: str, way: Way, layer: int) -> None:
        self.fill(name, way)
        self.product(name, layer, way)

    def fill(self, name: str, way: Way) -> None:
        """A norm that writes what the product reads, or something beside it as long as that."""
        out = self.normed if name in ("out", "down") else self.x
        norm(self.source, self.gain, out, EPS, overlap=way.overlap)

    # ---- what there is to choose from ------------------------------------------------------------

    def tiles(self, name: str, normed: bool) -> list[Tile]:
        epilogue = {"qkv": f"turn{self.shape.model.dim}", "gate_up": "gate"}.get(name, "add")
        size = self.weights[name][0].shape
        key = (*size, NORMS * normed + epilogue, "bfloat16")
        return list(candidates(key, self.rows))


def timed(run: Callable[[int], None], layers: int) -> float:
    """Microseconds a layer of a captured run over all layers, the fastest of six."""
    try:
        run(0)
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
        print(f"    passed over: {str(error)[:90]}")
        return float("inf")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    times = []
    for _ in range(6):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / layers)
    return min(times)


def ways(layers: Layers, name: str) -> Iterator[tuple[str, list[Way]]]:
    """The ways that compete for a product, by what they have in common."""
    for title, overlap in (("late", LATE), ("eager", EAGER)):
        yield title, [Way({name: tile}, overlap) for tile in layers.tiles(name, False)]
        if name in NORMED_ONES and layers.rows <= NORMED:
            tiles = layers.tiles(name, True)
            yield f"{title}, normed", [Way({name: tile}, overlap, True) for tile in tiles]


def products(layers: Layers) -> dict[str, dict[str, Tile]]:
    """The best tile of each set by product; prints the three best of each."""
    best: dict[str, dict[str, Tile]] = {}
    for name in PRODUCTS:
        for title, some in ways(layers, name):
            times = {
                way.tiles[name]: timed(partial(layers.alone, name, way), layers.shape.layers)
                for way in some
            }
            order = sorted(times, key=lambda tile: times[tile])
            best.setdefault(title, {})[name] = order[0]
            for tile in order[:3]:
                print(f"  {name:8} {title:14} {times[tile]:8.2f} us  {tile}", flush=True)
    return best


def chains(layers: Layers, best: dict[str, dict[str, Tile]]) -> None:
    """Whole layers; a line a way."""
    for overlap, first in ((OFF, "late"), (LATE, "late"), (EAGER, "eager")):
        tiles = best[first]
        kinds = {"": Way(tiles, overlap)}
        if layers.rows <= NORMED:
            kinds[", normed"] = Way({**tiles, **best[f"{first}, normed"]}, overlap, True)
        for more, way in kinds.items():
            us = timed(partial(layers.layer, way=way), layers.shape.layers)
            print(f"  layer    {('off', 'late', 'eager')[overlap] + more:14} {us:8.2f} us",
                  flush=True)  # fmt: skip


def gates(inner: int) -> None:
    """The gate of a stored product at 2048 rows."""
    both, out = Layers.made(2048, 2 * inner), Layers.made(2048, inner)
    us = timed(lambda _: gate(both, out), 8)
    print(f"  gate 2048 x {inner}: {us:8.2f} us, {(both.nbytes + out.nbytes) / us / 1e6:.2f} TB/s")


def compile_all(layers: Layers) -> None:
    """All kernels of a row count, side by side."""
    with compiling(os.cpu_count() or 1, torch.device(DEVICE, 0)):
        for name in PRODUCTS:
            for _, some in ways(layers, name):
                for way in some:
                    layers.alone(name, way, 0)
        for overlap in (OFF, LATE, EAGER):
            layers.attend(0, Way({}, overlap))


def main() -> None:
    """Print the tables of the shapes named on the command line, or of all."""
    for name in sys.argv[1:] or list(SHAPES):
        shape = SHAPES[name]
        for rows in shape.rows:
            began = time.monotonic()
            layers = Layers(shape, rows)
            compile_all(layers)
            print(f"\n{name}, {rows} rows at {shape.context}: ready in "
                  f"{time.monotonic() - began:.1f} s", flush=True)  # fmt: skip
            chains(layers, products(layers))
            print(f"  took {time.monotonic() - began:.1f} s", flush=True)
            del layers
            torch.cuda.empty_cache()
        gates(shape.inner)


if __name__ == "__main__":
    main()
