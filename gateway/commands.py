"""Options of `slipstream bench`, `draft`, `grammar` and the other looks.  Shows nothing itself."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def _folder(command: Command) -> Command:
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("bench"),
        show_default=True, help="Folder; one JSON line is added to a file there.",
    )(command)


def timed(command: Command) -> Command:
    """The options of every bench that takes its time."""
    return click.option("--seconds", default=4.0, show_default=True,
                        help="Of each measurement, about.")(_folder(command))


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int]:
    try:
        numbers = [int(one) for one in value.split(",")] if value is not None else []
    except ValueError:
        numbers = [0]
    if value is not None and min(numbers) < 1:
        raise click.BadParameter("give whole numbers above zero, with commas between them.")
    return numbers


_device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
                       show_default=True, help="auto is a GPU when there is one.")


def bench(engine: Callable[..., Any]) -> click.Group:
    """The group; `engine(what, model, device, **how)` gives rows of a model: gateway/ runs none."""

    @click.group()
    def bench() -> None:
        """Measure a layer beside its limit, or any server by its clients.

        \b
        Examples:
          slipstream bench decode smollm2      ms a step, tok/s, % of what memory allows
          slipstream bench decode smollm2 --device cuda --batches 1,32    each stage of a step
          slipstream bench prefill smollm2     tok/s by prompt length
          slipstream bench gateway             HTTP and SSE over a scripted engine
          slipstream bench serve --model smollm2 --clients 1,32    any OpenAI-compatible server
        """

    @bench.command()
    @click.argument("model", default="smollm2")
    @_device
    @click.option("--batches", callback=_numbers, help="Sequences that decode together.  "
                                                       "[default: 1,4,16; GPU: 1,8,32,128,200]")
    @click.option("--context", type=click.IntRange(min=1),
                  help="Tokens of each at the start.  [default: 128; GPU: 512]")
    @timed
    def decode(
        model: str, device: str, batches: list[int], context: int | None, seconds: float, out: Path
    ) -> None:
        """MODEL's step and tok/s, beside what the machine allows; on a GPU stage by stage."""
        from gateway.poke import show_bench

        how = {"seconds": seconds, "batches": batches, "context": context or 0}
        show_bench("decode", engine("decode", model, device, **how), out)

    @bench.command()
    @click.argument("model", default="smollm2")
    @_device
    @timed
    def prefill(model: str, device: str, seconds: float, out: Path) -> None:
        """MODEL's tok/s by prompt length, beside the arithmetic roof."""
        from gateway.poke import show_bench

        show_bench("prefill", engine("prefill", model, device, seconds=seconds), out)

    bench.add_command(gateway)
    bench.add_command(serve)
    return bench


@click.command()
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64),
              help="Gateway processes, as of `slipstream serve`.")
@timed
def gateway(workers: int, seconds: float, out: Path) -> None:
    """HTTP and SSE over a scripted engine, beside targets."""
    from gateway.bench import measure
    from gateway.poke import show_bench

    name = "gateway" if workers == 1 else f"gateway-{workers}-workers"
    show_bench(name, measure(seconds, workers), out)


@click.command()
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option("--model", required=True, help="Its name for the model.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions",
              show_default=True, help="Exact prompts of token ids, or messages of words.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False),
              help="JSONL of {messages, max_tokens, more}, used in turn instead of random ones; "
                   "`more`: other fields of the body.")
@click.option("--clients", callback=_numbers, default="1,32,200", show_default=True,
              help="At once, one row each.")
