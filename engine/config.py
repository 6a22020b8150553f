"""The engine's settings: every number, its unit, its check.  Reads no files and no environment."""

from __future__ import annotations

from typing import NamedTuple, Self

import msgspec

from cache.config import CacheConfig

DTYPES = ("auto", "bfloat16", "float32", "float64")

WHOLE_BATCH = 1 << 30  # as mixed_tokens: no limit but the batch's
MOST_GAP_S = 60.0  # catches milliseconds
MOST_CPU_S = 600.0  # likewise
LEAST_COMPILE_BYTES = 64 << 20  # an ordinary large grammar takes that


class Limits(NamedTuple):
    """Of one step; see EngineConfig for what each is."""

    max_sequences: int
    max_batch_tokens: int
    mixed_tokens: int
    max_gap_s: float
    max_drafts: int


# What a device takes when nothing is said.  On a CPU a step's time grows with its tokens; on a GPU
# up to about 128 rows are read-bound, and what more of them cost differs by a factor of ten from
# model to model: there it is measured.
DEFAULTS = {
    "cpu": Limits(64, 512, 192, 0.0, 15),
    "cuda": Limits(256, 2048, WHOLE_BATCH, 0.02, 31),
}


class BadConfig(ValueError):
    """A setting that cannot work; the message says which, its limit and what to do."""


class EngineConfig(msgspec.Struct, frozen=True):
    """One engine replica.  Checked by `check()`; sent to the engine process as JSON."""

    model: str  # folder, .gguf file, hub id, or a built-in name
    served_name: str = ""  # the name that clients use; empty = the model's
    revision: str | None = None  # of a hub id
    dtype: str = "auto"  # weights and KV; auto = bfloat16
    device: str = "auto"  # auto (a GPU when torch sees one), cpu or cuda
    gpu_memory_utilization: float = 0.9  # of the GPU's memory: weights, steps and KV together
    max_len: int | None = None  # tokens, prompt and output; None = the model's
    max_sequences: int | None = None  # running at the same time; None = by device, see DEFAULTS
    max_batch_tokens: int | None = None  # flat tokens of one step when nobody is decoding; same
    mixed_tokens: int | None = None  # most prompt tokens of one step while others decode; same
    max_gap_s: float | None = None  # seconds that a step may take while others decode, by which it
    # takes fewer prompt tokens (engine/pace.py); 0 = no limit; None = 0 with mixed_tokens, or same
    max_drafts: int | None = None  # draft tokens a sequence and step; None = by device
    speculative: str = "auto"  # who guesses ahead: auto, off, or JSON (speculative/served.py)
    proposer: str = ""  # "module:function" that makes it of this config and the device's kind
    head: str = ""  # the same for a draft of the device's own (proposer.py: HeadMaker)
    threads: int | None = None  # torch's; None = all cores
    compile_threads: int = 1  # of the grammar pool
    compile_cpu_s: float = 4.0  # seconds of CPU that a costly grammar may take to compile, which a
    # process of its own tries first (engine/grammar/trial.py); 0 = no trial and no limit
    compile_memory_bytes: int = 512 << 20  # that it may take there; 0 = no limit
    prefix_caching: bool = True  # equal prompts share their blocks
    cache: CacheConfig = CacheConfig()  # the KV pool and its sessions
    stats_s: float = 0.25  # seconds between two Stats while busy
    heartbeat_s: float = 1.0  # seconds between two Stats while idle

    def resolved(self, kind: str) -> ResolvedConfig:
        """The same for a device kind ("cpu" or "cuda"), nothing left open; raise BadConfig."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return ResolvedConfig(**fields | self._limits(kind)._asdict()).check()

    def _limits(self, kind: str) -> Limits:
        usual = DEFAULTS[kind]
        if self.mixed_tokens is not None:
            usual = usual._replace(max_gap_s=0.0)
        given = {name: getattr(self, name) for name in Limits._fields}
        return usual._replace(**{name: value for name, value in given.items() if value is not None})

    def check(self) -> Self:
        """Return self, or raise BadConfig; what is left open must have a device that allows it."""
        if self.dtype == "float16":
            raise BadConfig(
                "dtype float16 is not served: it overflows in some models and is the slowest type "
                "on a CPU. Use bfloat16 (auto) or float32."
            )
        if self.dtype not in DTYPES:
            raise BadConfig(f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}.")
        if self.device != "auto" and self.device not in DEFAULTS:
            raise BadConfig(
                f"device {self.device!r} is not served; use auto, {', '.join(DEFAULTS)}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise BadConfig(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it is a "
                            "share of the GPU's memory: above 0, at most 1.")
        if self.compile_threads < 1:
            raise BadConfig(f"compile_threads is {self.compile_threads}; it must be at least 1.")
        if not 0 <= self.compile_cpu_s <= MOST_CPU_S:
            raise BadConfig(f"compile_cpu_s is {self.compile_cpu_s}; it is seconds: 0 (no limit) "
                            f"to {MOST_CPU_S:.0f}.")
        if self.compile_memory_bytes and self.compile_memory_bytes < LEAST_COMPILE_BYTES:
            raise BadConfig(f"compile_memory_bytes is {self.compile_memory_bytes:,}; it must be 0 "
                            f"(no limit) or at least {LEAST_COMPILE_BYTES:,}.")
        self._check_limits()
        self.cache.check()
        if self.max_len is not None and self.max_len < 2:
            raise BadConfig(f"max_len is {self.max_len}; at least 2 tokens are needed.")
        return self

    def _check_limits(self) -> None:
        """Of `auto` only one device's defaults must fit: which it is, nobody knows yet."""
        kinds = [self.device] if self.device in DEFAULTS else list(DEFAULTS)
        problems = [_problem(self._limits(kind)) for kind in kinds]
        if all(problems):
            raise BadConfig(problems[0])


class ResolvedConfig(EngineConfig, frozen=True):
    """An EngineConfig with every number filled in, as the engine uses it; see `resolved`."""

    max_sequences: int = DEFAULTS["cpu"].max_sequences
    max_batch_tokens: int = DEFAULTS["cpu"].max_batch_tokens
    mixed_tokens: int = DEFAULTS["cpu"].mixed_tokens
    max_gap_s: float = DEFAULTS["cpu"].max_gap_s
    max_drafts: int = DEFAULTS["cpu"].max_drafts


def _problem(limits: Limits) -> str:
    """What is wrong with a step's limits; empty when nothing is."""
    for name in ("max_sequences", "max_batch_tokens", "mixed_tokens", "max_drafts"):
        value = getattr(limits, name)
        if value < 1:
            return f"{name} is {value}; it must be at least 1."
    if not 0 <= limits.max_gap_s <= MOST_GAP_S:
        return (
            f"max_gap_s is {limits.max_gap_s}; it is the seconds between two tokens of a stream: "
            f"0 (no limit) to {MOST_GAP_S:.0f}."
        )
    if limits.max_batch_tokens <= limits.max_sequences:
        return (
            f"max_batch_tokens {limits.max_batch_tokens} cannot give {limits.max_sequences} "
            f"sequences a token each and a prompt one more; raise it above "
            f"{limits.max_sequences}, or lower max_sequences."
        )
    return ""
