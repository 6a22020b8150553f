"""The stages of a training, each from files to files.  Parses no options; see command.py."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from cache.config import CacheConfig
from engine.build import DTYPES
from engine.checkpoint import Checkpoint, open_checkpoint
from engine.config import EngineConfig
from engine.device import pick
from engine.loop import Engine
from speculative.checkpoint import open_head
from speculative.eagle3 import Eagle3
from speculative.head import HeadConfig
from speculative.served import configured
from speculative.train import shards, vocabulary
from speculative.train.card import Card
from speculative.train.evaluate import Row, evaluate
from speculative.train.export import export
from speculative.train.generate import Asked, Generation, Preparing, asker_of, missing
from speculative.train.optimise import STATE, Recipe, Training, train
from speculative.train.packing import Corpus
from speculative.train.prompts import conversation
from speculative.train.serving import Served, measure
from speculative.train.shards import Run
from speculative.train.target import Target
from speculative.train.unroll import head_config
from speculative.train.vocabulary import Kept

MOST_LOOKED = 500  # conversations for one that is held out and fits


class Wish(msgspec.Struct, frozen=True):
    """What the command line asks for."""

    model: str
    out: str  # folder
    asker: str  # "module:name" that makes an Asker of a checkpoint
    device: str = "auto"
    dtype: str = "auto"  # of the target
    seed: int = 0
    shards: int = 16
    first_shard: int = 0  # that `generate` fills; other processes fill those before
    per_shard: int = 1024
    max_len: int = 2048
    vocab: int = 8192
    workers: int = 0  # processes that prepare prompts
    at_once: int = 0  # sequences that generate side by side; 0 = the device's default
    kv_bytes: int = 0  # of the engine's cache; 0 = the device's default
    deadline: float = float("inf")  # of time.monotonic
    answers: int = 4096  # judged by evaluate
    measured: int = 60  # answered by measure
    command: str = "slipstream train-draft"


@dataclass
class Stages:
    """One training's folder."""

    wish: Wish
    recipe: Recipe
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        """Open the model; raise BadCheckpoint, BadShard or ValueError."""
        self.out = Path(self.wish.out)
        self.folder = self.out / "shards"
        self.checkpoint: Checkpoint = open_checkpoint(self.wish.model)
        wish, shape = self.wish, self.checkpoint.config
        self.run = Run(
            wish.model, self.checkpoint.fingerprint.hex(), shape.vocab, wish.seed, wish.per_shard,
            min(wish.max_len, shape.max_len),
        )

    # ---- the stages ------------------------------------------------------------------------------

    def generate(self) -> None:
        """Fill the shards that are missing, from `first_shard` on; raise ValueError or BadShard."""
        own = range(self.wish.first_shard, self.wish.shards)
        if not own:
            raise ValueError(
                f"--first-shard is {own.start}, but the last of --shards {own.stop} is "
                f"{own.stop - 1}. Give a lower one, or more shards."
            )
        shards.check_size(self.run)
        shards.begin(self.folder, self.run)
        wanted = missing(self.folder, self.run, own)
        if not wanted:
            self.tell(f"generate: all {len(own)} shards are there")
            return
        preparing = Preparing(
            self.wish.asker, self.checkpoint, self.wish.seed, self.wish.workers)
        try:
            with self._engine(self.wish.device) as engine:
                at_once = self.wish.at_once or engine.hello.max_sequences
                work = Generation(engine, self.folder, self.run, at_once=at_once)
                began = time.monotonic()
                done = work.go(preparing.of(wanted), self.wish.deadline, self.tell)
        finally:
            preparing.close()
        seconds = time.monotonic() - began
        left = len(set(own) - set(shards.numbers(self.folder)))
        self.tell(f"generate: {len(done)} shards, {work.tokens:,} tokens in {seconds:.1f} s "
                  f"({work.tokens / seconds:,.0f} tokens/s); {left} shards are missing")

    def vocabulary(self) -> Kept:
        """Choose the head's tokens, once."""
        path = self.out / "vocabulary.json"
        if path.exists():
            return vocabulary.read(path)
        forced = vocabulary.forced_ids(
            self.checkpoint.tokenizer_json, self.run.vocab, self.checkpoint.stop_ids,
            asker_of(self.wish.asker, self.checkpoint).markers,
        )
        kept = vocabulary.choose(vocabulary.count(self.folder), self.wish.vocab, forced)
        vocabulary.save(kept, path)
        covered = ", ".join(f"{one} {share:.2%}" for one, share in kept.held_out.items())
        self.tell(f"vocabulary: {len(kept.ids):,} tokens ({kept.forced:,} forced) cover "
                  f"{kept.coverage:.2%} of training, held-out {covered}")
        return kept

    def optimise(self) -> None:
        """Train to the end, or until the time is over."""
        target, config, kept = self._target()
        training = self._training(target, config, kept)
        corpus = Corpus.open(self.folder, self.recipe.length, self.recipe.seed, held_out=False)
        self.tell(f"optimise: {len(corpus.sequences):,} answers, {corpus.tokens:,} tokens with "
                  f"prompts, from step {training.step} of {training.steps or 'what time allows'}")
        train(training, target, corpus, kept, self.out, deadline=self.wish.deadline,
              tell=self.tell)
        done = 0 < training.steps <= training.step
        self.tell(f"optimise: step {training.step} of {training.steps or 'what time allows'}, "
                  f"{'done' if done else 'run it again to go on'} ({STATE})")

    def evaluate(self) -> list[Row]:
        """Judge the newest state on what was held out."""
        target, config, kept = self._target()
        training = self._trained(target, config, kept)
        corpus = Corpus.open(self.folder, self.recipe.length, self.recipe.seed, held_out=True)
        rows = evaluate(
            training.weights, config, target, corpus, kept, answers=self.wish.answers)
        shards.replace(self.out / "evaluation.json", msgspec.json.encode(rows))
        for row in rows:
            heat = "all" if row.temperature < 0 else f"{row.temperature:g}"
            self.tell(f"evaluate: {row.domain:6} T={heat:3} {row.answers:5,} answers, tau(4) "
                      f"{row.tau[3]:.2f} (suffix {row.suffix_tau[3]:.2f}), place 0 "
                      f"{row.full_accuracy[0]:.1%}")
        return rows

    def export(self) -> None:
        """Write the folder that is loaded, and its card."""
        target, config, kept = self._target()
        training = self._trained(target, config, kept)
        names = vocabulary.read(self.out / "vocabulary.json")
        head = self.out / "head"
        size = export(head, training.weights, config, names, target.config)
        found = [shard.index for shard in shards.every(self.folder)]
        path = self.out / "evaluation.json"
        rows = msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []
        Card(
            self.wish.command, self.run, self.recipe, sum(len(one.entries) for one in found),
            sum(one.tokens for one in found), training.step, size, len(names.ids), names.forced,
            names.coverage, names.held_out, rows,
        ).write(head)
        self.tell(f"export: {head}, {size / 1e6:.2f} MB")

    def measure(self) -> None:
        """Answer held-out conversations without drafts, with the head, and with suffix drafts.

        Reads the exported head and no state, so that another machine than the trainer's can do it.
        """
        card = Card.read(self.out / "head")
        target, _, _ = self._target(torch.device("cpu"))
        most = self.recipe.unroll - 1
        head = open_head(
            str(self.out / "head"), target.config, target.embedding, target.head,
            self.run.max_len, target.dtype, target.device,
        )
        asked = held_out(self.wish.asker, self.checkpoint, self.run, self.wish.measured)
        suffix = json.dumps({"method": "suffix", "num_speculative_tokens": most})
        found = list[Served]()
        for name, draft, way in (("off", None, "off"), ("eagle3", head, "off"),
                                 ("suffix", None, suffix)):
            with self._engine("cpu", draft, way, most) as engine:
                mode = "off" if name == "off" else "auto"
                served = measure(engine, asked, drafts=mode, most=most)
            found += [msgspec.structs.replace(one, drafts=name) for one in served]
        for one in found:
            self.tell(f"measure: {one.drafts:6} {one.domain:6} {one.answers} answers, k={most}, "
                      f"tau {one.tau:.2f}, {one.speed:.1f} tokens/s")
        msgspec.structs.replace(card, served=found).write(self.out / "head")

    # ---- parts -----------------------------------------------------------------------------------

    @contextmanager
    def _engine(
        self, device: str, head: Eagle3 | None = None, speculative: str = "off", most: int = 1
    ) -> Iterator[Engine]:
        """An engine, by itself one that drafts nothing; its memory is free afterwards."""
        wish = self.wish
        # Threads that compile: a half of the cores, as the prompts have their own processes.
        config = EngineConfig(
            model=wish.model, dtype=wish.dtype, device=device, max_len=self.run.max_len,
            max_sequences=wish.at_once or None, speculative=speculative, max_drafts=most,
            compile_threads=max(1, (os.cpu_count() or 1) // 2),
            cache=CacheConfig(kv_bytes=wish.kv_bytes or None),
        )
        engine = Engine(configured(config), self.checkpoint, head=head)
        try:
            yield engine
        finally:
            engine.close()
            del engine
            _free()

    def _target(
        self, device: torch.device | None = None
    ) -> tuple[Target, HeadConfig, torch.Tensor]:
        """The model, the head's shape, the kept ids, on the device that was asked for."""
        ids = vocabulary.read(self.out / "vocabulary.json").ids
        config = head_config(self.checkpoint.config, len(ids))
        device = device or pick(self.wish.device)
        target = Target(
            self.checkpoint, config.taps, self.recipe.length, DTYPES[self.wish.dtype], device)
        return target, config, torch.tensor(ids, device=device)

    def _training(self, target: Target, config: HeadConfig, kept: torch.Tensor) -> Training:
        training = Training.begin(config, self.recipe, target, kept)
        if (self.out / STATE).exists():
            training.restore(self.out / STATE)
        return training

    def _trained(self, target: Target, config: HeadConfig, kept: torch.Tensor) -> Training:
        """The newest state; raise ValueError where there is none: no fresh head is exported."""
        path = self.out / STATE
        if not path.exists():
            raise ValueError(f"{path} is not there; run the stage `optimise` first.")
        return self._training(target, config, kept)


def held_out(asker: str, checkpoint: Checkpoint, run: Run, count: int) -> list[Asked]:
    """The first `count` held-out conversations that fit, for measuring with an engine."""
    asking, number, found = asker_of(asker, checkpoint), 0, list[Asked]()
    while len(found) < count and number < MOST_LOOKED * count:
        one = conversation(number, run.seed)
        number += 1
        if one.held_out:
            ids, grammar = asking([one])[0]
            if len(ids) + one.max_tokens <= run.max_len:
                found.append(Asked(one, ids, grammar))
    return found


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
