"""The gateway's settings and their ranges.  Reads no file, flag or environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ConfigError(ValueError):
    """A setting is out of range; the message names it, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """How the HTTP side behaves.  Times in seconds, sizes in bytes; `check()` after building."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free one
    workers: int = 1  # gateway processes on that port, over one engine
    served_model_name: str | None = None  # None = the model's own name
    api_key_file: str | None = None  # None = no keys: everyone is one tenant
    secret_file: str | None = None  # None = a new one each start, and new cache names
    cache_scope: Literal["tenant", "session"] = "tenant"
    metrics_open: bool = True  # False: /metrics needs a key too
    access_log: bool = True

    max_body_bytes: int = 32 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_headers: int = 100
    header_timeout_s: float = 10.0  # from a request's first byte to the end of its head
    body_timeout_s: float = 60.0  # from the end of the head to the end of the body
    body_bytes_per_s: int = 1000  # slower uploads are closed after `body_grace_s`
    body_grace_s: float = 5.0
    keep_alive_s: float = 120.0  # longer than proxies keep idle sockets, or they hit a closed one
    linger_s: float = 2.0  # a refused upload is read and dropped this long, so its answer arrives
    max_connections: int = 20_000
    backlog: int = 2048  # connections the kernel holds before they are accepted

    max_queued_requests: int = 512  # admitted, no token yet
    max_queued_tokens: int = 2_000_000  # prompt tokens of those
    max_open_requests: int = 2048  # queued and streaming together

    ping_s: float = 10.0  # keep-alive comment on streams, by the wall clock
    send_timeout_s: float = 30.0  # a client that reads nothing for this long is dropped
    drain_delay_s: float = 5.0  # after SIGTERM: /ready says 503, load balancers notice
    drain_timeout_s: float = 30.0  # after SIGTERM: running streams may go on this long
    restart_grace_s: float = 60.0  # the engine may be gone this long before /health says so
    heartbeat_limit_s: float = 60.0  # an engine silent for longer is stuck

    def check(self) -> GatewayConfig:
        """Return self when every setting is in range; else raise ConfigError with the first."""
        if self.cache_scope not in ("tenant", "session"):
            raise ConfigError(f"cache_scope is {self.cache_scope!r}; use 'tenant' or 'session'.")
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty; leave it out for the model's own.")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value:,}; it must be between {low:,} and {high:,}.")
        return self


_DAY = 86_400
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65_535),
    "workers": (1, 64),
    "max_body_bytes": (1024, 1024**3),
    "max_header_bytes": (1024, 1024**2),
    "max_headers": (8, 10_000),
    "header_timeout_s": (0.05, _DAY),
    "body_timeout_s": (0.05, _DAY),
    "body_bytes_per_s": (0, 1024**3),
    "body_grace_s": (0.05, _DAY),
    "keep_alive_s": (0.05, _DAY),
    "linger_s": (0, 60),
    "max_connections": (1, 1_000_000),
    "backlog": (1, 65_535),
    "max_queued_requests": (1, 1_000_000),
    "max_queued_tokens": (1, 10**12),
    "max_open_requests": (1, 1_000_000),
    "ping_s": (0.05, _DAY),
    "send_timeout_s": (0.05, _DAY),
    "drain_delay_s": (0, _DAY),
    "drain_timeout_s": (0, _DAY),
    "restart_grace_s": (0, _DAY),
    "heartbeat_limit_s": (0.05, _DAY),
}
