"""Measure how fast weights reach a device, and what host memory that takes.  Runs no model.

    python -m tests.bench.load_weights MODEL --cold --check
    python -m tests.bench.load_weights MODEL --readers 4 8 16 --piece-mib 16 32 64

The first loads as a server does; the second compares readers and pieces.  `--cold` puts the files
out of the page cache first; `--check` compares every tensor with what the library reads, bit for
bit.  On a machine without a GPU the same pipeline writes to the CPU, without pinned buffers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from engine.build import DTYPES
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.device import pick
from engine.models import family
from engine.pinned import READERS, CudaLane, HostLane, Lane, piece_size
from engine.weights import _in_safetensors, load, stream

Tensors = dict[str, torch.Tensor]
CLEAR_PEAK = "5"  # to /proc/self/clear_refs: VmHWM begins anew


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=[*DTYPES])
    parser.add_argument("--readers", type=int, nargs="*", default=[])
    parser.add_argument("--piece-mib", type=int, nargs="*", default=[])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    checkpoint, device = open_checkpoint(given.model), pick(given.device)
    dtype = DTYPES[given.dtype]
    torch.empty(1, device=device)  # the context of a GPU takes its time and memory, not ours
    if not given.readers and not given.piece_mib:
        expected = family(checkpoint.architecture).expected(checkpoint.config)
        tensors = timed("load", checkpoint, given.cold,
                        lambda: load(checkpoint, expected, dtype, None, device))
        if given.check:
            check(checkpoint, tensors)
        return 0
    for readers in given.readers or [READERS]:
        for mib in given.piece_mib or [0]:
            timed(f"{readers} readers, {mib or 'default'} MiB", checkpoint, given.cold,
                  lambda: streamed(checkpoint, dtype, device, readers, mib << 20))
    return 0


def streamed(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, readers: int, piece: int
) -> Tensors:
    """`load` with other readers and pieces."""
    def lane(size: int) -> Lane:
        return CudaLane(size, device) if device.type == "cuda" else HostLane(size)

    with ExitStack() as files:
        wanted = list(_in_safetensors(checkpoint, files))
        tensors = {stored.name: torch.empty(stored.shape, dtype=dtype, device=device)
                   for stored in wanted}
        piece = piece or piece_size(sum(stored.size for stored in wanted), readers)
        stream(wanted, tensors, lane, None, readers, piece)
    return tensors


def timed(
    what: str, checkpoint: Checkpoint, cold: bool, work: Callable[[], Tensors]
) -> Tensors:
    """Run and print seconds, GB/s and resident memory before, at the peak and after."""
    size = sum(path.stat().st_size for path in checkpoint.files)
    if cold:
        for path in checkpoint.files:
            drop(path)
    before = resident()
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    start = time.perf_counter()
    tensors = work()
    took = time.perf_counter() - start
    print(f"{what}: {size / 1e9:.2f} GB in {took:.2f} s = {size / took / 1e9:.2f} GB/s"
          f"{' (cold)' if cold else ''}; resident {before:.2f} -> peak {peak():.2f} -> "
          f"{resident():.2f} GB", flush=True)
    return tensors


def drop(path: Path) -> None:
    """Put a file out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def resident() -> float:
    """GB of this process."""
    return psutil.Process().memory_info().rss / 1e9


def peak() -> float:
    """GB at the worst moment since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024 / 1e9


def check(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Compare with the library's reader, a tensor at a time."""
    seen = set()
    for path in checkpoint.files:
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():
                if name in tensors:
                    ours = tensors[name]
                    theirs = shard.get_tensor(name).to(ours.device, ours.dtype)
                    assert ours.view(torch.uint8).equal(theirs.view(torch.uint8)), name
                    seen.add(name)
    assert seen == tensors.keys(), sorted(tensors.keys() - seen)
    print(f"check: {len(seen)} tensors equal bit for bit")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
