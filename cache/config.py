"""What the operator may set about the KV cache.  Reads no files or flags; slipstream.py does."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_KV_BYTES = 1 << 30  # on a CPU: it shares its memory with everything else


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The cache's settings; `check` before use."""

    kv_bytes: int | None = None  # memory for K/V pages; None = 1 GiB, on a GPU what is free
    blocks: int = 0  # size of the pool in blocks; 0 = as many as fit into kv_bytes
    pin_min_s: float = 10.0  # a tool call's pin lasts 3 x the session's usual gap, within these
    pin_max_s: float = 150.0
    pin_default_s: float = 60.0  # with no history
    pin_share: float = 0.6  # of the pool that pins may hold
    max_sessions: int = 100_000  # rows; the least recently used goes first
    session_idle_s: float = 86_400.0  # a row unused for so long is dropped

    def check(self) -> CacheConfig:
        """Return itself; raise ValueError naming the first impossible setting."""
        if self.blocks < 0:
            raise _wrong("blocks", self.blocks, "it must be 0 (as many as fit) or more")
        if not self.blocks and self.kv_bytes is not None and self.kv_bytes < 1:
            raise _wrong("kv_bytes", self.kv_bytes, "it must be positive, or blocks be set")
        if not 0 < self.pin_min_s <= self.pin_max_s:
            raise _wrong("pin_min_s", self.pin_min_s, f"it must lie in (0, {self.pin_max_s:g}]")
        if not self.pin_min_s <= self.pin_default_s <= self.pin_max_s:
            limits = f"[{self.pin_min_s:g}, {self.pin_max_s:g}]"
            raise _wrong("pin_default_s", self.pin_default_s, f"it must lie in {limits}")
        if not 0 <= self.pin_share <= 1:
            raise _wrong("pin_share", self.pin_share, "it must lie in [0, 1]")
        if self.max_sessions < 1:
            raise _wrong("max_sessions", self.max_sessions, "it must be at least 1")
        if not self.session_idle_s > 0:
            raise _wrong("session_idle_s", self.session_idle_s, "it must be positive")
        return self

    @property
    def given(self) -> bool:
        """Whether the operator chose the size: then nothing need be measured."""
        return self.blocks > 0 or self.kv_bytes is not None

    def pool_blocks(self, block_bytes: int, room: int = DEFAULT_KV_BYTES) -> int:
        """Blocks of `block_bytes` bytes in the pool; `room` bytes are there when nothing is given.

        Raise ValueError when not even one fits.
        """
        given = self.kv_bytes
        count = self.blocks or (room if given is None else given) // block_bytes
        if count < 1:
            has = f"{room:,} bytes are left" if given is None else f"cache.kv_bytes is {given:,}"
            raise ValueError(
                f"{has}, but one block of this model takes {block_bytes:,} bytes. Start with "
                f"--cache.kv-bytes {64 * block_bytes} or more."
            )
        return count


def _wrong(name: str, value: float, rule: str) -> ValueError:
    flag = "--cache." + name.replace("_", "-")
    return ValueError(f"cache.{name} is {value}; {rule}. Change {flag} or the config file.")
