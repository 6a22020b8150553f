"""Shards on disk: whole or absent, checked, of one run.  Generates nothing."""

from __future__ import annotations

import msgspec
import pytest

from speculative.train import shards
from speculative.train.shards import BadShard, Entry, Run

RUN = Run("m", "00", 300, 7, 4, 64)


def entry(number: int, prompt: int, length: int) -> Entry:
    return Entry(number, prompt, length, "chat", 0.7, False, "", 1 << 40)


@pytest.mark.parametrize(("vocab", "bits"), [(300, 16), (1 << 16, 16), ((1 << 16) + 1, 32)])
def test_ids_come_back_as_they_were_written(tmp_path, vocab, bits):
    top = vocab - 1
    first, second = [1, 2, top], [0, top, 5, 6]
    shards.write(tmp_path, 3, vocab, [(entry(0, 2, 3), first), (entry(1, 1, 4), second)])
    found = shards.read(tmp_path, 3)
    assert [ids.tolist() for _, ids in found.sequences()] == [first, second]
    assert found.index.bits == bits
    assert found.index.tokens == 4
    assert (tmp_path / "00003.ids").stat().st_size == 7 * bits // 8


def test_a_shard_without_its_index_is_not_there(tmp_path):
    shards.begin(tmp_path, RUN)
    shards.write(tmp_path, 0, 300, [(entry(0, 1, 2), [1, 2])])
    shards.write(tmp_path, 1, 300, [(entry(4, 1, 2), [3, 4])])
    (tmp_path / "00001.json").unlink()  # as a crash between the two renames leaves it
    (tmp_path / "00002.json.part").write_bytes(b"{")
    assert shards.numbers(tmp_path) == [0]
    assert [shard.number for shard in shards.every(tmp_path)] == [0]


def test_damaged_ids_are_refused_with_what_to_do(tmp_path):
    shards.write(tmp_path, 0, 300, [(entry(0, 1, 3), [1, 2, 3])])
    raw = bytearray((tmp_path / "00000.ids").read_bytes())
    raw[2] ^= 1
    (tmp_path / "00000.ids").write_bytes(raw)
    with pytest.raises(BadShard, match=r"damaged; delete .*00000\.json"):
        shards.read(tmp_path, 0)


@pytest.mark.parametrize(("field", "value"), [("seed", 8), ("vocab", 301), ("conversations", 5),
                                              ("max_len", 65), ("fingerprint", "01")])
def test_a_folder_belongs_to_one_run(tmp_path, field, value):
    shards.begin(tmp_path, RUN)
    shards.begin(tmp_path, msgspec.structs.replace(RUN, model="elsewhere"))
    with pytest.raises(BadShard, match=f"begun with {field}"):
        shards.begin(tmp_path, msgspec.structs.replace(RUN, **{field: value}))


def meanwhile_begun(folder, monkeypatch, run: Run) -> None:
    """Another process begins the folder as `run` once the next one has seen that nobody did."""
    make, others = type(folder).mkdir, [run]

    def slow(path, **given):
        make(path, **given)
        if others:
            shards.begin(folder, others.pop())

    monkeypatch.setattr(type(folder), "mkdir", slow)


@pytest.mark.parametrize("links", [True, False])
def test_of_two_that_begin_a_folder_at_once_the_later_one_is_refused(tmp_path, monkeypatch, links):
    def none(*given):
        raise PermissionError("no hard links here")

    if not links:
        monkeypatch.setattr(shards.os, "link", none)
    meanwhile_begun(tmp_path, monkeypatch, msgspec.structs.replace(RUN, seed=8))
    with pytest.raises(BadShard, match="begun with seed 8, not 7"):
        shards.begin(tmp_path, RUN)
    assert shards.read_run(tmp_path).seed == 8 and not list(tmp_path.glob("*.part"))


def test_two_processes_may_begin_and_write_at_once(tmp_path, monkeypatch):
    """The other one does the same between this one's look and its rename."""
    real = shards.replace
    meanwhile_begun(tmp_path, monkeypatch, RUN)
    shards.begin(tmp_path, RUN)
    assert shards.read_run(tmp_path) == RUN
    opened: list[str] = []
    fsync = shards.os.fsync

    def meanwhile(file):
        if not opened:
            opened.append("once")
            real(tmp_path / "00001.json", b"theirs")
        fsync(file)

    monkeypatch.setattr(shards.os, "fsync", meanwhile)
    real(tmp_path / "00001.json", b"ours")
    assert (tmp_path / "00001.json").read_bytes() == b"ours"
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(file):
        raise OSError("no space")

    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        shards.replace(tmp_path / "00000.ids", b"abc")
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_says_what_to_run(tmp_path):
    with pytest.raises(BadShard, match="run the stage `generate`"):
        shards.every(tmp_path)
    shards.begin(tmp_path, RUN)
    with pytest.raises(BadShard, match="no whole shard"):
        shards.every(tmp_path)


def test_shards_that_could_pass_the_size_limit_are_refused_before_the_work():
    shards.check_size(msgspec.structs.replace(RUN, conversations=4096, max_len=2048))
    with pytest.raises(ValueError, match="--per-shard 4096 or less"):
        shards.check_size(msgspec.structs.replace(RUN, conversations=4097, max_len=2048))
