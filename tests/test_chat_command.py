"""`slipstream chat` against a server whose engine is scripted: tools, results, mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import slipstream
from gateway.tools import load
from tests.asking import ADD, open_gateway
from tests.live import Live, running
from tests.scripted import Script, ScriptedLink

CALL = load("hermes").write([("add", '{"a": 7}')])


class Talk(ScriptedLink):
    """Says the next line at each request."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        super().__init__(lambda _: Script.say(self.lines.pop(0)))

    def prompt(self, number: int) -> str:
        """What the model was shown at this request."""
        return bytes(id for id in self.submits[number].prompt if id < 256).decode()


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([ADD]))
    return file


@pytest.fixture
def talk(request: pytest.FixtureRequest) -> Iterator[tuple[Talk, Live]]:
    link = Talk(*request.param)
    with running(open_gateway(link)) as live:
        yield link, live


def chat(live: Live, typed: str, *options: str) -> Result:
    url = f"http://127.0.0.1:{live.port}/v1"
    return CliRunner().invoke(slipstream.cli, ["chat", "tiny", "--url", url, *options], typed)


@pytest.mark.parametrize("talk", [["Seven: " + CALL, "It is 8."]], indirect=True)
def test_a_person_sees_the_call_and_plays_the_tool(talk, tools):
    link, live = talk
    said = chat(live, "How much?\n8\n/quit\n", "--tools", str(tools))
    assert said.exit_code == 0, said.output
    assert 'Seven: \n[call add] {"a": 7}' in said.output
    assert "add returns> " in said.output and "It is 8." in said.output
    assert link.submits[0].grammar is not None  # auto: free to call, bound to the schema
    assert "<tools>" in link.prompt(0)
    assert CALL in link.prompt(1) and "<tool_response>\n8\n</tool_response>" in link.prompt(1)


@pytest.mark.parametrize("talk", [["one", "two", "three"]], indirect=True)
def test_the_system_message_opens_every_conversation(talk):
    link, live = talk
    said = chat(live, "first\nsecond\n/new\nthird\n", "--system", "You are terse.")
    assert said.exit_code == 0, said.output
    shown = [link.prompt(number) for number in range(3)]
    assert all(prompt.count("You are terse.") == 1 for prompt in shown)
    assert "first" in shown[1] and "first" not in shown[2]


@pytest.mark.parametrize("talk", [[CALL, "fine"]], indirect=True)
def test_a_turn_whose_tool_is_not_answered_is_forgotten(talk, tools):
    link, live = talk
    chat(live, "How much?\n", "--tools", str(tools))  # the input ends at the tool's question
    assert len(link.submits) == 1


@pytest.mark.parametrize("content", ["{}", "[", ""])
@pytest.mark.parametrize("talk", [[]], indirect=True)
def test_a_file_without_a_list_of_tools_is_refused(talk, tools, content):
    tools.write_text(content)
    said = chat(talk[1], "", "--tools", str(tools))
    assert said.exit_code == 2 and "tools.json" in said.output
