"""Generated ids on disk: shards of u16 or u32 and their indexes.  Makes and trains nothing.

    run.json     what the shards were made with; another seed or model is refused
    00012.ids    prompt and answer, prompt and answer, ... little-endian
    00012.json   the index: one entry an answer, and a checksum of the ids

The index is renamed into place last, so a shard is whole or is not there.  Several processes may
fill one folder when each has shards of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

Ids = npt.NDArray[np.unsignedinteger]
MOST_BYTES = 16 << 20  # of one .ids file: what can be copied anywhere


class BadShard(ValueError):
    """A file that is not what its index says, or a folder of another run; says what to do."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One prompt and its answer."""

    number: int  # of the conversation
    prompt: int  # tokens
    length: int  # tokens, prompt and answer
    domain: str
    temperature: float
    held_out: bool
    choice: str  # the grammar: "", "auto", "required"
    seed: int  # of the sampling


class Index(msgspec.Struct, frozen=True):
    """What a shard holds."""

    bits: int  # 16 or 32, of an id
    checksum: str  # xxh3_128 of the .ids file
    entries: list[Entry]
    skipped: int = 0  # conversations that were refused or too long
    tokens: int = 0  # generated
    seconds: float = 0.0  # since the shard before, on the clock


class Run(msgspec.Struct, frozen=True):
    """What all shards of a folder share."""

    model: str
    fingerprint: str
    vocab: int
    seed: int
    conversations: int  # of one shard
    max_len: int  # tokens, prompt and answer


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard, read."""

    number: int
    index: Index
    ids: Ids

    def sequences(self) -> Iterator[tuple[Entry, Ids]]:
        """Every entry with its ids."""
        at = 0
        for entry in self.index.entries:
            yield entry, self.ids[at : at + entry.length]
            at += entry.length


def bits_for(vocab: int) -> int:
    """16 where every id fits, else 32."""
    return 16 if vocab <= 1 << 16 else 32


def check_size(run: Run) -> None:
    """Raise ValueError when a shard could be larger than MOST_BYTES."""
    room = MOST_BYTES // (bits_for(run.vocab) // 8) // run.max_len
    if run.conversations > room:
        raise ValueError(
            f"{run.conversations} conversations of up to {run.max_len:,} tokens may take more than "
            f"{MOST_BYTES >> 20} MiB; give --per-shard {room} or less."
        )


def begin(folder: Path, run: Run) -> None:
    """Note what the folder's shards are made with; raise BadShard when it has others.

    Of processes that begin one folder at a time the first one's note stands: others are refused
    where theirs would differ.
    """
    path = folder / "run.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        create(path, msgspec.json.encode(run))
    known = read_run(folder)  # whoever wrote it
    for name in run.__struct_fields__:
        if name != "model" and getattr(known, name) != getattr(run, name):
            raise BadShard(
                f"{folder} was begun with {name} {getattr(known, name)}, not {getattr(run, name)}. "
                "Use the same, or another folder."
            )


def read_run(folder: Path) -> Run:
    """What the folder's shards were made with; raise BadShard."""
    try:
        return msgspec.json.decode((folder / "run.json").read_bytes(), type=Run)
    except FileNotFoundError:
        raise BadShard(
            f"{folder} has no shards; run the stage `generate` into it first."
        ) from None
    except msgspec.DecodeError as error:
        raise BadShard(f"{folder / 'run.json'} is damaged: {error}. Delete the folder.") from None


def write(
    folder: Path, number: int, vocab: int, sequences: Sequence[tuple[Entry, Sequence[int]]],
    skipped: int = 0, seconds: float = 0.0,
) -> None:
    """Write shard `number`; a crash leaves it absent."""
    bits = bits_for(vocab)
    flat = [id for _, ids in sequences for id in ids]
    assert all(len(ids) == entry.length for entry, ids in sequences), "an entry's length is wrong"
    raw = np.asarray(flat, dtype=f"<u{bits // 8}").tobytes()
    assert len(raw) <= MOST_BYTES, f"shard {number} has {len(raw):,} bytes"
    entries = [entry for entry, _ in sequences]
    made = sum(entry.length - entry.prompt for entry in entries)
    index = Index(bits, xxhash.xxh3_128_hexdigest(raw), entries, skipped, made, round(seconds, 3))
    replace(folder / f"{number:05}.ids", raw)
    replace(folder / f"{number:05}.json", msgspec.json.encode(index))


def numbers(folder: Path) -> list[int]:
    """The shards that are whole, ascending."""
    return sorted(int(path.stem) for path in folder.glob("[0-9]*.json"))


def read(folder: Path, number: int) -> Shard:
    """Shard `number`; raise BadShard when its ids are not those that were written."""
    path = folder / f"{number:05}.json"
    index = msgspec.json.decode(path.read_bytes(), type=Index)
    raw = path.with_suffix(".ids").read_bytes()
    if xxhash.xxh3_128_hexdigest(raw) != index.checksum:
        raise BadShard(f"{path.with_suffix('.ids')} is damaged; delete {path} to make it again.")
    return Shard(number, index, np.frombuffer(raw, dtype=f"<u{index.bits // 8}"))


def every(folder: Path) -> Iterator[Shard]:
    """All shards in order; raise BadShard when there are none."""
    read_run(folder)
    found = numbers(folder)
    if not found:
        raise BadShard(f"{folder} has no whole shard; run the stage `generate` into it first.")
    return (read(folder, number) for number in found)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; other processes may write the same one."""
    with _written(path, content) as part:
        part.replace(path)


def create(path: Path, content: bytes) -> None:
    """The same where there is no such file; one that is there stays as it is."""
    with _written(path, content) as part:
        try:
            os.link(part, path)  # unlike a rename it puts nothing in another file's place
        except FileExistsError:
            pass
        except OSError:  # no hard links here: others may see it for a moment before it is whole
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(content)


@contextmanager
def _written(path: Path, content: bytes) -> Iterator[Path]:
    """The content in a file beside `path`, on the disk; gone at the end."""
    part = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)
