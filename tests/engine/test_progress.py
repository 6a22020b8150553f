"""The line that shows a person how far the weights are.  Loads no weights."""

from __future__ import annotations

import io

import pytest

from engine.progress import shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_much_of_the_weights_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with shown() as report:
        assert report is not None
        for done in (50_000_000, 200_000_000):
            report(done, 200_000_000)
    assert "weights" in terminal.getvalue()
    assert "200.0/200.0 MB" in terminal.getvalue()


def test_a_log_file_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    with shown() as report:
        assert report is None
    assert log.getvalue() == ""
