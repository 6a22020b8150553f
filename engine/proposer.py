"""Two ways to guess tokens ahead: HostDrafts and DeviceDraft.  Protocols; guesses nothing.

A guess may be wrong, late or absent: by the acceptance rule (engine/accept.py) it can cost time but
never change an answer.  Chains only: token i+1 is proposed after token i.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from engine.batch import Batch
    from engine.config import ResolvedConfig
    from engine.kernels.chain_rows import Chains
    from engine.model_config import ModelConfig
    from engine.models import Model


Key = tuple[str, int]  # request id, choice index

# Tokens of a chain that a device may be asked for: it has graphs of these alone.  0 = no chain.
LENGTHS = (0, 1, 2, 3, 5, 7)


class Draft(NamedTuple):
    """A chain of guessed token ids; every id is below the vocabulary's size."""

    tokens: list[int]
    sources: Sequence[str] = ()  # who guessed each token; empty = the proposer's own `source`


@dataclass(frozen=True, slots=True)
class Turn:
    """All that a host proposer may look at for one sequence; `tokens` must not be changed."""

    key: Key
    tokens: Sequence[int]  # prompt and output so far
    prompt_len: int
    limit: int  # at most this many draft tokens, at least 1
    session: bytes | None
    namespace: bytes  # tenants never share what they saw
    forced: Callable[[], list[int]]  # tokens that the grammar fixes from here on; may be empty
    predicted: Sequence[int] = ()  # what the caller expects the output to be (OpenAI: prediction)
    mode: str = "auto"  # who may guess: "auto" = anybody, or one source
    guessed: Sequence[int] = ()  # by the device; the host may propose it, or know better
    legal: Callable[[Sequence[int]], int] | None = None  # how many of some tokens its grammar takes


class Load(NamedTuple):
    """What a step that is about to be launched has to do."""

    rows: int  # sequences that decode
    beside: int = 0  # prompt tokens that are about to be computed as well
    masked: bool = False  # most of them have a grammar
    steps: int = 1  # since this was asked the last time: many are slept through at one answer


class Ran(NamedTuple):
    """What a step was, and how long it took."""

    rows: int
    seconds: float
    guesses: int = 0  # tokens of the chains that a device drafted meanwhile
    chain_s: float = 0.0  # what of `seconds` they took; 0 = not known
    alone: bool = True  # it was launched when all before it was known
    masked: bool = False
    sequences: int = 0  # that drew in it
    tokens: int = 0  # that it gave
    asleep: bool = False  # it ran ahead, and a device draft slept through it


# Answers of HostDrafts.ahead beside lengths of chains.
FREE = -1  # the next step need not wait for this one's results
ASLEEP = -2  # and a device draft leaves this one out: it would not be asked soon
HOST = -3  # it leaves it out as well, but the next step waits for what the host guesses


class HostDrafts(Protocol):
    """Guesses made on the host before the forward pass (suffix, forced, prediction)."""

    source: str
    sources: tuple[str, ...]  # those of which a request may ask for one alone (Turn.mode)

    def propose(self, turns: Sequence[Turn], beside: int = 0) -> list[Draft]:
        """Guess what follows each turn's tokens; empty drafts rather than raise.

        All sequences that could take a draft in the next step come at once, so that rows can go
        where they are worth most; `beside` prompt tokens will be computed in it, too.
        """

    def begin(self, turn: Turn, waits: bool) -> Draft:
        """What is to be verified in the step that ends a prompt: only what is likely.

        Unless steps wait for guesses, `waits`, only what costs next to nothing to say.
        """

    def observe(self, key: Key, sources: Sequence[str], verified: int, matched: int) -> None:
        """Of a draft for `key` the target looked at `verified` tokens, and `matched` stood.

        `sources` guessed its tokens; it is the newest draft, or what came of that: the beginning
        may have been drawn meanwhile, the end may have found no room.
        """

    def prepare(self, turns: Sequence[Turn]) -> None:
        """Begin with what `propose` will be asked for next, but for what the device guesses."""

    def look(self, turn: Turn, masked: bool) -> float:
        """How many tokens a guess for one turn would be right for; nothing is proposed.

        Asked of one that is alone, while steps run ahead, so that the proposer hears when waiting
        would pay.
        """

    def timed(self, ran: Ran) -> None:
        """Learn what a step took."""

    def ahead(self, load: Load, most: int) -> int:
        """What follows a step: FREE, ASLEEP, HOST, or the tokens that a device drafts behind it.

        With 0 and more, and with HOST, the next step waits for this one's results, and `propose`
        is asked between them; chains have up to `most` tokens, 0 where no device drafts.
        """

    @property
    def holds(self) -> int:
        """Steps that the newest ASLEEP is for, at least 1; of those only the last is `timed`.

        Where one sequence is left, or one with a grammar comes, it is asked at once.
        """

    def forget(self, key: Key) -> None:
        """The sequence ended or was dropped."""

    def ended(self, session: bytes) -> None:
        """A session is over: nothing that it said may be kept."""


