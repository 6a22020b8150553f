"""An engine's process that is started before anything else: it waits, goes on, or is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import uvloop

from engine.messages import Submit
from gateway.early import Early
from gateway.link import EngineLost
from gateway.socket_link import SocketLink
from tests.linking import RULES, command, letters, read, until

ROOT = Path(__file__).parent.parent.parent

WAITS = """
import os, sys
at = sys.argv.index("--after")
word = os.read(int(sys.argv[at + 1]), 1)
del sys.argv[at : at + 2]
"""
SCRIPTED = [sys.executable, "-c",
            WAITS + "from engine.scripted import main\nsys.exit(main() if word else 5)"]


def test_it_does_nothing_before_the_word_and_a_link_takes_it_over():
    async def go() -> None:
        with Early(SCRIPTED) as early:
            await asyncio.sleep(0.3)
            assert not early.path.exists() and early.returncode is None
            link = SocketLink(command(), RULES, early=early)
            await link.start()
            hello = await link.ready()
            assert link.process is early and int(hello.version) == early.pid
            assert link.path == early.path
            assert await read(link.submit(Submit("r", [1], 5))) == letters(5)
            os.kill(early.pid, signal.SIGKILL)  # the next one is of the link's own
            await until(lambda: link.restarts == 1 and link.hello is not None)
            assert link.process is not early and link.process.pid != early.pid
            assert await read(link.submit(Submit("s", [1], 5))) == letters(5)
            await link.stop()
        assert not early.folder.exists()
    uvloop.run(go())


def test_one_that_ends_by_itself_is_said_to_have_not_started():
    async def go() -> None:
        with Early([sys.executable, "-c", "raise SystemExit(7)"]) as early:
            link = SocketLink(command(), RULES, early=early)
            await link.start()
            with pytest.raises(EngineLost, match=r"could not start .exit code 7"):
                await link.ready()
            await link.stop()
    uvloop.run(go())


def test_leaving_the_block_ends_one_that_nobody_took_over():
    with Early(SCRIPTED) as early:
        child = psutil.Process(early.pid)
    assert not child.is_running() and not early.folder.exists()
    assert early.returncode == -signal.SIGKILL


def test_a_program_that_does_not_exist_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Early(["/no/such/program"])
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == files


def test_a_model_that_is_refused_is_one_sentence_though_the_engine_was_started(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nobody"]}))
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "serve", str(tmp_path), "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 2, said
    assert said.startswith("error: ") and len(said.splitlines()) == 1
