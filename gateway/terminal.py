"""`slipstream chat`: a conversation in the terminal, model here or on a server.  Saves nothing."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console

from gateway.events import CallArgs, CallStart, Event, Finish, Reasoning, Text
from gateway.inside import RequestFailed, events, frames

Message = dict[str, Any]
Chat = Callable[[Sequence[Message]], Iterator[Event]]
HELP = "Enter sends, /new starts again, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
CALLS = 20  # rounds of calls in one turn, then the person has the word again


def read_tools(path: Path) -> list[Any]:
    """The tools in a file: a JSON list as OpenAI's `tools`; raise click.BadParameter."""
    try:
        tools = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is no JSON file: {error}") from error
    if not isinstance(tools, list):
        raise click.BadParameter(f"{path} holds no list; write OpenAI's `tools`, [{{...}}].")
    return tools


def converse(chat: Chat, name: str, system: str = "") -> None:
    """Read a line, stream the answer, until the person leaves; they also play the tools."""
    console = Console()
    console.print(f"[bold]{name}[/bold]  {HELP}", highlight=False)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    history = [*opening]
    while True:
        try:
            line = console.input("[bold cyan]> [/bold cyan]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        match line:
            case "":
                continue
            case "/quit":
                return
            case "/new":
                history = [*opening]
            case _ if line.startswith("/"):
                console.print(HELP)
            case _:
                # A turn that failed leaves the history as it was before the question.
                turn = _turn(chat, [*history, {"role": "user", "content": line}], console)
                history = history if turn is None else turn


def _turn(chat: Chat, history: list[Message], console: Console) -> list[Message] | None:
    """Answer, and answer again while tools are called; the longer history, or None on failure."""
    for _ in range(CALLS):
        said = _answer(chat, history, console)
        if said is None:
            return None
        history.append(said)
        if not said.get("tool_calls"):
            return history
        try:
            for call in said["tool_calls"]:
                result = console.input(f"[bold]{call['function']['name']} returns> [/bold]")
                history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        except (EOFError, KeyboardInterrupt):
            return None
    return history


def _answer(chat: Chat, history: Sequence[Message], console: Console) -> Message | None:
    """Show one answer as it comes; the assistant's message, or None when it failed."""
    said = _Said()
    start, first = time.monotonic(), 0.0
    try:
        for event in chat(history):
            first = first or time.monotonic() - start
            said.show(event)
    except RequestFailed as error:
        console.print(f"[red]{error}[/red]")
        return None
    except OSError as error:
        console.print(f"[red]No answer from the server: {error}[/red]")
        return None
    except KeyboardInterrupt:
        said.finish = "stopped"
        said.calls = []  # the last one may be half
    took = time.monotonic() - start
    console.print(
        f"\n[dim]{said.finish} · first after {first:.2f} s · {took:.2f} s[/dim]", highlight=False
    )
    return said.message


class _Said:
    """An answer as far as it has come."""

    def __init__(self) -> None:
        self.finish = ""
        self.calls: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def show(self, event: Event) -> None:
        """Print what an event says, reasoning dimmed, and keep it."""
        match event:
            case Reasoning(text=text):
                self._thoughts.append(text)
                click.secho(_shown(text), nl=False, dim=True)
            case Text(text=text):
                if self._thoughts and not self._texts:
                    click.echo("\n")
                self._texts.append(text)
                click.echo(_shown(text), nl=False)
            case CallStart(id=id, name=name):
                function = {"name": name, "arguments": ""}
                self.calls.append({"id": id, "type": "function", "function": function})
                click.echo(f"\n[call {name}] ", nl=False)
            case CallArgs(text=text):
                self.calls[-1]["function"]["arguments"] += text
                click.echo(_shown(text), nl=False)
            case Finish(reason=reason):
                self.finish = reason

    @property
    def message(self) -> Message:
        """For the history.  The model reads its reasoning again where its chat template keeps it:
        within a turn of calls, mostly."""
        made: Message = {"role": "assistant", "content": "".join(self._texts)}
        if self._thoughts:
            made["reasoning_content"] = "".join(self._thoughts)
        return {**made, "tool_calls": self.calls} if self.calls else made


def _shown(text: str) -> str:
    """Text without what could steer the terminal: a model's output is not trusted."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def remote(url: str, model: str, fields: Mapping[str, Any]) -> Chat:
    """A chat with a server at `url` (ends in /v1); the key is OPENAI_API_KEY's.

    `fields` of every request: max_tokens, tools.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url} is no http URL; give one like http://127.0.0.1:8000/v1")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
        "x-session-affinity": f"chat-{os.getpid()}",
    }

    def chat(messages: Sequence[Message]) -> Iterator[Event]:
        body = {**fields, "model": model, "messages": list(messages), "stream": True}
        connection = kind(parts.hostname or "", parts.port, timeout=600)
        try:
            path = parts.path.rstrip("/") + "/chat/completions"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(_problem(response.read()), response.status)
            yield from events(frames(iter(response.readline, b"")))
        finally:
            connection.close()

    return chat


def _problem(body: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return {"message": "The server's answer is no error object; is the URL right?"}
