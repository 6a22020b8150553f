"""tau as an engine gives it: held-out conversations, answered with drafts.  Trains nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from engine.messages import Failed, Out, Refused, Step, Stepping
from speculative.train.generate import Asked, submit_of
from speculative.train.prompts import DOMAINS


class Served(msgspec.Struct, frozen=True):
    """What one engine gave on one domain."""

    drafts: str  # who guessed
    most: int  # draft tokens a step
    domain: str
    answers: int
    tokens: int  # behind each answer's first, which nobody can draft
    drafted: int
    accepted: int
    tau: float  # tokens a step and sequence
    speed: float  # tokens a second, all sequences together


def measure(
    engine: Stepping, asked: Iterable[Asked], *, drafts: str, most: int, at_once: int = 1
) -> list[Served]:
    """Answer everything, `at_once` at a time; a Served for each domain that was there.

    `drafts`: of Submit, "off" for none, "auto" for all that the engine has, or one source.
    """
    waiting, found = list(asked), list[Served]()
    for domain in DOMAINS:
        group = [one for one in waiting if one.conversation.domain == domain]
        if group:
            found.append(_domain(engine, group, domain, drafts, most, at_once))
    return found


def _domain(
    engine: Stepping, group: list[Asked], domain: str, drafts: str, most: int, at_once: int
) -> Served:
    ends: list[Out] = []
    answers = tokens = running = 0
    waiting = iter(group)
    began = time.monotonic()
    more = True
    while more or running:
        while more and running < at_once:
            more = (one := next(waiting, None)) is not None
            if one is not None:
                message = submit_of(one, engine.hello.stop_ids)
                engine.inbox.put(msgspec.structs.replace(message, drafts=drafts, max_drafts=most))
                running += 1
        engine.wait(0.5)
        for reply in engine.step():
            match reply:
                case Step(outs=outs):
                    tokens += sum(len(out.tokens) for out in outs)
                    ends += [out for out in outs if out.finish]
                    running -= sum(bool(out.finish) for out in outs)
                case Refused() | Failed():
                    running -= 1
                case _:
                    pass
    seconds = time.monotonic() - began
    answers = len(ends)
    drafted, accepted = sum(out.drafted for out in ends), sum(out.accepted for out in ends)
    behind = tokens - answers
    tau = behind / max(1, behind - accepted)
    return Served(drafts, most, domain, answers, behind, drafted, accepted, round(tau, 4),
                  round(tokens / seconds, 1))