@click.option("--input", "input_", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", default=128, show_default=True, help="Tokens of an answer, at most.")
@click.option("--requests", default=0, help="Of one row.  [default: 10 a client, at least 16]")
@click.option("--warmup", type=int, help="Requests before each row.  [default: one a client]")
@click.option("--ignore-eos", is_flag=True, help="Let no end token cut an answer.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--ids", nargs=2, type=int, default=(1000, 30_000), show_default=True,
              help="Lowest and highest token id of a prompt: no control tokens between them.")
@click.option("--seed", type=int, help="Of the prompts.  [default: new ones, in no cache]")
@click.option("--processes", type=int, help="Client processes.  [default: half the cores, 8 most]")
@click.option("--row-seconds", default=600.0, show_default=True,
              help="No request of a row begins later.")
@click.option("--server-pid", type=int, help="Measure this process and its descendants.")
@click.option("--api-key", envvar="SLIPSTREAM_API_KEY", default="", help="Sent as a bearer token.")
@_folder
def serve(
    base_url: str, clients: list[int], input_: int, requests: int, warmup: int | None,
    seed: int | None, processes: int | None, row_seconds: float, server_pid: int | None,
    api_key: str, prompts: str | None, out: Path, **same: Any,
) -> None:
    """A server, by streaming clients that each send their next request after the last.

    \b
    Example:
      slipstream bench serve --model smollm2 --clients 1,32 --ignore-eos --server-pid 4711
    """
    from gateway import serve_bench
    from gateway.poke import show_serve

    load = serve_bench.Load(
        base_url, input=input_, seed=secrets.randbits(32) if seed is None else seed,
        issue_s=row_seconds, headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        prompts=prompts or "", **same,
    )
    workers = processes or serve_bench.default_processes()
    rows = serve_bench.measure(load, clients, requests, workers,
                               server_pid=server_pid, warmup=warmup)
    show_serve(load, rows, out)


def tokens(read: Callable[[str], str]) -> click.Command:
    """The command; `read(model)` gives a model's tokenizer as JSON: gateway/ opens none."""

    @click.command()
    @click.argument("text")
    @click.option("--model", default="smollm2", show_default=True, help="Whose tokenizer.")
    def tokens(text: str, model: str) -> None:
        """Show the token ids of TEXT and what each one stands for.

        \b
        Example:
          slipstream tokens "Hello, world"
        """
        from gateway.poke import show_tokens

        show_tokens(read(model), text)

    return tokens


def blocks(read: Callable[[str], str]) -> click.Command:
    """The command; `read` as for `tokens`."""

    @click.command()
    @click.argument("prompt", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @click.option("--other", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                  help="A prompt served before: shows which blocks would hit.")
    @click.option("--model", default="smollm2", show_default=True, help="Whose tokenizer.")
    def blocks(prompt: Path, other: Path | None, model: str) -> None:
        """Show the cache blocks of a PROMPT file: their keys, and which of them would hit.

        \b
        Example:
          slipstream blocks prompt.txt --other yesterday.txt
        """
        from gateway.poke import show_blocks

        before = other.read_text() if other else None
        show_blocks(read(model), prompt.read_text(), before)

    return blocks


def grammar(explain: Callable[[Any], Any]) -> click.Command:
    """The command; `explain(checked)` knows what the schema allows: gateway/ compiles none."""

    @click.command()
    @click.argument("schema", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
    @click.option("--model", default="smollm2", show_default=True, help="Whose tokens.")
    @click.option("--strict", is_flag=True,
                  help="Refuse what cannot be enforced, as `strict: true` of a request does.")
    @click.option("--check", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                  help="JSONL of instances: one JSON line for each, and nothing else.")
    @click.option("--lark", is_flag=True, help="Print the grammar that the engine gets.")
    @click.option("--seed", default=0, show_default=True, help="Of the sample.")
    def grammar(
        schema: str, model: str, strict: bool, check: Path | None, lark: bool, seed: int
    ) -> None:
        """Show what a JSON SCHEMA lets a model say: keywords, forced text, a random sample.

        SCHEMA is a file, or - for standard input: a schema, an OpenAI tool, or a response_format.
        A keyword is enforced, dropped (the grammar allows more; finished arguments are checked for
        it), or ignored (it allows everything to any validator).

        With --check a line is {"line": 1, "accepted": true}, or with "accepted": false the
        character it fails at and what was expected there.  Keys are expected in the schema's order.

        \b
        Examples:
          slipstream grammar tool.json
          slipstream grammar tool.json --strict --check calls.jsonl
          echo '{"type": "integer", "minimum": 7}' | slipstream grammar - --lark
        """
        from gateway import poke_grammar

        if check is not None:
            poke_grammar.show_checks(schema, explain, check, strict=strict)
        elif lark:
            poke_grammar.show_lark(schema, explain, strict=strict)
        else:
            poke_grammar.show_grammar(schema, explain, model, strict=strict, seed=seed)

    return grammar


def draft(opened: Callable[[str, str], Any]) -> click.Command:
    """The command; `opened(model, speculative)` gives a model and where its tokens came from."""

    @click.command()
    @click.argument("text")
    @click.option("--model", default="smollm2", show_default=True, help="Who answers.")
    @click.option("--speculative-config", default="auto", show_default=True,
                  help="Who drafts: auto, off, or JSON as of `slipstream serve`.")
    @click.option("--max-tokens", default=200, show_default=True, help="Of the answer.")
    @click.option("--schema", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                  help="JSON Schema that the answer satisfies: grammars dictate much.")
    @click.option("--prediction", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                  help="File with what you expect the answer to be, for edits.")
    def draft(
        text: str, model: str, speculative_config: str, max_tokens: int, schema: Path | None,
        prediction: Path | None,
    ) -> None:
        """Answer TEXT and colour each token by who guessed it; drafts never change the text.

        \b
        Examples:
          slipstream draft "List the planets, then list them again."
          slipstream draft "A city and its size" --schema city.json
        """
        from gateway import poke_draft

        fields = poke_draft.fields(max_tokens, schema, prediction)
        model_here, sources = opened(model, speculative_config)
        with model_here as llm:
            frames = llm.stream([{"role": "user", "content": text}], **fields)
            poke_draft.show_draft(poke_draft.token_texts(frames), sources)

    return draft


def doctor(report: Callable[[str], Any]) -> click.Command:
    """The command; `report(model)` looks at the machine: the engine's room knows what matters."""

    @click.command()
    @click.argument("model", default="smollm2")
    def doctor(model: str) -> None:
        """Report what an issue needs: versions, CPU, memory, disk, port, whether MODEL is found.

        \b
        Example:
          slipstream doctor smollm2
        """
        from gateway.poke import show_report

        sys.exit(0 if show_report(report(model)) else 1)

    return doctor


def worker(work: Callable[[int], int]) -> click.Command:
    """The command, which only a server runs; `work(control)` serves and gives the exit code."""

    @click.command(hidden=True)
    @click.option("--control", type=int, required=True, help="Socket to the server's own process.")
    def worker(control: int) -> None:
        """One gateway process of a server that has several.

        \b
        Example:
          slipstream worker --control 5     as `serve smollm2 --workers 2` does twice
        """
        sys.exit(work(control))

    return worker
