"""Read byte ranges of files into tensors on a device, many at once.  Knows no names, no formats.

    file --pread--> staging buffer --copy--> (cast) --> its place in the final tensor
         reader thread               the reader's own stream

Each reader has two buffers: while the device takes one, the file fills the other.  A buffer is
filled again only after its copies are done.  So host memory is bounded by the buffers, whatever
the size of the model, and the page cache or the disk sets the speed.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

READERS = 8
BUFFERS = 2  # a reader
PIECE = 32 << 20  # bytes of one read: long enough for any disk, 512 MiB for all readers together
SHORTEST = 1 << 20  # below that a read costs more than its bytes


class CutShort(OSError):
    """A file ends before the bytes that its table of contents promised."""


class ReadFailed(Exception):
    """A piece could not be read; `source` is the first that was in it, the cause is chained."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name)
        self.source = source


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of a file that become one tensor."""

    name: str  # for messages
    file: Path
    offset: int  # bytes from the start of the file
    dtype: torch.dtype  # of the values in the file
    target: Tensor  # contiguous, on the device; a different dtype is cast there

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A run of values within a piece and where they go."""

    source: Source
    start: int  # bytes from the start of the piece
    first: int  # value of the target
    count: int  # values

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.count * self.source.dtype.itemsize


@dataclass(slots=True)
class Piece:
    """One read: neighbouring parts of one file."""

    file: Path
    offset: int
    size: int = 0
    parts: list[Part] = field(default_factory=list)


class Lane(Protocol):
    """One reader's buffers and its way to the device; used by that reader's thread only."""

    buffers: list[Tensor]  # uint8, on the host

    def wait(self, number: int) -> None:
        """Return when no copy reads from buffer `number` any more."""

    def copy(self, number: int, parts: Sequence[Part]) -> None:
        """Begin to copy the parts out of buffer `number`, after everything begun before."""

    def finish(self) -> None:
        """Return when every copy is done."""


class HostLane:
    """To tensors in this process's own memory; a copy is done when it returns."""

    def __init__(self, size: int) -> None:
        self.buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(BUFFERS)]

    def wait(self, number: int) -> None:
        """Nothing: copies are done when they return."""

    def copy(self, number: int, parts: Sequence[Part]) -> None:
        """Copy, and cast where the dtypes differ."""
        for part in parts:
            _place(part, self.buffers[number], None)

    def finish(self) -> None:
        """Nothing: copies are done when they return."""


class CudaLane:
    """To a GPU: pinned buffers, a stream, and an event a buffer that says when it is free."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread: or its buffers would open another GPU
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True)
                        for _ in range(BUFFERS)]
        self._free = [torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                      for _ in range(BUFFERS)]
        self._wide: Tensor | None = None  # values before their cast; reused in stream order
        self._size, self._device = size, device

    def wait(self, number: int) -> None:
        """An event that was never recorded is done."""
        self._free[number].synchronize()

    def copy(self, number: int, parts: Sequence[Part]) -> None:
        """Queue the copies and, where the dtypes differ, the casts on the lane's stream."""
        with torch.cuda.stream(self._stream):
            if self._wide is None and any(_casts(part) for part in parts):
                self._wide = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            for part in parts:
                _place(part, self.buffers[number], self._wide)
            self._free[number].record(self._stream)

    def finish(self) -> None:
        """The stream is empty."""
        self._stream.synchronize()


def piece_size(total: int, readers: int) -> int:
    """Bytes of a piece when `total` are to be read: a power of two, as pinned memory is given out.

    Every buffer of every reader should be used: pinning more than the model's size costs a start.
    """
    share = total // (readers * BUFFERS)
    return min(PIECE, max(SHORTEST, 1 << max(share, 1).bit_length() - 1))


