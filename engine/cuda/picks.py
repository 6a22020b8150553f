"""Which kernel computes each product, measured on the device that runs it.  Computes none itself.

Every candidate for a product gives the same bits (engine/kernels/matmul.py), so the choice is free
to follow the clock, and may differ from run to run.  cuBLAS is a candidate where it is seen to give
those bits too; beyond the rows that are promised, also where it does not.

How kernels overlap (engine/kernels/overlap.py) is chosen with the products, by the size of a layer:
a small one is all latency, so its kernels are released early and a few rows are normed within the
products that read them; a large one is all bytes, and neither pays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from engine.cuda.events import event
from engine.kernels.launch import library
from engine.kernels.matmul import NORMED, Tile, gate, product
from engine.kernels.norm import norm, warps
from engine.kernels.overlap import EAGER, LATE, OFF, OVERLAPS
from engine.layers import Linear, Norm

log = logging.getLogger("engine.cuda.picks")

INVARIANT = 128  # rows up to which a row's bits must not depend on how many rows there are
EVERY = 1 << 30  # the same of small layers, where that costs nothing: cuBLAS splits no sums there
SMALL = 32 << 20  # bytes of a layer whose reading takes less time than its launches
WORKING_SET = 160 << 20  # bytes of weights a measurement cycles through: well beyond the L2 cache
ROUNDS = 4

# Tiles by height: what won for some product of SmolLM2 or an 8B on an H200, of some hundred.  The
# first fits every product.  Low tiles read less x; 64 rows are a warp group's, with less latency.
CANDIDATES: dict[int, tuple[Tile, ...]] = {
    height: tuple(Tile(*shape) for shape in shapes)
    for height, shapes in {
        1: ((1, 32, 256, 4, 4), (1, 16, 256, 4, 5), (1, 32, 256, 4, 6), (1, 8, 256, 4, 6),
            (16, 32, 128, 4, 5), (1, 64, 128, 4, 5), (16, 64, 128, 4, 5), (1, 128, 128, 4, 3),
            (16, 128, 128, 4, 3), (1, 8, 64, 4, 2, 512, 64), (1, 16, 64, 4, 2, 512, 64)),
        8: ((16, 32, 128, 4, 5), (8, 32, 256, 4, 4), (8, 16, 256, 4, 6), (8, 8, 256, 4, 6),
            (8, 16, 64, 4, 9), (16, 16, 128, 4, 5), (16, 32, 256, 4, 5), (16, 64, 128, 4, 5),
            (16, 128, 128, 4, 3), (8, 8, 64, 4, 2, 512, 64), (8, 16, 64, 4, 2, 512, 64)),
        16: ((16, 32, 64, 4, 5), (16, 16, 128, 4, 5), (16, 32, 128, 4, 5), (16, 64, 128, 4, 5),
             (16, 32, 256, 4, 5), (16, 128, 128, 4, 3), (16, 16, 256, 4, 6),
             (16, 16, 64, 4, 5, 512), (64, 32, 128, 4, 5), (64, 32, 256, 4, 4)),
        32: ((32, 32, 64, 4, 5), (32, 16, 128, 4, 5), (32, 32, 128, 4, 5), (32, 64, 128, 4, 5),
             (32, 128, 128, 4, 3), (32, 16, 64, 4, 5, 512), (64, 16, 128, 4, 6),
             (64, 32, 128, 4, 7), (64, 32, 256, 4, 4), (64, 64, 64, 4, 6)),
        64: ((64, 16, 128, 4, 6), (64, 32, 128, 4, 5), (64, 32, 256, 4, 4), (64, 64, 64, 4, 6),
             (64, 64, 128, 4, 4), (64, 128, 64, 4, 4)),
        128: ((128, 32, 64, 8, 5), (128, 32, 128, 8, 4), (128, 64, 64, 8, 5), (128, 128, 64, 8, 3),
              (64, 64, 64, 4, 6), (64, 64, 128, 4, 4)),
    }.items()
}  # fmt: skip
CUBLAS = None

NORMS = "normed "  # before an epilogue: the product norms its rows first

Key = tuple[int, int, str, str]  # columns, depth, epilogue, type of the result
Pick = Tile | None


def height(rows: int) -> int:
    """Which candidates are for `rows` rows of x."""
    return next((high for high in CANDIDATES if rows <= high), INVARIANT)


def overlapping(layer_bytes: int) -> int:
    """How the kernels of a model overlap whose layers have so many bytes of weights."""
    return (EAGER if layer_bytes <= SMALL else LATE) if OVERLAPS else OFF


def promised(layer_bytes: int) -> int:
    """Rows up to which each row's bits are the same whatever their number.

    (On an H200 cuBLAS has a tile's bits at all sizes of SmolLM2's products.  Of an 8B it has not at
    160 to 256 rows of the product behind the MLP, where the tiles take 1.4 to 1.8 times as long.)
    """
    return EVERY if layer_bytes <= SMALL else INVARIANT


class Picks:
    """Runs products by the best known pick; measures where none is known."""

    def __init__(
        self, device: torch.device, store: Path | None = None, overlap: int = OFF,
        promised: int = INVARIANT,
    ) -> None:  # fmt: skip
        """`store` keeps what was measured from one start to the next; None = nowhere."""
        self.device = device
        self.overlap, self.promised = overlap, promised
        #: How to project, rotate and store by a pick, on anything: for measuring it.
        self.turn: Callable[[Pick, Tensor, Tensor, Tensor, Norm | None], None] | None = None
        self._weights: dict[str, dict[Key, list[Tensor]]] = {}  # by group
        self._chosen: dict[tuple[Key, int], Pick] = {}
        self._took: dict[tuple[Key, int], float] = {}  # milliseconds a product, by its pick
        self._apart: set[tuple[Key, int]] = set()  # where cuBLAS was picked and has other bits
        self._others: dict[tuple[Key, int], list[object]] = {}  # picks of models that promise less
        self._store = store if device.type == "cuda" else None
        self._changed = False
        if self._store is not None:
            self._load(self._store)

    # ---- running ---------------------------------------------------------------------------------

    def run(
        self, x: Tensor, linear: Linear, out: Tensor, *,
        residual: Tensor | None = None, both: Tensor | None = None, norm: Norm | None = None,
    ) -> None:  # fmt: skip
        """out = x W^T + bias, plus `residual` (which may be `out`), or gated through `both`.

        `both` [M, N] is room for the product of a gated projection, whose `out` is [M, N / 2].
        With `norm`, x is normed on the way, where `norms` says so.
        """
        assert linear.weight is not None, "a packed weight cannot run here"
        epilogue = "gate" if both is not None else "add" if residual is not None else "store"
        pick = self.pick(linear, epilogue, x.shape[0], out.dtype)
        self._launch(pick, x, linear.weight, linear.bias, out, residual, both, norm)

    def norms(self, rows: int) -> bool:
        """Whether products that read normed rows norm them: so many, and where latency counts."""
        return rows <= NORMED and self.overlap == EAGER

    def pick(self, linear: Linear, epilogue: str, rows: int, kind: torch.dtype) -> Pick:
        """The tile for this product, or None for cuBLAS."""
        key = self._meant(_key(linear, epilogue, kind), rows)
        first = next(_tiles(key, rows))
        found = self._chosen.get((key, rows), first)
        # cuBLAS adds a bias before it rounds in ways that we have not compared.
        return first if found is CUBLAS and linear.bias is not None else found

    def note(self, group: str, linear: Linear, epilogue: str, kind: torch.dtype) -> None:
        """Say before anything runs that this product will be wanted, and with which others."""
        assert linear.weight is not None, "a packed weight cannot run here"
        known = self._weights.setdefault(group, {})
        known.setdefault(_key(linear, epilogue, kind), []).append(linear.weight)

    def _meant(self, key: Key, rows: int) -> Key:
        """The key under which so many rows are measured: with the norm before it, if it norms."""
        columns, depth, epilogue, kind = key
        if self.norms(rows) and (epilogue == "gate" or epilogue.startswith("turn")):
            return columns, depth, NORMS + epilogue, kind
        return key

    # ---- measuring -------------------------------------------------------------------------------

    def compile(self, group: str, rows: int) -> None:
        """Name all kernels that `tune` may try; call within `compiling`."""
        for noted, weights in self._weights.get(group, {}).items():
            key = self._meant(noted, rows)
            if (key, rows) in self._chosen:
                continue
            x, out, both = self._operands(key, weights[0], rows)
            for tile in _tiles(key, rows):
                self._try(key, tile, x, weights[0], out, both)
            if _library_knows(key, x):
                self._try(key, CUBLAS, x, weights[0], out, both)

    def _operands(
        self, key: Key, weight: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, out and both of a product, x at random."""
        columns, depth, epilogue, kind = key
        gated = epilogue.endswith("gate")
        x = torch.randn(rows, depth, device=self.device).to(weight.dtype)
        width = columns // 2 if gated else columns
        out = torch.zeros(rows, width, device=self.device, dtype=getattr(torch, kind))
        both = out.new_empty(rows, columns) if gated else None
        return x, out, both

    def _try(
        self, key: Key, pick: Pick, x: Tensor, weight: Tensor, out: Tensor, both: Tensor | None
    ) -> None:
        """The product as `key` wants it."""
        epilogue = key[2].removeprefix(NORMS)
        normed = (weight[0], 1e-5) if key[2].startswith(NORMS) else None  # any gain will do
        if epilogue.startswith("turn"):
            assert self.turn is not None, "nobody said how to rotate"
            self.turn(pick, x, weight, out, normed)
        else:
            before = out if epilogue == "add" else None
            self._launch(pick, x, weight, None, out, before, both, normed)

    def _launch(
        self, pick: Pick, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
        residual: Tensor | None, both: Tensor | None, normed: Norm | None,
    ) -> None:  # fmt: skip
        overlap = self.overlap if x.is_cuda else OFF
        if pick is not None:
            gain, eps = normed or (None, 0.0)
            product(x, weight, out, pick, bias=bias, residual=residual, swiglu=both is not None,
                    gain=gain, eps=eps, overlap=overlap)  # fmt: skip
            return
        assert normed is None, "cuBLAS norms nothing"
        if both is not None:
            library(x, weight, both)
            gate(both, out, overlap=overlap)
        else:
            library(x, weight, out, residual)

    def known(self, group: str, rows: int) -> bool:
        """Whether `tune` has nothing to measure."""
        return all((self._meant(key, rows), rows) in self._chosen
                   for key in self._weights.get(group, {}))

    def tune(self, group: str, rows: int) -> None:
        """Make sure that every noted product of the group has its pick for `rows` rows."""
        if self.device.type != "cuda":
            return
        for noted, weights in self._weights.get(group, {}).items():
            key = self._meant(noted, rows)
            if (key, rows) not in self._chosen:
                self._choose(key, weights, rows)
                self._changed = True

    def cost(self, group: str, rows: int) -> float:
        """Milliseconds of all products of a group together, as measured; 0 where they were not."""
        known = self._weights.get(group, {}).items()
        return sum(
            len(weights) * self._took.get((self._meant(key, rows), rows), 0.0)
            for key, weights in known
        )

    def _choose(self, key: Key, weights: list[Tensor], rows: int) -> None:
        """Note the pick, and its milliseconds a product."""
        few = weights[: max(2, WORKING_SET // weights[0].nbytes + 1)]
        x, out, both = self._operands(key, weights[0], rows)
        source, gain = torch.randn_like(x), torch.ones_like(x[0])

        def runs(pick: Pick) -> Callable[[], None]:
            def run() -> None:
                for weight in few:
                    if rows <= INVARIANT:  # there latency counts, so measure behind a small kernel
                        norm(source, gain, x, 1e-5, overlap=self.overlap)
                    self._try(key, pick, x, weight, out, both)

            return run

        times: dict[Pick, float] = {tile: _timed(runs(tile)) for tile in _tiles(key, rows)}
        best = min(times, key=lambda pick: times[pick])
        if _library_knows(key, x):
            times[CUBLAS] = _timed(runs(CUBLAS))
            if times[CUBLAS] < times[best]:
                same = self._same(key, x, few[0], best)
                if not same and rows > self.promised:
                    self._apart.add((key, rows))
                best = CUBLAS if same or rows > self.promised else best
        self._chosen[key, rows], self._took[key, rows] = best, times[best] / len(few)

    def _same(self, key: Key, x: Tensor, weight: Tensor, tile: Pick) -> bool:
        """Whether cuBLAS gives the tile's bits."""
        results = []
        for pick in (tile, CUBLAS):
            _, out, both = self._operands(key, weight, x.shape[0])
            seeded = torch.Generator(self.device).manual_seed(1)
            out.copy_(torch.randn(out.shape, device=self.device, generator=seeded))
            self._try(key, pick, x, weight, out, both)
            results.append(out)
        return torch.equal(*results)

    # ---- remembering -----------------------------------------------------------------------------

    def save(self) -> None:
        """Write what was measured to the store; a store that cannot be written is no error."""
        if self._store is None or not self._changed:
            return
        rows: list[list[object]] = [
            [*key, count, None if pick is None else list(astuple(pick)), self._took[key, count],
             (key, count) in self._apart]
            for (key, count), pick in self._chosen.items()
        ]
        rows += [entry for which, entry in self._others.items() if which not in self._chosen]
        try:
            self._store.parent.mkdir(parents=True, exist_ok=True)
            part = self._store.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"device": stamp(self.device), "picks": rows}))
            part.replace(self._store)
            self._changed = False
        except OSError as error:
            log.warning("picks are not kept: %s", error)

    def _load(self, store: Path) -> None:
        """Take what a store says of this device; a damaged one is measured anew."""
        try:
            found = json.loads(store.read_text())
            if found["device"] != stamp(self.device):
                return
            for columns, depth, epilogue, kind, count, shape, took, apart in found["picks"]:
                key = (columns, depth, epilogue, kind)
                pick = CUBLAS if shape is None else Tile(*shape)
                if apart and count <= self.promised:
                    self._others[key, count] = [*key, count, shape, took, apart]
                    continue
                if pick is CUBLAS or pick in _tiles(key, count):
                    self._chosen[key, count], self._took[key, count] = pick, float(took)
                    if apart:
                        self._apart.add((key, count))
        except (OSError, ValueError, KeyError, TypeError):
            self._chosen.clear()
            self._took.clear()
            self._apart.clear()


