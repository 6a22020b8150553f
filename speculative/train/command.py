"""Options of `slipstream train-draft`.  Does no work itself; imports torch only when it runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from speculative.train import STAGES, USUAL

MINUTE = 60.0
AUTO = 0  # steps: what the time allows (optimise.py, which imports torch)


def _stages(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    wanted = [one.strip() for one in value.split(",") if one.strip()]
    for one in wanted:
        if one not in STAGES:
            raise click.BadParameter(f"{one!r} is no stage; they are {', '.join(STAGES)}.")
    return wanted


def _steps(context: click.Context, parameter: click.Parameter, value: str) -> int:
    if value == "auto":
        return AUTO
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a number from 1 on nor `auto`.")
    return int(value)


#: What a training is; see optimise.Recipe.
RECIPE = (
    click.option("--steps", default="1500", show_default=True, callback=_steps,
                  help="Of the optimiser; `auto` = what --minutes allows, by the first 40."),
    click.option("--rows", default=16, show_default=True, help="Of a step."),
    click.option("--micro", default=0,
                  help="Rows computed together: memory against speed.  [default: 4 on a GPU, "
                       "all on a CPU]"),
    click.option("--length", default=2048, show_default=True, help="Tokens of a row."),
    click.option("--unroll", default=5, show_default=True,
                  help="Steps of the head on its own features."),
    click.option("--rate", default=1e-3, show_default=True, help="Highest learning rate."),
    click.option("--hybrid", default=0.5, show_default=True,
                  help="Share of the steps before acceptance joins the loss; 1 = it never does."),
)


def _recipe(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(RECIPE):
        command = option(command)
    return command


def train_draft(asker: str) -> click.Command:
    """The command; `asker` is "module:name" of what makes prompts (gateway/asked.py)."""

    @click.command("train-draft")
    @click.argument("model")
    @click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path),
                  help="Folder of all that is made; the head is in its folder `head`.")
    @click.option("--stages", default=",".join(USUAL), show_default=True, callback=_stages,
                  help="Which to run, `measure` too; each goes on where it ended.")
    @click.option("--minutes", type=click.FloatRange(min=0.1),
                  help="End after so long; run again to go on.  [default: until done]")
    @click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
                  show_default=True)
    @click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto",
                  show_default=True, help="Of the model; auto = bfloat16.")
    @click.option("--seed", default=0, show_default=True)
    @click.option("--shards", default=64, show_default=True, type=click.IntRange(1),
                  help="Generated files.")
    @click.option("--first-shard", default=0, show_default=True, type=click.IntRange(0),
                  help="`generate` fills this one to the last; another process may fill the "
                       "others of the folder at the same time, on another GPU.")
    @click.option("--per-shard", default=1024, show_default=True, type=click.IntRange(1),
                  help="Conversations of one; about 250,000 generated tokens a thousand.")
    @click.option("--max-len", default=2048, show_default=True, type=click.IntRange(64),
                  help="Tokens of a prompt and its answer; longer ones are left out.")
    @click.option("--at-once", type=click.IntRange(1), default=None,
                  help="Sequences that generate side by side.  [default: by device]")
    @click.option("--workers", default=0, show_default=True, type=click.IntRange(0, 64),
                  help="Processes that prepare prompts; 0 = none beside this one.")
    @click.option("--kv-bytes", type=int, default=None, help="As --cache.kv-bytes of serve.")
    @click.option("--vocab", default=8192, show_default=True, type=click.IntRange(16),
                  help="Tokens that the head can draw.")
    @_recipe
    @click.option("--answers", default=4096, show_default=True, help="Held-out ones to judge.")
    @click.option("--measured", default=60, show_default=True, type=click.IntRange(1),
                  help="Held-out ones that `measure` answers, in each way.")
    def command(
        model: str, out: Path, stages: list[str], minutes: float | None, at_once: int | None,
        kv_bytes: int | None, **given: Any,
    ) -> None:
        """Train an EAGLE-3 draft head for MODEL, on its own answers.

        \b
        Examples:
          slipstream train-draft smollm2 --out draft
          slipstream train-draft smollm2 --out draft --stages generate --minutes 8
          slipstream train-draft smollm2 --out draft --stages optimise --minutes 9 --steps auto
          slipstream train-draft ./llama --out draft --vocab 16384 --steps 3000
        """
        _run(model, out, stages, minutes, asker, click.echo,
             at_once=at_once or 0, kv_bytes=kv_bytes or 0, **given)

    return command


def _run(
    model: str, out: Path, stages: list[str], minutes: float | None, asker: str,
    tell: Callable[[str], None], *, steps: int, rows: int, micro: int, length: int, unroll: int,
    rate: float, hybrid: float, **given: Any,
) -> None:
    from speculative.train.optimise import STATE, UNPLANNED, Recipe
    from speculative.train.stages import Stages, Wish

    deadline = float("inf") if minutes is None else time.monotonic() + minutes * MINUTE
    recipe = Recipe(
        steps=steps, rows=rows, micro=micro, length=length, unroll=unroll, rate=rate,
        hybrid=hybrid, seed=given["seed"],
    ).check()
    # Now, not after hours of `generate`; a training that has its plan needs no minutes.
    if steps == AUTO and minutes is None and "optimise" in stages and not (out / STATE).exists():
        raise ValueError(UNPLANNED)
    told = "slipstream " + shlex.join(sys.argv[1:])
    wish = Wish(model, str(out), asker, deadline=deadline, command=told, **given)
    work = Stages(wish, recipe, tell)
    for stage in stages:
        if time.monotonic() >= deadline:
            tell(f"{stage}: no time is left; run it again")
            return
        getattr(work, stage)()
