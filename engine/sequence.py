"""One choice of one request while it lives: its tokens, its KV, its draft.  Decides nothing.

    tokens  0 ..... computed ..... computed + flying ..... len(tokens) + pending | draft
            KV exists        a launched step      KV wanted next
                             computes it

`want` is the one rule of the scheduler: prompt, prefix hit, chunk, decode, verification and resume
after preemption differ only in how far `computed` lags behind.  Between the launch of a step and
its commit the host does not know what it drew: those tokens are `pending`, and count as there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.accept import End

if TYPE_CHECKING:
    from cache.blocks import Block
    from engine.grammar.closing import Closing
    from engine.grammar.state import State
    from engine.messages import Sampling, Submit
    from engine.plan import Row
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
    closing: Closing | None = None  # how the grammar is satisfied within max_tokens, come what may
    computed: int = 0
    flying: int = 0  # tokens whose KV a launched, uncommitted step computes
    pending: int = 0  # tokens that such steps will draw: only the device knows them
    replaced: int = 0  # times that its newest token was not the one that the device had drawn
    gone: bool = False  # dropped: finished, aborted or failed; what still flies for it is wasted
    draft: list[int] = field(default_factory=list)
    sources: Seq[str] = ()  # who guessed each token of it
    early: bool = False  # it begins behind the newest pending token: the next row may verify it
    guessed: list[int] = field(default_factory=list)  # by the device, for the host to choose from
    vainly: int = 0  # tokens to wait until the host looks again, after it found nothing
    look_at: int = 0  # tokens at which it does
    verified: Counter[str] = field(default_factory=Counter)  # draft tokens so far, by source
    matched: Counter[str] = field(default_factory=Counter)
    blocks: list[Block] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the blocks that are full and committed
    siblings: list[Sequence] = field(default_factory=list)  # fork after our prefill
    finish: str = ""
    cached: int | None = None  # prompt tokens found in the cache; frozen at first admission
    written: int = 0  # prompt tokens whose blocks this sequence published
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0  # times
    # Read for every row of every step, so made once.
    stop_ids: frozenset[int] = field(init=False)
    key: tuple[str, int] = field(init=False)  # request id and choice: unique among the living
    prompt_len: int = field(init=False)  # tokens
    most: int = field(init=False)  # tokens of prompt and output that max_tokens allows
    order: tuple[int, float, int] = field(init=False)  # who goes first; from the end, who yields
    greedy: bool = field(init=False)  # the largest logit wins
    free: bool = field(init=False)  # no grammar and no history have to be told what it says

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.submit.stop_ids)
        self.key = self.submit.id, self.index
        self.prompt_len = len(self.submit.prompt)
        self.most = self.prompt_len + self.submit.max_tokens
        self.order = self.submit.priority, self.rank, self.index
        self.greedy = self.submit.sampling.temperature <= 0
        self.free = self.grammar is None and self.history is None

    @property
    def sampling(self) -> Sampling:
        """The request's sampling parameters."""
        return self.submit.sampling

    @property
    def remaining(self) -> int:
        """Output tokens that max_tokens still allows."""
        return self.most - len(self.tokens)

    @property
    def known(self) -> int:
        """Tokens that the device will know when the launched steps are done."""
        return len(self.tokens) + self.pending

    @property
    def want(self) -> int:
        """Tokens to compute until the next one can be drawn and every draft is verified."""
        return self.known + len(self.draft) - self.computed - self.flying

    @property
    def decoding(self) -> bool:
        """All but the newest token have their KV: a step gives this sequence at least one token."""
        return self.known - self.computed - self.flying == 1

    def end(self, *, lean: bool = False) -> End:
        """What may end it inside an accepted run; `lean`: see End."""
        return End(self.most - len(self.tokens), self.stop_ids, self.grammar, self.closing, lean)

    def fly(self, row: Row) -> None:
        """A row of it was planned.

        If that draws what the draft begins with, the rest of it goes behind that token.
        """
        self.flying += row.count
        self.pending += row.last
        if row.last and self.draft and not row.draft:
            self.draft, self.sources = self.draft[1:], self.sources[1:]
            self.early = bool(self.draft)
        else:
            self.early = False

    def stay(self, row: Row) -> None:
        """That row was not launched after all."""
        self.flying -= row.count
        self.pending -= row.last
        if self.early:
            self.drop_draft()

    def replace(self) -> None:
        """Its newest token is not what the device drew: what flies for it is computed in vain."""
        self.replaced += 1
        self.flying = self.pending = 0

    def drop_draft(self) -> None:
        """Forget the guess; a later one may come."""
        self.draft, self.sources, self.guessed, self.early = [], (), [], False

