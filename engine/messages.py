"""The wire between gateway and engine: every message, its units, its framing.  No torch, no I/O.

Gateway -> engine: `Submit`, `Abort`, `TurnEnd`, `SessionEnd`, `Pause`, `Resume`.
Engine -> gateway: `Hello`, `Admitted`, `Refused`, `Step`, `Failed`, `Stats`.
A frame is a u32 little-endian length followed by msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import msgspec

VERSION = "0.1.0"  # of Slipstream
PROTOCOL = 1  # of these messages
UNLIKELY = -9999.0  # OpenAI's logprob of a token that is not among the best
DRAFT_SOURCES = ("forced", "suffix", "prediction", "eagle3", "other")  # who guesses tokens ahead
DRAFT_PLACES = 16  # of a chain, that are told apart in counts
FRAME_LIMIT = 64 * 1024 * 1024  # bytes; a 32 MiB body never makes a longer prompt than this


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one request turns logits into a token; the order of use is that of engine/sampling.py."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    seed: int = 0  # 64 bit; the gateway mints one when the caller gives none
    repetition: float = 1.0  # over prompt and output; 1 = off
    frequency: float = 0.0  # over output; 0 = off
    presence: float = 0.0  # over output; 0 = off
    bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_tokens: int = 0  # stop ids are masked until this many tokens exist
    logprobs: int = -1  # -1 = none, 0 = the sampled token's, n = and the n best


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output must satisfy: Lark for llguidance (JSON Schema inside as `%json {...}`)."""

    lark: str
    param: str = "tools"  # the request field to name when it does not compile
    trigger: str = ""  # the output is free text until this appears, when it is not empty
    opening: str = ""  # ... or unless the output starts with this, when it is not empty


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run this prompt: `n` choices that share it."""

    id: str
    prompt: list[int]  # token ids, at least one
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    stop_ids: list[int] = []  # a sampled one ends the choice and is its last token
    grammar: Grammar | None = None
    namespace: bytes = b""  # the tenant's cache namespace: prompts share blocks only within it
    session: bytes | None = None  # 16 byte key out of `x-session-affinity`, already tenant-scoped
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # seconds from arrival
    overflow: str = "close"  # of a grammar that max_tokens cuts: "close" it in time, or "cut"
    drafts: str = "auto"  # who may guess for it: "auto" = anybody, "off" = nobody, or one source
    max_drafts: int = 1 << 30  # draft tokens a step
    predicted: list[int] = []  # what the caller expects the output to be, as ids; a guess


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Drop a request, or one choice of it (`index` >= 0); unknown ids are ignored."""

    id: str
    index: int = -1


