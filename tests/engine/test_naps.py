"""Sleeping until a step is nearly done: on a simulated device, and on the clock.  Needs no GPU."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest

from engine.cuda import laps
from engine.cuda.naps import Naps


@dataclass
class Device:
    """Runs steps in order, one ahead of the host; sleeps of the host last `lag_s` too long."""

    lag_s: float
    naps: Naps = field(default_factory=Naps)
    now: float = 100.0
    free: float = 0.0
    slept: float = 0.0
    spun: float = 0.0
    late: list[float] = field(default_factory=list)  # by how much, each sleep that was too long

    def launch(self, step_s: float, host_s: float) -> tuple[float, float, float]:
        """When it was launched, when it ends, how long it runs."""
        self.now += host_s
        self.free = max(self.free, self.now) + step_s
        return self.now, self.free, step_s

    def collect(self, launched: float, end: float, took: float, kind: str) -> None:
        if self.now < end and (rest := self.naps.rest(kind, launched, self.now)):
            self.now += rest + self.lag_s
            self.slept += rest
            self.naps.woke(self.now > end)
            if self.now > end:
                self.late.append(self.now - end)
        waited = self.now < end
        self.spun += max(0.0, end - self.now)
        self.now = max(self.now, end)
        self.naps.ended(kind, launched, self.now, took, waited=waited)

    def run(self, steps: int, step_s: float, host_s: float, *, spread: float = 0.01) -> None:
        chance = random.Random(7)
        before = None
        for _ in range(steps):
            flight = self.launch(step_s * chance.uniform(1 - spread, 1 + spread), host_s)
            if before is not None:
                self.collect(*before, "decode")
            before = flight
        assert before is not None
        self.collect(*before, "decode")


@pytest.mark.parametrize("lag_s", [0.0, 60e-6, 200e-6])
@pytest.mark.parametrize("step_s", [0.75e-3, 4.2e-3])
def test_the_host_sleeps_through_most_of_a_step_and_is_seldom_late(step_s, lag_s):
    device = Device(lag_s)
    device.run(2000, step_s, 0.15e-3)
    idle = 2000 * (step_s - 0.15e-3)
    assert device.slept > idle - 2000 * (1.6 * lag_s + 0.2e-3)
    assert device.spun < 2000 * 0.25e-3
    assert len(device.late) < 60
    assert device.now < 100.0 + 2000 * step_s * 1.01, "the device had to wait for the host"


def test_nothing_is_slept_before_a_step_of_its_kind_was_seen():
    naps = Naps()
    assert naps.rest("decode", 1.0, 1.0) == 0
    naps.ended("decode", 1.0, 1.004, 0.004, waited=True)
    assert naps.rest("prompt", 1.004, 1.004) == 0
    assert 0.003 < naps.rest("decode", 1.004, 1.004) < 0.004


def test_steps_that_become_shorter_are_overslept_once():
    device = Device(0.0)
    device.run(300, 4e-3, 0.1e-3, spread=0.0)
    assert not device.late
    device.run(300, 2e-3, 0.1e-3, spread=0.0)
    assert len(device.late) <= 2


def test_a_host_that_is_slower_than_the_device_does_not_sleep():
    device = Device(0.0)
    device.run(300, 0.5e-3, 0.8e-3)
    assert device.slept < 0.5e-3, "but through the last step, beside which there is nothing to do"
    assert device.spun < 300 * 0.02e-3


def test_a_pause_between_requests_is_not_taken_for_a_long_step():
    device = Device(0.0)
    device.run(50, 4e-3, 0.1e-3)
    device.now += 10.0
    slept = device.slept
    device.run(50, 4e-3, 0.1e-3)
    assert 0.15 < device.slept - slept < 50 * 4e-3
    assert len(device.late) < 5


@dataclass
class Event:
    """A device's event that is passed at a time of the host's clock."""

    device: list[float]  # when it is done with all that was queued
    blocking: bool
    at: float = 0.0

    def record(self, stream: object) -> None:
        self.at = self.device[0] = max(self.device[0], time.monotonic())

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        while not self.query():
            pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


@pytest.mark.timed
def test_a_step_is_waited_for_to_its_end_and_its_events_serve_the_next(monkeypatch):
    device, made = [0.0], []

    def event(*, timing: bool, blocking: bool) -> Event:
        assert timing
        made.append(Event(device, blocking))
        return made[-1]

    monkeypatch.setattr(laps, "event", event)
    watch = laps.Laps(None)
    for step in range(6):
        lap = watch.begin(3)
        lap.kind = "decode"
        device[0] += 0.02
        watch.end(lap)
        cpu = time.thread_time()
        assert watch.wait(lap) == pytest.approx(0.02)
        assert time.monotonic() >= lap.ended.at
        assert step == 0 or time.thread_time() - cpu < 0.01, "it spun for most of the step"
    assert len(made) == 3 and not any(one.blocking for one in made)
    lap = watch.begin(3)
    lap.kind = None  # say, it was captured, too
    device[0] += 0.5
    watch.end(lap)
    assert watch.wait(lap) == 0.0
    two = watch.begin(3), watch.begin(3)
    assert len(made) == 6 and two[0] is not two[1], "steps that fly have events of their own"
    assert watch.begin(laps.BLOCKING).ended.blocking


def test_a_step_like_no_other_says_nothing_of_the_next_one():
    naps = Naps()
    naps.ended(None, 100.0, 100.5, 0.5, waited=True)
    assert naps.rest(None, 101.0, 101.0) == 0.0
    naps.ended("decode", 102.0, 102.5, 0.5, waited=True)
    assert naps.rest("decode", 103.0, 103.0) > 0.4
