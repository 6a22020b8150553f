"""Every sample and the README's Python run as a newcomer would run them.  Needs the real model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = sorted((ROOT / "samples").glob("0*.py"))
# What each one must print, whatever the model says.
SHOWS = {
    "01_chat": r"\w",
    "02_tool_call": r"arguments are valid JSON and fit the schema",
    "03_session": r"[1-9]\d* of \d+ prompt tokens came from the cache",
    "04_in_process": r"Finish\(reason='(stop|length)'\)\n\{.*\"islands\": (true|false)",
}

pytestmark = [pytest.mark.model, pytest.mark.timeout(170)]


def environment(**more: str) -> dict[str, str]:
    """Ours, with the repository importable."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The base URL of a server with the small model."""
    server = subprocess.Popen(
        [sys.executable, "slipstream.py", "serve", "smollm2", "--port", "0", "--drain-delay", "0",
         *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(),
    )  # fmt: skip
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.match(r"URL\s+(\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("the server did not start; run `slipstream serve smollm2`")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        server.stdout.close()


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """One server for all samples that want one."""
    with serving() as url:
        yield url


def output(*command: str, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=160,
        env=environment(**more),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_runs_and_shows_what_it_is_about(sample, base_url):
    assert re.search(SHOWS[sample.stem], output(str(sample), BASE_URL=base_url), re.S)


def test_the_demo_holds_three_turns_with_valid_calls_and_a_warm_cache():
    said = output("samples/demo.py")  # with a server of its own: this is `make demo`
    assert said.count("arguments are valid JSON and fit the schema") == 3
    found = re.findall(r"(\d+) prompt tokens, (\d+) of them cached", said)
    prompts, cached = zip(*((int(p), int(c)) for p, c in found), strict=True)
    assert len(cached) == 3
    for prompt, hit in zip(prompts[1:], cached[1:], strict=True):
        assert prompt - 2 * 64 <= hit < prompt
    assert cached[1] > 0
    assert cached[2] > 0
    assert said.rstrip().endswith("demo done")


def test_the_template_for_short_answers_keeps_them_short():
    with serving("--chat-template", "samples/short_answers.jinja") as url:
        answer = OpenAI(base_url=url, api_key="none").chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=20, n=8, seed=1,
        )  # fmt: skip
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 8


def test_the_readmes_python_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "Finish(" in output("-c", textwrap.dedent(block))