class TurnEnd(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """How a session's turn ended: after a tool call its blocks are pinned over the tool gap."""

    session: bytes
    tool_call: bool


class SessionEnd(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The session is over: blocks that only it used go first."""

    session: bytes


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The request's reader is slow: keep its pages, give it no rows until Resume or Abort."""

    id: str


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The request's reader has caught up."""

    id: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The engine's first frame: what it serves."""

    protocol: int
    model: str
    vocab: int  # rows of the output head; valid ids are below it
    max_len: int  # tokens, prompt and output together
    block_size: int  # tokens a block
    blocks: int  # blocks in the pool
    stop_ids: list[int]
    version: str = ""
    max_sequences: int = 0  # running at the same time; 0 = not told
    device: str = ""  # cpu or cuda; empty = not told
    draft_sources: list[str] = []  # who guesses tokens ahead, as requests may name them


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The request will run: its grammar compiled, its prompt fits.  Headers go out on this."""

    id: str
    cached: int  # prompt tokens whose KV exists now
    queued: int  # requests ahead of it


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The request will not run, nothing was kept; `code`, `param` as in the wire's error object."""

    id: str
    code: str
    message: str
    param: str = ""
    status: int = 400


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities of one emitted token under its row's raw logits."""

    logprob: float  # UNLIKELY for a token of a closing plan that is not among `top`
    top: list[tuple[int, float]]  # the best first


class Out(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one choice gained in a step."""

    id: str
    index: int
    tokens: list[int]  # in order; a stop id, when sampled, is the last one
    finish: str = ""  # "" = goes on, "stop" = stop id or grammar end, "length", "abort"
    stopped: bool = False  # the last token is a stop id: it has no text
    logprobs: list[TokenLogprobs] = []  # one a token when asked for
    cached: int = 0  # prompt tokens not computed for this request; frozen at first admission
    written: int = 0  # prompt tokens whose blocks this request published (`cache_write_tokens`)
    drafted: int = 0  # draft tokens verified so far
    accepted: int = 0  # of those, how many were right
    drafts: list[int] = []  # of an end: draft tokens verified, then right, of each DRAFT_SOURCES
    overflow: str = ""  # of an end: "closed" = it is whole, as some tokens were chosen to complete
    # it in time; "unopened" = it ended where what the grammar demands next had no room


class Step(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """All that one engine step gave, in one message."""

    number: int
    outs: list[Out]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A running request ended before its time: typed, never exception text."""

    id: str
    code: str
    message: str


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The engine's gauges and cumulative counters; also its heartbeat (every second)."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    compiling: int = 0  # requests whose grammar is still being compiled
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    sessions: int = 0
    sessions_pinned: int = 0
    closing_refusals: int = 0  # requests whose shortest output is longer than their max_tokens
    closing_tokens: int = 0  # tokens that closing plans put in place of drawn ones
    closed_early: int = 0  # choices that were completed by such tokens
    unopened: int = 0  # choices that ended where a call would have opened without room for it
    redrawn: int = 0  # tokens drawn again: without a mask, to save it, an illegal one had come
    draft_sources: list[int] = []  # draft tokens verified, then right, of each DRAFT_SOURCES
    draft_places: list[int] = []  # draft tokens that were right, by place in the chain


ToEngine = Submit | Abort | TurnEnd | SessionEnd | Pause | Resume
ToGateway = Hello | Admitted | Refused | Step | Failed | Stats

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)
_length = struct.Struct("<I")


class BadFrame(Exception):
    """The peer sent bytes that are no frame of this protocol; the connection must be closed."""


def frame(message: ToEngine | ToGateway) -> bytes:
    """One message as bytes for a socket."""
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


def to_engine(body: bytes) -> ToEngine:
    """Decode a frame's body on the engine's side; raise BadFrame."""
    try:
        return _to_engine.decode(body)
    except msgspec.DecodeError as error:
        raise BadFrame(f"not a message for the engine: {error}") from error


def to_gateway(body: bytes) -> ToGateway:
    """Decode a frame's body on the gateway's side; raise BadFrame."""
    try:
        return _to_gateway.decode(body)
    except msgspec.DecodeError as error:
        raise BadFrame(f"not a message for the gateway: {error}") from error


class Deframer:
    """Cut a byte stream into frame bodies; raise BadFrame on an impossible length."""

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return every body that is complete after `chunk`."""
        self._buffer += chunk
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= 4:
            (length,) = _length.unpack_from(self._buffer, start)
            if length > self._limit:
                raise BadFrame(f"frame of {length:,} bytes; the limit is {self._limit:,}")
            if len(self._buffer) - start - 4 < length:
                break
            bodies.append(bytes(self._buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._buffer[:start]
        return bodies


class Inbox(Protocol):
    """Where messages for an engine go: a queue.SimpleQueue."""

    def put(self, item: ToEngine, /) -> None:
        """Hand over one message, from any thread; never blocks."""


class Stepping(Protocol):
    """An engine as its drivers see it: a thread (gateway/local_link.py), a process (server.py)."""

    hello: Hello

    @property
    def inbox(self) -> Inbox:
        """What wakes it."""

    def wait(self, timeout_s: float) -> None:
        """Block until there is something to do, at most so long."""

    meanwhile: Callable[[], None]  # called within a step once the device has work

    @property
    def exposed(self) -> bool:
        """The device has nothing to do until the next step begins, which it does at once."""

    def step(self) -> list[ToGateway]:
        """Drain the inbox, run at most one step, return the replies; raising means it is broken."""

    def close(self) -> None:
        """Free what it holds."""