def store_path() -> Path | None:
    """Where picks are kept between starts; None where there is no home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    except RuntimeError:
        return None
    return cache / "slipstream/picks.json"


def stamp(device: torch.device) -> str:
    """What a measurement is true for: the device, its libraries, what was there to choose from."""
    name = torch.cuda.get_device_name(device)
    choice = hashlib.sha256(repr(CANDIDATES).encode()).hexdigest()[:16]
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}, {choice}"


def _key(linear: Linear, epilogue: str, kind: torch.dtype) -> Key:
    assert linear.weight is not None
    return (*linear.weight.shape, epilogue, str(kind).removeprefix("torch."))


def _library_knows(key: Key, x: Tensor) -> bool:
    """Whether cuBLAS can compute it: it norms nothing and keeps the type."""
    return key[3] == str(x.dtype).removeprefix("torch.") and not key[2].startswith(NORMS)


def _tiles(key: Key, rows: int) -> Iterator[Tile]:
    """The candidates whose width suits what is around the product, and whose depth it has."""
    _, depth, epilogue, _ = key
    if normed := epilogue.startswith(NORMS):
        epilogue = epilogue.removeprefix(NORMS)
    for tile in CANDIDATES[height(rows)]:
        if normed:  # summed by the warps of the norm
            tile = replace(tile, warps=warps(depth))
        if epilogue == "gate":
            suits = tile.bn >= 16
        elif epilogue.startswith("turn"):
            suits = int(epilogue.removeprefix("turn")) % tile.bn == 0  # the head's dimension
        else:
            suits = True
        if suits and tile.ahead + tile.tail <= depth:
            yield tile


def _timed(run: Callable[[], None]) -> float:
    """Milliseconds of a captured run, the fastest of a few."""
    try:
        run()
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    times: list[float] = []
    for _ in range(ROUNDS + 1):
        begin, end = (event(timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[1:])
