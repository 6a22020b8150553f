"""The one object that every endpoint takes from the app.  Holds no request's state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import Sampling
from gateway.auth import Keys, load_secret
from gateway.config import GatewayConfig
from gateway.drain import Drain
from gateway.errors import Draining, Loading, Unavailable
from gateway.limits import Admission, Ticket
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.sheet import Share

if TYPE_CHECKING:
    from gateway.prompt import Prompts


@dataclass(frozen=True, slots=True)
class Shared:
    """What the workers of one server have in common."""

    share: Share
    secret: bytes  # names sessions and cache entries: another worker must find them
    created: int  # Unix time


@dataclass
class Gateway:
    """Everything that the endpoints share.  Build it with `Gateway.open`."""

    config: GatewayConfig
    link: Link
    prompts: Prompts
    model: str  # the name that callers use
    keys: Keys
    metrics: Metrics
    drain: Drain
    admission: Admission
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, for /v1/models
    defaults: Sampling = field(default_factory=Sampling)  # for what a request leaves out
    seen_engine: bool = False  # an engine was ready at least once

    @classmethod
    def open(
        cls,
        config: GatewayConfig,
        link: Link,
        prompts: Prompts,
        model: str,
        defaults: Sampling | None = None,
        shared: Shared | None = None,
    ) -> Gateway:
        """The parts of a gateway, made from its settings; raise ConfigError.

        `defaults` is the model's own sampling, for what requests leave out; None = OpenAI's.
        `shared` makes this gateway one of a server's workers.
        """
        config.check()
        secret = load_secret(config.secret_file) if shared is None else shared.secret
        share = None if shared is None else shared.share
        name = config.served_model_name or model
        metrics = Metrics(name, share=share)
        metrics.link = link
        return cls(
            config=config,
            link=link,
            prompts=prompts,
            model=name,
            keys=(
                Keys.none(secret)
                if config.api_key_file is None
                else Keys.from_file(config.api_key_file, secret)
            ),
            metrics=metrics,
            drain=Drain(),
            defaults=defaults or Sampling(),
            admission=Admission(
                config.max_queued_requests, config.max_queued_tokens, config.max_open_requests,
                share=share,
            ),
            created=int(time.time()) if shared is None else shared.created,
        )

    def admit(self, prompt_tokens: int) -> Ticket:
        """Take a place in the queue; raise Draining, Loading, Unavailable or QueueFull.

        Call it before the 200.  `with` the ticket, or `release()` it in the stream's `finally`;
        `started()` at the first token.
        """
        self.check_ready()
        return self.admission.enter(prompt_tokens)

    def check_ready(self) -> None:
        """Raise Draining, Loading or Unavailable unless new work can be taken now."""
        if self.drain.draining:
            raise Draining
        if self.link.hello is None:
            raise Unavailable if self.seen_engine or self.link.restarts else Loading
        self.seen_engine = True
        if self.link.stats_age_s > self.config.heartbeat_limit_s:
            raise Unavailable(
                "The engine has stopped answering. Try again soon; see GET /ready."
            )
