"""`slipstream chat`: a conversation in the terminal, model here or on a server.  Saves nothing."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console

from gateway.events import CallArgs, CallStart, Event, Finish, Text
from gateway.inside import RequestFailed, events, frames

Chat = Callable[[Sequence[Mapping[str, Any]]], Iterator[Event]]
HELP = "Enter sends, /new starts again, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


def converse(chat: Chat, name: str) -> None:
    """Read a line, stream the answer, until the person leaves."""
    console = Console()
    console.print(f"[bold]{name}[/bold]  {HELP}", highlight=False)
    history: list[dict[str, str]] = []
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
                history.clear()
            case _ if line.startswith("/"):
                console.print(HELP)
            case _:
                history.append({"role": "user", "content": line})
                said = _answer(chat, history, console)
                # A turn that failed leaves the history as it was before the question.
                if said is None:
                    history.pop()
                else:
                    history.append({"role": "assistant", "content": said})


def _answer(chat: Chat, history: Sequence[Mapping[str, Any]], console: Console) -> str | None:
    """Show one answer as it comes; its text, or None when it failed."""
    said: list[str] = []
    start, first, finish = time.monotonic(), 0.0, ""
    try:
        for event in chat(history):
            first = first or time.monotonic() - start
            match event:
                case Text(text=text):
                    said.append(text)
                    click.echo(_shown(text), nl=False)
                case CallStart(name=name):
                    click.echo(f"\n[call {name}] ", nl=False)
                case CallArgs(text=text):
                    click.echo(_shown(text), nl=False)
                case Finish(reason=finish):
                    pass
    except RequestFailed as error:
        console.print(f"[red]{error}[/red]")
        return None
    except OSError as error:
        console.print(f"[red]No answer from the server: {error}[/red]")
        return None
    except KeyboardInterrupt:
        finish = "stopped"
    took = time.monotonic() - start
    console.print(
        f"\n[dim]{finish} · first after {first:.2f} s · {took:.2f} s[/dim]", highlight=False
    )
    return "".join(said)


def _shown(text: str) -> str:
    """Text without what could steer the terminal: a model's output is not trusted."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def remote(url: str, model: str, max_tokens: int) -> Chat:
    """A chat with a server at `url` (ends in /v1); the key is OPENAI_API_KEY's."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url} is no http URL; give one like http://127.0.0.1:8000/v1")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
        "x-session-affinity": f"chat-{os.getpid()}",
    }

    def chat(messages: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        body = {
            "model": model, "messages": list(messages), "stream": True, "max_tokens": max_tokens
        }
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
