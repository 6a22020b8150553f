"""Time a decode step's layer with today's kernels and with each that may replace them.

    python tests/bench/bench_variants.py smol       1, 8 and 32 rows of SmolLM2-135M
    python tests/bench/bench_variants.py 8b         1, 32 and 128 rows of an 8B

Checks no result (tests/engine does).  First each product alone, behind a small kernel that writes
its input: the best tile of today's and of the new ones.  Then whole layers, as a step launches
them: norm, project, attend, out, norm, gate and up, down, captured, over weights beyond the cache.
"""

from __future__ import annotations

import dataclasses
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

from engine.cuda.picks import CANDIDATES, height
from engine.kernels.decode_attention import DecodeScratch, decode_attention, workers
from engine.kernels.launch import compiling
from engine.kernels.matmul import NORMED, Tile, gate, product
from engine.kernels.norm import norm, warps
from engine.kernels.overlap import EAGER, LATE
from engine.kernels.project import project
from tests.bench.bench_attention import LLAMA, SMOL, Model, Work
from tests.bench.candidates.page_attention import page_attention
from tests.bench.candidates.tma_product import tma_product

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

# (bn, bk, warps, stages, ahead, tail) by width of K, for tiles as low as the rows; then higher ones
# for few rows (a warp group multiplies with less latency), and lower ones for many (x travels
# less: each program reads half of it).
NEW: dict[int, tuple[tuple[int, ...], ...]] = {
    576: ((8, 64, 4, 2, 512, 64), (16, 64, 4, 2, 512, 64), (32, 64, 4, 2, 512, 64),
          (16, 64, 4, 9), (32, 64, 4, 9), (16, 64, 2, 2, 512, 64)),
    1536: ((8, 64, 4, 2, 1024, 512), (16, 64, 4, 2, 1024, 512), (8, 256, 4, 6), (16, 256, 4, 6),
           (16, 128, 4, 5, 512), (8, 256, 2, 6)),
    4096: ((16, 256, 4, 5), (32, 256, 4, 4), (64, 256, 4, 3), (16, 512, 4, 4), (32, 256, 8, 5),
           (64, 256, 8, 4, 256), (16, 256, 4, 5, 1024), (32, 512, 8, 3, 512)),
    14336: ((16, 256, 4, 5), (32, 256, 4, 5), (16, 512, 4, 4), (32, 256, 4, 4, 512),
            (16, 256, 4, 5, 1024), (32, 512, 8, 3)),
}  # fmt: skip
HIGH = {16: ((16, 64, 4, 8), (32, 128, 4, 5), (64, 128, 4, 4)),
        32: ((16, 128, 4, 6), (32, 128, 4, 5), (64, 128, 4, 4))}  # fmt: skip
