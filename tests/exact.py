"""Requests of every kind and every way to run them, to see that none changes an answer."""

from __future__ import annotations

import itertools
import json
import random

import msgspec

from engine.messages import Grammar, Sampling, Submit
from tests.scripted import EOS

VOCAB = 259

DRAWS = {
    "greedy": Sampling(temperature=0.0),
    "hot": Sampling(temperature=1.0, seed=11),
    "top": Sampling(temperature=0.8, top_p=0.8, top_k=40, min_p=0.02, seed=12),
    "penalised": Sampling(temperature=0.7, repetition=1.2, frequency=0.4, presence=0.3, seed=13),
    "greedy-penalised": Sampling(temperature=0.0, repetition=1.3, presence=0.5),
    "biased": Sampling(temperature=0.9, bias=((65, 3.0), (EOS, 1.0)), min_tokens=5, seed=14),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "minItems": 1, "maxItems": 3},
        "n": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "days", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: %json {json.dumps(SCHEMA)}"
GRAMMARS = {
    "free": None,
    "json": Grammar(JSON),
    "choice": Grammar('start: "<a>" ("yes" | "no" | /[0-9]{3,9}/)+ "</a>"'),
    "tight": Grammar(JSON),  # with so few tokens that closing plans have to speak
}
BUDGETS = {"json": 80, "tight": len('{"city":"","days":["mon"],"n":1}')}
WAYS = {
    "batch": {"together": True},
    "chunked": {"max_batch_tokens": 24, "mixed_tokens": 9},
    "uncached": {"prefix_caching": False},
    "preempted": {"together": True, "blocks": 11, "max_batch_tokens": 64, "disturb": True},
    "whole": {"max_batch_tokens": 2048},
}


def preempt_some(engine, number):
    """Every third step somebody loses its blocks, whoever it is."""
    running = engine.scheduler.running
    if running and number % 3 == 2:
        engine.scheduler.preempt(running[number % len(running)])


def pairwise(*axes, seed=5):
    """Rows that hold every pair of values of every two axes: greedy, near the fewest."""
    chance = random.Random(seed)
    missing = {
        (i, a, j, b)
        for (i, left), (j, right) in itertools.combinations(enumerate(axes), 2)
        for a in left
        for b in right
    }
    rows = []
    while missing:
        pool = [tuple(chance.choice(axis) for axis in axes) for _ in range(60)]
        i, a, j, b = next(iter(sorted(missing, key=repr)))
        wanted = {i: a, j: b}
        pool = [tuple(wanted.get(n, value) for n, value in enumerate(row)) for row in pool]

        def gain(row):
            return sum(
                (n, x, m, y) in missing
                for (n, x), (m, y) in itertools.combinations(enumerate(row), 2)
            )

        best = max(pool, key=gain)
        missing -= {
            (n, x, m, y) for (n, x), (m, y) in itertools.combinations(enumerate(best), 2)
        }
        rows.append(best)
    return rows


def requests(draw: str, grammar: str, n: int) -> list[Submit]:
    """Four requests: two share a prefix of more than two blocks, one is short, one is long."""
    chance = random.Random(99)
    shared = [chance.randrange(256) for _ in range(150)]
    prompts = [
        [*shared, 1, 2, 3],
        [*shared, 9, 8],
        [chance.randrange(256) for _ in range(5)],
        [chance.randrange(256) for _ in range(128)],  # ends on a block's edge
    ]
    return [
        Submit(
            f"r{i}", prompt, BUDGETS.get(grammar, 40) + i,
            msgspec.structs.replace(DRAWS[draw], seed=DRAWS[draw].seed + i),
            n=n, stop_ids=[EOS], grammar=GRAMMARS[grammar],
        )
        for i, prompt in enumerate(prompts)
    ]