def proposer(config: ResolvedConfig, kind: str) -> HostDrafts | None:
    """What `config.proposer` makes for a device of this kind; the engine knows no names."""
    made: HostDrafts | None = _made(config.proposer, config, kind)
    return made


def head_maker(config: ResolvedConfig, kind: str) -> HeadMaker | None:
    """The same of `config.head`."""
    made: HeadMaker | None = _made(config.head, config, kind)
    return made


def _made(name: str, config: ResolvedConfig, kind: str) -> Any:
    if not name:
        return None
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(config, kind)


class HeadMaker(Protocol):
    """Makes a device draft, which needs the target: its weights first, itself later."""

    source: str

    def open(
        self, shape: ModelConfig, weights: Mapping[str, Tensor], max_len: int, dtype: Any,
        device: Any, blank: bool = False,
    ) -> AnyDraft | None:
        """Load it beside the target's weights; raise BadCheckpoint or BadWeights.

        `blank`: tensors of the same shapes without values, in a thread beside the others.
        """

    def meet(self, draft: AnyDraft, model: Model, shape: ModelConfig) -> None:
        """Look at the loaded target; raise BadCheckpoint if the draft is of no use with it."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a device draft extends on: rows just computed, with the target's true features.

    Row i of a sequence consumes token x[i+1] with the target's feature of position i, and its KV
    lies in the slot of the token it consumes, so that ordinary block hashes cover it (design:
    section 7).
    """

    batch: Batch  # tokens = the consumed tokens, positions = i, slots = slot of i+1
    hidden: Tensor  # [rows, taps * hidden]
    first: Tensor  # [sequences] int64: the token at each sequence's first position of the step
    last: Tensor  # [sequences] int64: the row that each sequence drafts from
    seeds: Tensor  # [sequences] int64 request seeds, for drafting with the target's own noise
    choices: Tensor  # [sequences] int64
    temperatures: Tensor  # [sequences]; 0 = greedy
    limits: Tensor  # [sequences] int64 drafts wanted; 0 = only extend


@runtime_checkable
class CapturedDraft(Protocol):
    """A device draft on a GPU: launches on fixed buffers, which graphs can hold.

    Its rows and slots are those of `Features`; integers are int32 on the device.
    """

    source: str
    taps: tuple[int, ...]  # as of DeviceDraft
    shape: object  # by its repr all that tells which kernels it launches

    def block_bytes(self, size: int) -> int:
        """What a block of `size` tokens takes of the device's memory."""

    def reserve(self, blocks: int, size: int, dtype: object, device: object) -> None:
        """As DeviceDraft's."""

    def prepare(self, tokens: int, rows: int) -> None:
        """Make buffers for steps of up to so many tokens, `rows` of which draw."""

    def copy(self, source: int, target: int) -> None:
        """As DeviceDraft's."""

    def extend(
        self, kept: Sequence[Tensor], tokens: Tensor, positions: Tensor, slots: Tensor,
        ends: Tensor,
    ) -> None:  # fmt: skip
        """Make the N rows of a step out of what the target's tapped layers gave.

        `kept` [N, hidden] of each are of the target's type and must not be changed.
        Row i has the feature of positions[i], consumes tokens[i] and lies in slots[i]; its feature
        is that of the end of block ends[i], unless that is -1.
        """

    def join(self, tokens: Tensor, positions: Tensor, slots: Tensor, blocks: Tensor) -> None:
        """Make rows whose features are those of the ends of `blocks`."""

    def draw(
        self, chains: Chains, step: int, place: Tensor, table: Tensor, records: Tensor
    ) -> None:
        """Write chains.tokens[step]; of step 0 by the rows of `extend`, later by its own.

        `place` [G] are rows of `table` (blocks) and of `records` (SlotTables).
        """


class DeviceDraft(Protocol):
    """Guesses made where the model runs, with a KV of its own (EAGLE-3).

    Both calls work on buffers that the engine owns and read nothing back to the host, so that the
    engine can capture them into its settle graph.
    """

    source: str
    taps: tuple[int, ...]  # the target layers whose outputs `Features.hidden` concatenates, rising;
    # -1 = the embedding

    def reserve(self, blocks: int, size: int, dtype: object, device: object) -> None:
        """Allocate KV for `blocks` blocks of `size` slots; called once, before the first extend."""

    def extend(self, features: Features) -> None:
        """Consume true features: write draft KV, keep each sequence's newest state."""

    def step(self, features: Features, depth: int) -> Tensor:
        """[sequences] int64: every sequence's draft number `depth` (from 0)."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block's draft KV (a fork)."""


AnyDraft = DeviceDraft | CapturedDraft
