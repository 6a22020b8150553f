"""Time the attention and rotary kernels against the card's own roofs.  Checks no result.

    python tests/bench/bench_attention.py            the shapes that serve
    python tests/bench/bench_attention.py --sweep    the constants to choose from, too (minutes)
    python tests/bench/bench_attention.py chunk      one part: decode, chunk or rope

Each time is of one launch inside a captured graph that goes round several layers' pages, so that a
layer's KV is not left in the cache by the launch before.  Decode is printed with its share of the
bandwidth of a plain copy, chunks with their TFLOP/s and torch's own attention on the same rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.kernels import attention_plan as plan
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.chunk_attention import SHAPES, ChunkShape, chunk_attention
from engine.kernels.decode_attention import (
    DecodeScratch,
    decode_attention,
)
from engine.kernels.decode_attention import (
    workers as programs,
)
from engine.kernels.rope import rotate_and_store

SIZE = 64
SMS = 132  # of an H200
DEVICE = "cuda"


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    dim: int


SMOL = Model("SmolLM2-135M", 9, 3, 64)
LLAMA = Model("Llama-8B", 32, 8, 128)


def timed(launch: Callable[[int], None], layers: int, rounds: int = 20) -> float:
    """Microseconds of launch(layer), the median of `rounds` graph replays over all layers."""
    launch(0)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    times = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / layers)
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a 1 GiB copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * 2**30 / (timed(lambda _: target.copy_(source), 4) * 1e-6)


class Work:
    """Rows of one model over the random pages of some layers."""

    def __init__(self, model: Model, starts: list[int], counts: list[int], layers: int):
        self.model, self.layers = model, layers
        self.starts, self.counts = np.array(starts, np.int32), np.array(counts, np.int32)
        self.tokens = int(self.counts.sum())
        self.longest = int((self.starts + self.counts).max())
        self.width = -(-self.longest // SIZE)
        blocks = len(starts) * self.width
        self.pages = torch.randn(
            layers, blocks + 1, 2, SIZE, model.kv_heads, model.dim, device=DEVICE
        ).bfloat16()
        self.table = torch.randperm(blocks, device=DEVICE).int().view(len(starts), self.width)
        shape = (self.tokens, model.heads * model.dim)
        self.query = torch.randn(shape, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.query)

    def meta(self, split: int, chunk_tile: int) -> AttentionMeta:
        rows, tile = len(self.starts), plan.short_tile(self.model.heads // self.model.kv_heads)
        most = plan.most_short_items(rows, plan.SHORT, self.longest, tile=tile, split=split)
        short = np.zeros((2, most), np.int32)
        total = plan.fill_short(self.starts, self.counts, short, tile=tile, split=split)
        chunks = np.zeros((2, max(1, plan.most_chunk_items(rows, self.tokens, tile=chunk_tile))),
                          np.int32)
        chunk_total = plan.fill_chunks(self.starts, self.counts, chunks, tile=chunk_tile)
        first = np.cumsum(self.counts) - self.counts

        def there(array: np.ndarray | list[int]) -> torch.Tensor:
            return torch.from_numpy(np.asarray(array, np.int32)).to(DEVICE)

        return AttentionMeta(
            table=self.table, slot=there(np.arange(rows)), first=there(first),
            start=there(self.starts), count=there(self.counts), short_items=there(short),
            short_total=there([total]), chunk_items=there(chunks), chunk_total=there([chunk_total]),
        )

    def decode(self, split: int, workers: int, **more: int) -> float:
        """Microseconds of one layer's short rows."""
        meta = self.meta(split, 128)
        scratch = DecodeScratch.allocate(
            meta.short_items.shape[1], self.model.kv_heads, self.model.dim, DEVICE
        )
        scale = self.model.dim**-0.5
        return timed(
            lambda layer: decode_attention(
                self.query, self.pages[layer], self.out, meta, scratch,
                scale=scale, split=split, workers=workers, **more,
            ),
            self.layers,
        )

    def chunk(self, shape: ChunkShape) -> float:
        """Microseconds of one layer's chunks."""
        meta = self.meta(128, shape.tile)
        scale, most = self.model.dim**-0.5, meta.chunk_items.shape[1]
        return timed(
            lambda layer: chunk_attention(
                self.query, self.pages[layer], self.out, meta, scale=scale, most=most, shape=shape
            ),
            self.layers,
        )

    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer has to read once."""
        return int((self.starts + self.counts).sum()) * self.model.kv_heads * self.model.dim * 4

    def operations(self) -> float:
        """Multiplications and additions of the causal part of one layer."""
        seen = sum(int(c) * int(s) + int(c) * (int(c) + 1) // 2
                   for s, c in zip(self.starts, self.counts, strict=True))
        return 4.0 * seen * self.model.heads * self.model.dim


def bench_decode(roof: float, sweep: bool) -> None:
    print("\ndecode: model, rows x tokens at context | split workers warps stages | us, % of copy")
    cases = [
        (SMOL, 1, 1, 600, 30), (SMOL, 1, 5, 600, 30), (SMOL, 32, 1, 600, 30),
        (SMOL, 200, 1, 600, 10), (LLAMA, 1, 1, 1100, 32), (LLAMA, 1, 5, 1100, 32),
        (LLAMA, 32, 1, 1100, 4), (LLAMA, 200, 1, 1100, 3), (LLAMA, 1, 1, 32_000, 4),
    ]  # fmt: skip
    for model, rows, count, context, layers in cases:
        # Lengths around the context, as in traffic; the same whenever this is run.
        spread = np.random.default_rng(1).integers(-context // 10, context // 10 + 1, rows)
        work = Work(model, [context + int(x) for x in spread], [count] * rows, layers)
        for split in (128, 256):
            chosen = programs(SMS, model.kv_heads)
            for workers in (chosen // 2, chosen) if sweep else (chosen,):
                for more in ({}, {"warps": 2}, {"warps": 8}, {"stages": 2}) if sweep else ({},):
                    us = work.decode(split, workers, **more)
                    share = work.kv_bytes() / (us * 1e-6) / roof
                    print(f"{model.name:13} {rows:4} x {count:2} at {context:6} | {split:4} "
                          f"{workers:4} {more or ''!s:30} | {us:8.2f} us {share:6.1%}", flush=True)


def bench_chunk(sweep: bool) -> None:
    print("\nchunk: model, start + count | shape | us, TFLOP/s | torch's attention (fresh ones)")
    for model in (SMOL, LLAMA):
        chosen = SHAPES[model.dim]
        shapes = [chosen] if not sweep else [
            ChunkShape(tile, pages, warps, stages)
            for tile, warps in ((64, 4), (128, 4), (128, 8))
            for pages in (1, 2)
            for stages in (2, 3)
            if model.dim * tile * pages < 128 * 128 * 2 or (warps, stages) == (8, 2)
        ]  # fmt: skip
        for start, count in ((0, 512), (0, 2048), (1024, 1024), (6144, 2048)):
            work = Work(model, [start], [count], 8)
            beside = ""
            if start == 0:
                parts = torch.randn(3, 1, model.heads, count, model.dim, device=DEVICE).bfloat16()
                us = timed(lambda _, p=parts: F.scaled_dot_product_attention(*p, is_causal=True), 8)
                beside = f"| {us:8.2f} us {work.operations() / us / 1e6:6.0f} TFLOP/s"
            for shape in shapes:
                us = work.chunk(shape)
                print(f"{model.name:13} {start:5} + {count:5} | {shape} | {us:8.2f} us "
                      f"{work.operations() / us / 1e6:6.0f} TFLOP/s {beside}", flush=True)


def bench_rope(roof: float) -> None:
    print("\nrotate and store: model, tokens | us, % of copy")
    for model in (SMOL, LLAMA):
        angles = torch.rand(4096, model.dim // 2, device=DEVICE)
        for count in (1, 64, 2048):
            width = (model.heads + 2 * model.kv_heads) * model.dim
            qkv = torch.randn(count, width, device=DEVICE).bfloat16()
            shape = (8, 64, 2, SIZE, model.kv_heads, model.dim)
            pages = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
            places = torch.arange(count, dtype=torch.int32, device=DEVICE)
            us = timed(
                lambda layer, q=qkv, p=pages, at=places, a=angles: rotate_and_store(
                    q, p[layer], at, at, a, a
                ),
                8,
            )
            share = 2 * qkv.nbytes / (us * 1e-6) / roof
            print(f"{model.name:13} {count:5} | {us:8.2f} us {share:6.1%}", flush=True)


def main() -> None:
    """Print the tables."""
    sweep = "--sweep" in sys.argv[1:]
    parts = {"decode", "chunk", "rope"}
    parts = parts & set(sys.argv[1:]) or parts
    roof = copy_bandwidth()
    print(f"copy {roof / 1e12:.2f} TB/s; {torch.cuda.get_device_name()}")
    if "decode" in parts:
        bench_decode(roof, sweep)
    if "chunk" in parts:
        bench_chunk(sweep)
    if "rope" in parts:
        bench_rope(roof)


if __name__ == "__main__":
    main()