HALVES = ((64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 4, 5), (128, 64, 4, 4))
TMA = ((64, 64, 128, 4, 5), (64, 64, 64, 4, 8), (128, 32, 128, 4, 4), (128, 64, 64, 8, 6),
       (128, 128, 64, 8, 4))  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a layer is computed."""

    tiles: dict[str, Tile]
    overlap: int = LATE
    normed: bool = False  # norms within the products
    pages: bool = False  # attention by pages

    def but(self, **other: object) -> Way:
        return dataclasses.replace(self, **other)  # type: ignore[arg-type]


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

    def attend(self, layer: int, way: Way, **more: int) -> None:
        (page_attention if way.pages else decode_attention)(
            self.both, self.work.pages[layer], self.mixed, self.meta, self.scratch,
            scale=self.shape.model.dim**-0.5, split=self.shape.split, workers=self.workers,
            overlap=way.overlap, **more,
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

    def tma(self, name: str, tile: Tile, specialize: bool, layer: int) -> None:
        self.fill(name, Way({}))
        x = self.mixed if name == "out" else self.inner
        tma_product(x, self.weights[name][layer], self.x, tile, residual=self.x,
                    specialize=specialize, overlap=EAGER)

    # ---- what there is to choose from ------------------------------------------------------------

    def today(self, name: str) -> list[Tile]:
        bm = height(self.rows)
        return [t for s in CANDIDATES[bm] if self.fits(name, t := Tile(bm, *s))]

    def new(self, name: str, normed: bool) -> list[Tile]:
        low = int(triton.next_power_of_2(self.rows))
        depth = self.weights[name][0].shape[1]
        made = [Tile(min(low, 64), *s) for s in NEW[depth]] if low <= 16 else []
        made += [Tile(64, *s) for s in HIGH.get(height(self.rows), ())]
        made += [Tile(64, *s) for s in HALVES] if low == 128 else []
        if normed:  # the warps of the norm; today's, too
            made = [dataclasses.replace(t, warps=warps(depth)) for t in made + self.today(name)]
        return [t for t in dict.fromkeys(made) if self.fits(name, t)]

    def fits(self, name: str, tile: Tile) -> bool:
        if name == "gate_up" and tile.bn < 16:
            return False
        if name == "qkv" and self.shape.model.dim % tile.bn:
            return False
        return tile.ahead + tile.tail <= self.weights[name][0].shape[1]


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


def sets(layers: Layers, name: str) -> Iterator[tuple[str, list[Way]]]:
    """The ways that compete for a product, by what they have in common."""
    old, new = layers.today(name), layers.new(name, False)
    yield "today", [Way({name: tile}) for tile in old]
    yield "eager, new tiles", [Way({name: tile}, EAGER) for tile in old + new]
    if name in NORMED_ONES and layers.rows <= NORMED:
        yield "eager, normed", [
            Way({name: tile}, EAGER, normed=True) for tile in layers.new(name, True)
        ]


def products(layers: Layers) -> dict[str, dict[str, Tile]]:
    """The best tile of each set by product; prints the three best of each."""
    best: dict[str, dict[str, Tile]] = {}
    for name in PRODUCTS:
        for title, ways in sets(layers, name):
            times = {way.tiles[name]: timed(partial(layers.alone, name, way), layers.shape.layers)
                     for way in ways}
            order = sorted(times, key=lambda tile: times[tile])
            best.setdefault(title, {})[name] = order[0]
            for tile in order[:3]:
                print(f"  {name:8} {title:17} {times[tile]:8.2f} us  {tile}", flush=True)
    return best


def chains(layers: Layers, best: dict[str, dict[str, Tile]]) -> None:
    """Whole layers; a line a way."""
    today = Way(best["today"])
    new = Way(best["eager, new tiles"], EAGER)
    ways = {"today": today, "today, by pages": today.but(pages=True),
            "eager": today.but(overlap=EAGER), "eager, new tiles": new,
            "eager, new, by pages": new.but(pages=True)}
    if layers.rows <= NORMED:
        normed = Way({**best["eager, new tiles"], **best["eager, normed"]}, EAGER, normed=True)
        ways |= {"eager, new, normed": normed, "all": normed.but(pages=True),
                 "all, late": normed.but(pages=True, overlap=LATE)}
    first = 0.0
    for title, way in ways.items():
        us = timed(partial(layers.layer, way=way), layers.shape.layers)
        first = first or us
        print(f"  layer    {title:24} {us:8.2f} us  {us / first:6.1%}", flush=True)


def attentions(layers: Layers) -> None:
    """Attention alone, behind a small kernel; `fine` is pages up to which each has a program."""
    def run(way: Way, more: dict[str, int], layer: int) -> None:
        layers.fill("out", way)
        layers.attend(layer, way, **more)

    for way in (Way({}), Way({}, EAGER), Way({}, pages=True), Way({}, EAGER, pages=True)):
        for more in ({"fine": 0}, {"fine": 32}, {"fine": 64}) if way.pages else ({},):
            us = timed(partial(run, way, more), layers.shape.layers)
            kind = f"by pages {more}" if way.pages else "today's"
            print(f"  attention {'eager' if way.overlap == EAGER else 'late':5} {kind:24} "
                  f"{us:8.2f} us", flush=True)  # fmt: skip


def described(layers: Layers) -> None:
    """Products by tensor descriptors."""
    for name in ("out", "down"):
        for shape in TMA:
            for specialize in (False, True):
                us = timed(partial(layers.tma, name, Tile(*shape), specialize), layers.shape.layers)
                print(f"  {name:8} descriptors {shape} specialize={specialize!s:5} {us:8.2f} us",
                      flush=True)


def gates(inner: int) -> None:
    """The gate of a stored product at 2048 rows."""
    both, out = Layers.made(2048, 2 * inner), Layers.made(2048, inner)
    us = timed(lambda _: gate(both, out), 8)
    print(f"  gate 2048 x {inner}: {us:8.2f} us, {(both.nbytes + out.nbytes) / us / 1e6:.2f} TB/s")


def compile_all(layers: Layers) -> None:
    """All kernels of a row count, side by side; those by descriptors are compiled when they run."""
    with compiling(os.cpu_count() or 1, torch.device(DEVICE, 0)):
        for name in PRODUCTS:
            for _, ways in sets(layers, name):
                for way in ways:
                    for overlap in {way.overlap, EAGER}:
                        layers.alone(name, way.but(overlap=overlap), 0)
        for overlap in (LATE, EAGER):
            layers.attend(0, Way({}, overlap))
            for fine in (0, 32, 64):
                layers.attend(0, Way({}, overlap, pages=True), fine=fine)


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
            attentions(layers)
            if rows == 128:
                described(layers)
            print(f"  took {time.monotonic() - began:.1f} s", flush=True)
            del layers
            torch.cuda.empty_cache()
        gates(shape.inner)


if __name__ == "__main__":
    main()
