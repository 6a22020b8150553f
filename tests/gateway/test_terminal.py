"""What `slipstream chat` shows of reasoning, and what it sends back.  Opens no sockets."""

from __future__ import annotations

import click
import pytest
from rich.console import Console

from gateway.events import CallArgs, CallStart, Finish, Reasoning, Text
from gateway.terminal import _answer, converse

THINKS = [
    Reasoning("First "), Reasoning("this.\x1b[31m"), Text("Hel"), Text("lo."), Finish("stop"),
]  # fmt: skip
CALLS = [
    Reasoning("Why."), CallStart(0, "c1", "add"), CallArgs(0, '{"a": 1}'), Finish("tool_calls"),
]  # fmt: skip


@pytest.fixture
def echoed(monkeypatch) -> list[tuple[str, bool]]:
    """What was printed, and whether dimmed."""
    heard: list[tuple[str, bool]] = []
    monkeypatch.setattr(click, "echo", lambda text="", nl=True: heard.append((text, False)))
    monkeypatch.setattr(
        click, "secho", lambda text="", nl=True, dim=False: heard.append((text, dim))
    )
    return heard


def test_reasoning_is_dim_and_apart_from_the_answer(echoed):
    said = _answer(lambda _: iter(THINKS), [], Console(quiet=True))
    dim = "".join(text for text, is_dim in echoed if is_dim)
    plain = "".join(text for text, is_dim in echoed if not is_dim)
    assert dim == "First this.[31m" and plain == "\nHello."
    assert said == {"role": "assistant", "content": "Hello.",
                    "reasoning_content": "First this.\x1b[31m"}  # fmt: skip


def test_an_answer_without_reasoning_has_no_such_field(echoed):
    said = _answer(lambda _: iter(THINKS[2:]), [], Console(quiet=True))
    assert said == {"role": "assistant", "content": "Hello."}


def test_the_history_keeps_reasoning_beside_text_and_calls(monkeypatch, echoed):
    answers = [CALLS, THINKS, THINKS]
    asked: list[list[dict]] = []
    typed = iter(["How?", "result", "And?", "/quit"])

    def chat(history):
        asked.append([dict(one) for one in history])
        return iter(answers.pop(0))

    monkeypatch.setattr(Console, "input", lambda *_: next(typed))
    converse(chat, "tiny")
    assert [message.get("reasoning_content") for message in asked[2]] == [
        None, "Why.", None, "First this.\x1b[31m", None
    ]  # fmt: skip
    assert asked[2][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [message["role"] for message in asked[2]] == [
        "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip
