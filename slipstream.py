"""Slipstream's front door: the public API, the command line, the wiring.  Does no work of its own.

Each name and each command belongs to a room and is imported when it is used: `--help` stays quick,
and the gateway's process never loads torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cache.config import CacheConfig
from engine.config import EngineConfig
from gateway import commands
from gateway.config import ConfigError, GatewayConfig
from gateway.options import SHOWN, Sections

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.messages import Hello
    from gateway.early import Early
    from gateway.events import Event
    from gateway.inside import Inside
    from gateway.link import Link
    from gateway.state import Gateway, Shared
    from gateway.workers import Workers

__all__ = ["Slipstream", "main", "serve"]

log = logging.getLogger("slipstream")
LOG = "%(asctime)s %(name)s %(levelname)s %(message)s"

SETTINGS = Sections(
    {"gateway": GatewayConfig(), "engine": EngineConfig(model=""), "cache": CacheConfig()},
    SHOWN,
    frozenset(f"engine.{name}" for name in ("model", "served_name", "cache", "proposer", "head")),
    ("tool-call-parser", "chat-template"),
)


# -- wiring


def open_gateway(
    checkpoint: Checkpoint, config: GatewayConfig, engine: EngineConfig, link: Link, parser: str,
    template: str | None = None, shared: Shared | None = None,
) -> Gateway:
    """The gateway for a model, over a link; `parser` and `template` replace the model's own."""
    from gateway.prompt import Prompts
    from gateway.state import Gateway
    from gateway.tools import pick

    template = template or checkpoint.chat_template
    prompts = Prompts(
        checkpoint.tokenizer_json,
        template,
        max_len=engine.max_len or checkpoint.config.max_len,
        format=pick(template, parser or None),
        add_bos=checkpoint.add_bos,
        bos_id=checkpoint.bos_id,
        stop_ids=checkpoint.stop_ids,
    )
    return Gateway.open(config, link, prompts, engine.served_name, checkpoint.defaults, shared)


def serve(
    model: str,
    gateway: GatewayConfig | None = None,
    engine: EngineConfig | None = None,
    *,
    tool_call_parser: str = "",
    chat_template: str | None = None,
    in_process: bool = False,
) -> int:
    """Serve `model` until a signal has drained the server; return the exit code.

    0 = drained, 1 = the engine or a worker stays down, 98 = the port is taken.  `chat_template` is
    Jinja used instead of the model's own; `in_process`: the engine on a thread here, to debug it.
    """
    from gateway import ports
    from gateway.banner import Boot

    boot, parser, template = Boot(), tool_call_parser, chat_template
    config = (gateway or GatewayConfig()).check()
    settings = _with_model(engine or EngineConfig(model=""), model).check()
    if in_process and config.workers > 1:
        raise ConfigError("An engine in the gateway's process has one worker; leave out --workers.")
    try:
        sockets = ports.listen(config)  # before anything slow
    except ports.PortTaken as error:
        log.error("%s", error.strerror)
        return ports.EXIT_PORT_TAKEN
    with contextlib.ExitStack() as held:
        for sock in sockets:
            held.enter_context(sock)
        early = None if in_process else held.enter_context(_begun(settings))
        boot.done("listening, engine's process")
        from engine.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(model, settings.revision)
        boot.done("tokenizer, config")
        address, failed = sockets[0].getsockname(), list[str]()

        def on_ready(hello: Hello) -> None:
            boot.ready(hello, checkpoint, settings, address, opened)

        def on_down(why: str) -> None:
            log.error("%s", why)
            failed.append(why)
            server.give_up()

        if early is not None and config.workers > 1:
            workers = _workers(config, settings, parser, template, sockets, on_ready, early)
            # For what it refuses, and the banner.
            opened = open_gateway(checkpoint, config, settings, workers.link, parser, template)
            boot.done("gateway")
            return workers.run()
        link = _link(settings, checkpoint, early, on_ready, on_down)
        opened = open_gateway(checkpoint, config, settings, link, parser, template)
        from gateway import app, http

        server = http.server(app.build(opened), opened)
        boot.done("gateway")
        server.run(sockets=sockets)
    return 1 if failed else 0


def _begun(settings: EngineConfig) -> Early:
    """The engine's process; it waits for its link with what takes memory or may be refused."""
    from engine.starting import command
    from gateway.early import Early

    return Early(*command(settings))


def _workers(
    config: GatewayConfig, settings: EngineConfig, parser: str, template: str | None,
    sockets: Sequence[socket.socket], on_ready: Any, early: Early,
) -> Workers:
    """One gateway process for each socket, over one engine."""
    from gateway.workers import Program, Workers

    work = [sys.executable, "-P", "-m", "slipstream", "worker"]
    told = msgspec.json.encode([config, settings, parser, template])
    return Workers(config, Program(early.command, early.environment),
                   Program(work, early.environment), sockets, settings=told, on_ready=on_ready,
                   early=early)


def _work(control: int) -> int:
    """Be a worker: the other end of `_workers`."""
    from engine.checkpoint import open_checkpoint
    from gateway.app import build
    from gateway.worker import Part

    logging.basicConfig(level=logging.INFO, format=LOG)
    part = Part.receive(control)
    given, settings, parser, template = msgspec.json.decode(
        part.start.settings, type=tuple[GatewayConfig, EngineConfig, str, str | None]
    )
    link = part.link()
    opened = open_gateway(
        open_checkpoint(settings.model, settings.revision), part.config(given), settings, link,
        parser, template, part.shared(),
    )
    return part.serve(build(opened), opened, link)


def _with_model(engine: EngineConfig, model: str) -> EngineConfig:
    from gateway.banner import shown_name
    from speculative.served import configured

    return configured(msgspec.structs.replace(engine, model=model, served_name=shown_name(model)))


def _link(
    settings: EngineConfig, checkpoint: Checkpoint, early: Early | None, on_ready: Any, on_down: Any
) -> Link:
    if early is None:
        from engine.server import make  # as in the engine's process
        from gateway.local_link import LocalLink

        return LocalLink(partial(make, settings, checkpoint), on_ready=on_ready, on_down=on_down)
    from gateway.socket_link import SocketLink

    return SocketLink(early.command, environment=early.environment, on_ready=on_ready,
                      on_down=on_down, early=early)


class Slipstream:
    """A model in this process, with the same endpoints, checks and cache as the server.

        with Slipstream("smollm2") as llm:
            for event in llm.chat([{"role": "user", "content": "Hello"}]):
                ...
    """

    def __init__(
        self,
        model: str,
        engine: EngineConfig | None = None,
        gateway: GatewayConfig | None = None,
        *,
        tool_call_parser: str = "",
    ) -> None:
        """Nothing is loaded yet; raise BadConfig or ConfigError."""
        self.engine = _with_model(engine or EngineConfig(model=""), model).check()
        self.config = (gateway or GatewayConfig()).check()
        self._parser = tool_call_parser
        self._inside: Inside | None = None
        self._model = ""

    def __enter__(self) -> Slipstream:
        """Load the model; raise BadCheckpoint, or EngineLost with what went wrong."""
        from engine.checkpoint import open_checkpoint
        from engine.server import make
        from gateway.app import build
        from gateway.inside import Inside
        from gateway.local_link import LocalLink

        checkpoint = open_checkpoint(self.engine.model, self.engine.revision)
        link = LocalLink(partial(make, self.engine, checkpoint))
        gateway = open_gateway(checkpoint, self.config, self.engine, link, self._parser)
        self._model = gateway.model
        self._inside = Inside(build(gateway))
        self._inside.open()
        try:
            self._inside.wait(link.ready())
        except BaseException:
            self._inside.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engine."""
        if self._inside is not None:
            self._inside.close()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, session: str = "", **fields: Any
    ) -> Iterator[Event]:
        """Stream the answer to a conversation as events; raise RequestFailed.

        `messages` and `fields` are those of OpenAI's chat endpoint; `session` keeps the cache warm
        between the turns of one conversation.  Leaving the iteration early stops the model.
        """
        from gateway.inside import events

        return events(self.stream(messages, session=session, **fields))

    def stream(
        self, messages: Sequence[Mapping[str, Any]], *, session: str = "", **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """The same as OpenAI's `chat.completion.chunk` objects."""
        from gateway.inside import frames

        body = {"messages": list(messages), **fields, "stream": True}
        return frames(self._post(body, session))

    def complete(
        self, messages: Sequence[Mapping[str, Any]], *, session: str = "", **fields: Any
    ) -> dict[str, Any]:
        """The whole answer as OpenAI's `chat.completion` object; raise RequestFailed."""
        body = {"messages": list(messages), **fields, "stream": False}
        answer: dict[str, Any] = json.loads(b"".join(self._post(body, session)))
        return answer

    def _post(self, body: dict[str, Any], session: str) -> Iterator[bytes]:
        if self._inside is None:
            raise RuntimeError("The model is not loaded; use `with Slipstream(...) as llm:`.")
        headers = {"x-session-affinity": session} if session else {}
        return self._inside.post("/v1/chat/completions", {"model": self._model, **body}, headers)


# -- command line


@click.group(epilog="Every option of `serve` has an environment twin: --max-model-len is "
                    "SLIPSTREAM_MAX_MODEL_LEN.")
@click.version_option(package_name="slipstream-serve")
def cli() -> None:
    """One server for agents: streamed tool calls held to their schema, warm sessions.

    \b
    First steps:
      slipstream doctor
      slipstream serve smollm2
      slipstream chat smollm2
    """


@cli.command("serve")
@click.argument("model")
@SETTINGS.options
@click.option("--tool-call-parser", "--tool-format", default="",
              envvar="SLIPSTREAM_TOOL_CALL_PARSER", help="Layout of calls.  [default: the model's]")
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              envvar="SLIPSTREAM_CHAT_TEMPLATE", help="Jinja file.  [default: the model's]")
@click.option("--in-process", is_flag=True, help="Engine on a thread here, for a debugger.")
@click.option("--print-config", is_flag=True, help="Show every setting and its source, and exit.")
@click.pass_context
def serve_command(
    context: click.Context, /, model: str, tool_call_parser: str, chat_template: Path | None,
    in_process: bool, print_config: bool, **values: Any,
) -> None:
    """Serve MODEL over OpenAI's API: a folder, a .gguf file, a hub id, or `smollm2`.

    \b
    Examples:
      slipstream serve smollm2
      slipstream serve ./llama --port 9000 --max-model-len 8192 --api-key-file keys.txt
      SLIPSTREAM_PORT=9000 slipstream serve smollm2 --config server.toml --print-config
    """
    for sentence in SETTINGS.unknown_environment():
        click.echo(f"warning: {sentence}", err=True)
    if print_config:
        from gateway.banner import settings_table

        settings_table(SETTINGS.sources(context))
        return
    logging.basicConfig(level=logging.INFO, format=LOG)
    made = SETTINGS.build(values)
    engine = msgspec.structs.replace(made["engine"], cache=made["cache"])
    template = None if chat_template is None else chat_template.read_text()
    sys.exit(serve(model, made["gateway"], engine, tool_call_parser=tool_call_parser,
                   chat_template=template, in_process=in_process))


@cli.command()
@click.argument("model", default="smollm2")
@click.option("--url", help="Talk to this server (…/v1) instead of loading the model here.")
@click.option("--max-tokens", default=400, show_default=True, help="Of one answer.")
@click.option("--system", default="", help="What the model is told first.")
@click.option("--tools", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="JSON list of OpenAI tools; you play them when the model calls one.")
def chat(model: str, url: str | None, max_tokens: int, system: str, tools: Path | None) -> None:
    """Talk to MODEL in the terminal.

    \b
    Examples:
      slipstream chat smollm2 --system "You are terse." --tools tools.json
      slipstream chat smollm2 --url http://127.0.0.1:8000/v1
    """
    from gateway.terminal import converse, read_tools, remote

    fields = {"max_tokens": max_tokens} | ({} if tools is None else {"tools": read_tools(tools)})
    if url:
        converse(remote(url, model, fields), f"{model} at {url}", system)
        return
    with Slipstream(model) as llm:
        converse(lambda messages: llm.chat(messages, session="chat", **fields), model, system)


def _late(module: str, name: str) -> Any:  # what it names is imported when it is called
    return lambda *given, **how: getattr(importlib.import_module(module), name)(*given, **how)


def _watched(model: str, speculative: str) -> tuple[Slipstream, Sequence[str]]:
    from speculative import traced

    engine = EngineConfig(model="", speculative=speculative, proposer="speculative.traced:make")
    traced.told.clear()
    return Slipstream(model, engine), traced.told


cli.add_command(commands.bench(_late("engine.bench", "measured")))
cli.add_command(commands.draft(_watched))
cli.add_command(commands.doctor(_late("engine.doctor", "report")))
cli.add_command(commands.tokens(_late("engine.checkpoint", "tokenizer_of")))
cli.add_command(commands.blocks(_late("engine.checkpoint", "tokenizer_of")))
cli.add_command(commands.grammar(_late("engine.grammar.explain", "Explainer")))
cli.add_command(_late("speculative.train.command", "train_draft")("gateway.asked:Asker"))
cli.add_command(commands.worker(_work))


def main() -> None:
    """The `slipstream` command; a caller's mistake is one sentence and exit code 2."""
    from engine.model_config import BadCheckpoint
    from gateway.link import EngineLost

    try:
        cli()
    except (BadCheckpoint, EngineLost, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
