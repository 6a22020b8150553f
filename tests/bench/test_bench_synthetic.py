"""Acceptance by lot: drawn against what the target says, and no text differs."""

from __future__ import annotations

import re

import pytest

from engine.proposer import Turn
from tests.bench import bench_synthetic
from tests.bench.bench_synthetic import ByLot
from tests.tiny import write_llama


def turn(done: int) -> Turn:
    return Turn(("r", 0), [1, 2, *range(done)], 2, 8, None, b"", list)


def test_a_lot_is_the_same_every_time_and_right_as_often_as_is_said():
    text = [7] * 4000
    drafts = ByLot({("r", 0): text}, 4, 0.7)
    chains = [drafts.guess(turn(done)).tokens for done in range(1000)]
    assert chains == [drafts.guess(turn(done)).tokens for done in range(1000)]
    right = sum(chain.count(7) for chain in chains) / 4000
    assert 0.65 < right < 0.75 and all(len(chain) == 4 for chain in chains)
    assert drafts.guess(turn(3998)).tokens[2:] == []


def test_a_line_a_batch_with_more_tokens_a_row_and_the_same_texts(tmp_path, monkeypatch, capsys):
    folder = write_llama(tmp_path / "model", max_len=256)
    monkeypatch.setattr("sys.argv", [
        "bench", str(folder), "--device", "cpu", "--batches", "1,3", "--context", "20", "--output",
        "60", "--pairs", "2", "--blocks", "60", "--chance", "1.0", "--drafts", "3",
    ])
    assert bench_synthetic.main() == 0
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("synthetic acceptance: 3 drafts")
    assert len(lines) == 2
    for line in lines:
        found = re.search(r"([0-9.]+) tokens a row; 0 texts differ", line)
        assert found and float(found[1]) == pytest.approx(4.0, abs=0.3), line
