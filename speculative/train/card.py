"""The card of a trained head: every number, and the command behind it.  Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from speculative.train import shards
from speculative.train.evaluate import PLACES, Row
from speculative.train.optimise import Recipe
from speculative.train.serving import Served
from speculative.train.shards import Run


class Card(msgspec.Struct, frozen=True):
    """All that is told of a head."""

    command: str
    run: Run
    recipe: Recipe
    answers: int  # generated, held-out ones too
    tokens: int  # generated
    steps: int  # trained
    size_bytes: int
    draft_vocab: int
    forced: int
    coverage: float
    held_out_coverage: dict[str, float]
    rows: list[Row]
    served: list[Served] = []  # measured with the engine

    @classmethod
    def read(cls, folder: Path) -> Card:
        """What `write` wrote; raise ValueError."""
        try:
            return msgspec.json.decode((folder / "card.json").read_bytes(), type=cls)
        except FileNotFoundError:
            raise ValueError(
                f"{folder / 'card.json'} is not there; run the stage `export` first."
            ) from None

    def write(self, folder: Path) -> None:
        """card.json for programs, README.md for people."""
        shards.replace(folder / "card.json", msgspec.json.format(msgspec.json.encode(self)))
        shards.replace(folder / "README.md", self.text().encode())

    def text(self) -> str:
        """The card in Markdown."""
        covered = ", ".join(f"{one} {share:.2%}" for one, share in self.held_out_coverage.items())
        recipe = self.recipe
        return "\n".join([
            f"# EAGLE-3 draft head of {self.run.model}",
            "",
            f"One layer, {self.draft_vocab:,} draft tokens, bf16, {self.size_bytes / 1e6:.1f} MB, "
            "in SpecForge's dialect: Slipstream, SGLang and vLLM load this folder.",
            "",
            f"Made by `{self.command}`.",
            "",
            f"- Data: {self.answers:,} answers of the model itself, {self.tokens:,} tokens, to "
            "conversations made of templates and seed words (chat, tool calls with generated "
            "schemas, results), at temperatures 0, 0.7 and 1.0. Every 50th schema and every 50th "
            "sentence is held out and in no training conversation.",
            f"- Vocabulary: {self.coverage:.2%} of the generated training tokens, held-out "
            f"{covered}; {self.forced:,} tokens kept for what they are.",
            f"- Training: {self.steps:,} steps{'' if recipe.steps else ', what the time allowed,'} "
            f"of {recipe.rows} rows of {recipe.length:,} tokens, unrolled {recipe.unroll} steps, "
            f"AdamW, rate {recipe.rate:g}, seed {recipe.seed}.",
            "",
            "## Held-out answers",
            "",
            "tau(k): tokens a verification with chains of k tokens, drafted with the target's own "
            "noise; suffix: the same with nothing but suffix drafts. Accuracies by place are the "
            "share of chains whose arg-max is the target's here and before.",
            "",
            *_table(self.rows),
            "",
            *_served(self.served),
        ])  # fmt: skip


def _table(rows: Sequence[Row]) -> list[str]:
    heads = ["answers", "T", "n", *(f"tau({k})" for k in (1, 2, 4, PLACES)), "suffix(4)",
             *(f"place {place}" for place in range(PLACES)), "alpha 0"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        heat = "all" if row.temperature < 0 else f"{row.temperature:g}"
        lines.append(_line([
            row.domain, heat, f"{row.answers:,}",
            *(f"{row.tau[k - 1]:.2f}" for k in (1, 2, 4, PLACES)), f"{row.suffix_tau[3]:.2f}",
            *(f"{share:.1%}" for share in row.full_accuracy), f"{row.alpha[0]:.1%}",
        ]))  # fmt: skip
    return lines


def _served(served: Sequence[Served]) -> list[str]:
    if not served:
        return []
    lines = ["## Measured with the engine", "",
             _line(["drafts", "k", "answers", "tokens", "tau", "accepted", "tokens/s"]),
             _line(["---"] * 7)]
    for one in served:
        lines.append(_line([
            f"{one.drafts}, {one.domain}", str(one.most), f"{one.answers:,}", f"{one.tokens:,}",
            f"{one.tau:.2f}", f"{one.accepted / max(1, one.drafted):.1%}", f"{one.speed:,.0f}",
        ]))  # fmt: skip
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
