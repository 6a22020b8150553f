"""One choice of one request while it lives: its tokens, its KV, its draft.  Decides nothing.

    tokens  0 ..... computed ..... len(tokens) | draft
            KV exists        KV wanted this step and next

`want` is the one rule of the scheduler: prompt, prefix hit, chunk, decode, verification and resume
after preemption differ only in how far `computed` lags behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.accept import End

if TYPE_CHECKING:
    from cache.blocks import Block
    from engine.grammar.matcher import State
    from engine.messages import Sampling, Submit
    from engine.sampling import History


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable on purpose: it is what a step changes."""

    submit: Submit
    index: int  # choice
    root: bytes  # first parent of its block keys
    rank: float  # who runs first among equals in priority; smaller first
    tokens: list[int]
    arrival_s: float  # monotonic
    grammar: State | None = None
    history: History | None = None
    computed: int = 0
    draft: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the blocks that are full and committed
    siblings: list[Sequence] = field(default_factory=list)  # fork after our prefill
    finish: str = ""
    cached: int | None = None  # prompt tokens found in the cache; frozen at first admission
    written: int = 0  # prompt tokens whose blocks this sequence published
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0  # times
    deadline_s: float | None = None  # monotonic
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.submit.stop_ids)

    @property
    def key(self) -> tuple[str, int]:
        """Request id and choice: unique among living sequences."""
        return self.submit.id, self.index

    @property
    def sampling(self) -> Sampling:
        """The request's sampling parameters."""
        return self.submit.sampling

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt)

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Output tokens that max_tokens still allows."""
        return self.submit.max_tokens - self.generated

    @property
    def want(self) -> int:
        """Tokens to compute until the next one can be drawn and every draft is verified."""
        return len(self.tokens) + len(self.draft) - self.computed

    @property
    def decoding(self) -> bool:
        """All but the newest token have their KV: a step gives this sequence at least one token."""
        return len(self.tokens) - self.computed == 1

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: who goes first, and (from the end) who is preempted first."""
        return self.submit.priority, self.rank, self.index

    def end(self) -> End:
        """What may end it inside an accepted run."""
        return End(self.remaining, self.stop_ids, self.grammar)

    def drop_draft(self) -> None:
        """Forget the guess; a later one may come."""
        self.draft = []
