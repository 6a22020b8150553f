"""What `slipstream serve` tells a person: boot time line, model, URL, a curl.  Serves nothing."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from gateway.config import GatewayConfig

if TYPE_CHECKING:
    from engine.messages import Hello
    from gateway.state import Gateway


_FILE_WIDTH = 4096  # of a table that no terminal bounds: paths are long


class Served(Protocol):
    """The checkpoint's facts that are shown."""

    @property
    def architecture(self) -> str:
        """The model family's name."""


class EngineFacts(Protocol):
    """The engine settings that are shown."""

    @property
    def dtype(self) -> str:
        """Of weights and KV."""


class Boot:
    """The time line of a start: who took how long."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._parts: list[tuple[str, float]] = []
        self._told = False

    def done(self, owner: str) -> None:
        """`owner` took the time since the part before."""
        now = time.monotonic()
        self._parts.append((owner, now - self._last))
        self._last = now

    def line(self) -> str:
        """`boot 3.10 s = listening 0.01 + ...`."""
        total = self._last - self._start
        parts = " + ".join(f"{owner} {seconds:.2f}" for owner, seconds in self._parts)
        return f"boot {total:.2f} s = {parts}"

    def ready(
        self, hello: Hello, served: Served, engine: EngineFacts, address: tuple[str, int],
        gateway: Gateway,
    ) -> None:
        """The engine is ready: the first time everything is told, later that it is back."""
        if self._told:
            told = [f"engine is ready again ({hello.model})"]
        else:
            self.done("engine (weights, pages, grammar)")
            told = lines(self.line(), hello, served, engine, address, gateway)
        self._told = True
        with contextlib.suppress(OSError, ValueError):  # whoever read our output has left
            click.echo("\n".join(told))


def lines(
    boot: str, hello: Hello, served: Served, engine: EngineFacts, address: tuple[str, int],
    gateway: Gateway,
) -> list[str]:
    """The banner's lines."""
    url = f"http://{shown_host(address[0])}:{address[1]}"
    kv_tokens = hello.blocks * hello.block_size
    key = "" if not gateway.keys.required else " -H 'authorization: Bearer YOUR_KEY'"
    body = {"model": gateway.model, "stream": True,
            "messages": [{"role": "user", "content": "Hello"}]}
    return [
        boot,
        f"model  {gateway.model}: {served.architecture}, dtype {engine.dtype}, device "
        f"{hello.device}, up to {hello.max_len:,} tokens a request",
        f"KV     {kv_tokens:,} tokens in {hello.blocks:,} blocks; up to {hello.max_sequences} "
        "sequences at the same time",
        f"tools  {gateway.prompts.note}",
        f"keys   {access(gateway.config)}",
        f"URL    {url}/v1",
        f"try    curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}",
    ]


def shown_name(model: str) -> str:
    """What clients call a model: a path's last part, else the name itself."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def access(config: GatewayConfig) -> str:
    """Who may use the server."""
    if config.api_key_file is not None:
        return f"read from {config.api_key_file}"
    if config.host in ("127.0.0.1", "::1", "localhost"):
        return "none needed; only this machine can connect"
    return "none needed, and other machines can connect: give --api-key-file to close it"


def shown_host(host: str) -> str:
    """An address that a person can paste: the any-address becomes loopback, IPv6 gets brackets."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 shown, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def settings_table(settings: Iterable[tuple[str, object, str]]) -> None:
    """Print flag, value and source of every setting; a value is never cut."""
    from rich.console import Console  # late: a server starts without it
    from rich.table import Column, Table

    table = Table("setting", Column("value", overflow="fold"), "from", box=None)
    for flag, value, source in settings:
        table.add_row(flag, str(value), source, style="bold" if source != "default" else "")
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)
