"""The engine's settings: every number, its unit, its check.  Reads no files and no environment."""

from __future__ import annotations

import msgspec

from cache.config import CacheConfig

DTYPES = ("auto", "bfloat16", "float32", "float64")


class BadConfig(ValueError):
    """A setting that cannot work; the message says which, its limit and what to do."""


class EngineConfig(msgspec.Struct, frozen=True):
    """One engine replica.  Checked by `check()`; sent to the engine process as JSON."""

    model: str  # folder, .gguf file, hub id, or a built-in name
    served_name: str = ""  # the name that clients use; empty = the model's
    revision: str | None = None  # of a hub id
    dtype: str = "auto"  # weights and KV; auto = bfloat16
    device: str = "auto"  # auto or cpu
    max_len: int | None = None  # tokens, prompt and output; None = the model's
    max_sequences: int = 64  # running at the same time
    max_batch_tokens: int = 512  # flat tokens of one step when nobody is decoding
    mixed_tokens: int = 192  # prompt tokens of one step while others decode: bounds their gap
    max_drafts: int = 8  # draft tokens a sequence and step
    threads: int | None = None  # torch's; None = all cores
    compile_threads: int = 1  # of the grammar pool
    prefix_caching: bool = True  # equal prompts share their blocks
    cache: CacheConfig = CacheConfig()  # the KV pool and its sessions
    stats_s: float = 0.25  # seconds between two Stats while busy
    heartbeat_s: float = 1.0  # seconds between two Stats while idle

    def check(self) -> EngineConfig:
        """Return self, or raise BadConfig."""
        if self.dtype == "float16":
            raise BadConfig(
                "dtype float16 is not served: it overflows in some models and is the slowest type "
                "on a CPU. Use bfloat16 (auto) or float32."
            )
        if self.dtype not in DTYPES:
            raise BadConfig(f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}.")
        for name in ("max_sequences", "max_batch_tokens", "mixed_tokens", "compile_threads"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.max_batch_tokens <= self.max_sequences:
            raise BadConfig(
                f"max_batch_tokens {self.max_batch_tokens} cannot give {self.max_sequences} "
                f"sequences a token each and a prompt one more; raise it above "
                f"{self.max_sequences}, or lower max_sequences."
            )
        self.cache.check()
        if self.max_len is not None and self.max_len < 2:
            raise BadConfig(f"max_len is {self.max_len}; at least 2 tokens are needed.")
        return self