def read(
    sources: Sequence[Source],
    lane: Callable[[int], Lane],
    done: Callable[[int], None],
    readers: int = READERS,
    piece: int = 0,
) -> None:
    """Fill the target of every source; all copies are done on return.

    `lane(size)` makes a reader's lane with buffers of `size` bytes, on the reader's thread;
    `done(bytes)` is called on this thread after each piece.
    `piece` is the most bytes of one read, 0 = as `piece_size` says.
    Nothing may use the targets meanwhile.  Raises ReadFailed naming a source; what else goes wrong
    (no memory for buffers) passes through.
    """
    total = sum(source.size for source in sources)
    pieces = deque(split(sources, piece or piece_size(total, readers)))
    if not pieces:
        return
    size = max(one.size for one in pieces)
    news: queue.SimpleQueue[Piece | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_reader, args=(pieces, size, lane, news, stop), daemon=True,
                         name=f"weights-{number}")
        for number in range(min(readers, len(pieces)))
    ]
    for thread in threads:
        thread.start()
    try:
        _follow(news, len(threads), done)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _follow(
    news: queue.SimpleQueue[Piece | BaseException | None],
    running: int,
    done: Callable[[int], None],
) -> None:
    """Report pieces until every reader has ended; raise what the first failing one raised."""
    while running:
        match news.get():
            case None:
                running -= 1
            case Piece(size=size):
                done(size)
            case BaseException() as error:
                raise error


def split(sources: Sequence[Source], limit: int) -> Iterator[Piece]:
    """Pieces of at most `limit` bytes, in the order of the files; neighbours share a piece."""
    assert limit >= 8, f"pieces of {limit} bytes cannot hold a value"
    piece: Piece | None = None
    for source in sorted(sources, key=lambda one: (str(one.file), one.offset)):
        first, values, width = 0, source.target.numel(), source.dtype.itemsize
        while first < values:
            at = source.offset + first * width
            fits = piece is not None and piece.file == source.file and (
                piece.offset + piece.size == at and piece.size + width <= limit)
            if piece is None or not fits:
                if piece is not None:
                    yield piece
                piece = Piece(source.file, at)
            count = min(values - first, (limit - piece.size) // width)
            piece.parts.append(Part(source, piece.size, first, count))
            piece.size += count * width
            first += count
    if piece is not None:
        yield piece


def _reader(
    pieces: deque[Piece],
    size: int,
    open_lane: Callable[[int], Lane],
    news: queue.SimpleQueue[Piece | BaseException | None],
    stop: threading.Event,
) -> None:
    """Take pieces until none is left; the last word on `news` is None or what went wrong."""
    try:
        with ExitStack() as files:
            lane, opened, turn = open_lane(size), dict[Path, int](), 0
            files.callback(lane.finish)  # also after an error: a copy may still read a buffer
            views = [buffer.numpy().data for buffer in lane.buffers]
            while not stop.is_set() and (piece := _next(pieces)) is not None:
                number = turn % len(views)
                turn += 1
                lane.wait(number)
                try:
                    if piece.file not in opened:
                        opened[piece.file] = os.open(piece.file, os.O_RDONLY)
                        files.callback(os.close, opened[piece.file])
                    _fill(opened[piece.file], views[number][: piece.size], piece.offset)
                except OSError as error:
                    raise ReadFailed(piece.parts[0].source) from error
                lane.copy(number, piece.parts)
                news.put(piece)
    except BaseException as error:  # told to the thread that waits for us, which raises it
        news.put(error)
    else:
        news.put(None)


def _next(pieces: deque[Piece]) -> Piece | None:
    with suppress(IndexError):  # another reader took the last one
        return pieces.popleft()
    return None


def _fill(file: int, view: memoryview, offset: int) -> None:
    """Read exactly the view's bytes; raise CutShort when the file has fewer."""
    if hasattr(os, "posix_fadvise"):  # the whole piece is asked of the disk at once, not by windows
        os.posix_fadvise(file, offset, len(view), os.POSIX_FADV_WILLNEED)
    got = 0
    while got < len(view):
        count = os.preadv(file, [view[got:]], offset + got)
        if not count:
            raise CutShort(f"the file ends at byte {offset + got:,}")
        got += count


def _casts(part: Part) -> bool:
    return part.source.dtype != part.source.target.dtype


def _place(part: Part, buffer: Tensor, wide: Tensor | None) -> None:
    """Copy one part to its place; through `wide`, on the target's device, when it must be cast."""
    raw = buffer[part.start : part.start + part.size]
    values = part.source.target.view(-1)[part.first : part.first + part.count]
    if not _casts(part):
        values.view(torch.uint8).copy_(raw, non_blocking=True)
        return
    if wide is None:
        held = raw.clone()  # begins at an aligned address, which a view as another type needs
    else:
        held = wide[: part.size].copy_(raw, non_blocking=True)
    values.copy_(held.view(part.source.dtype))
