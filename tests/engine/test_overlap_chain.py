"""Layers whose kernels overlap give the bits of layers whose kernels wait.  Needs a card."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels.matmul import NORMED, Tile
from engine.kernels.norm import warps
from engine.kernels.overlap import EAGER, LATE, OFF, OVERLAPS
from tests.bench.bench_variants import PRODUCTS, SHAPES, Layers, Way


def captured(layers: Layers, way: Way, source: torch.Tensor) -> torch.Tensor:
    """The layers' output, of a graph that is replayed until it would show a race."""
    seen = []

    def run() -> None:
        layers.x.copy_(source)
        for layer in range(layers.shape.layers):
            layers.layer(layer, way)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
        seen.append(layers.x.clone())
    assert all(torch.equal(out, seen[0]) for out in seen), "replays differ"
    return seen[0]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, rows", [("smol", 1), ("smol", 4), ("smol", 32), ("8b", 1)])
def test_layers_have_the_same_bits_however_their_kernels_overlap(name, rows):
    shape = dataclasses.replace(SHAPES[name], layers=6 if name == "smol" else 2)
    layers = Layers(shape, rows)
    source = layers.x.clone()
    low = min(16, rows)
    plain = {one: Tile(32 if rows > 16 else 16, 32, 64, 4, 5) for one in PRODUCTS}
    ahead = {one: Tile(max(low, 1), 16, 64, 4, 3, 512, 64) for one in PRODUCTS}
    fit = warps(shape.hidden)
    normed = {one: dataclasses.replace(tile, warps=fit) for one, tile in ahead.items()}
    modes = (OFF, LATE, EAGER) if OVERLAPS else (OFF,)
    wanted = captured(layers, Way(plain, OFF), source)
    assert wanted.isfinite().all()
    for overlap in modes:
        for tiles in (plain, ahead):
            found = captured(layers, Way(tiles, overlap), source)
            assert torch.equal(found, wanted), (overlap, tiles)
        if rows <= NORMED:
            found = captured(layers, Way(normed, overlap, normed=True), source)
            assert torch.equal(found, wanted), (overlap, "normed")
    print(f"\n{name}, {rows} rows: {len(modes)} ways to overlap, one result")
