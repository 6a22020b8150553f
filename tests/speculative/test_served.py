"""`--speculative-config`: what is made of it, and what a mistake is told."""

from __future__ import annotations

import json

import pytest

from engine.config import DEFAULTS, BadConfig, EngineConfig
from engine.proposer import proposer
from speculative import PROPOSERS
from speculative.hybrid import Hybrid
from speculative.served import configured


def made(text: str, kind: str = "cpu"):
    config = configured(EngineConfig(model="m", speculative=text))
    return proposer(config.resolved(kind), kind)


def test_a_device_drafts_by_itself_unless_it_is_told_not_to() -> None:
    assert isinstance(made("auto"), Hybrid) and isinstance(made("auto", "cuda"), Hybrid)
    assert isinstance(made("{}", "cuda"), Hybrid)
    assert made("off") is None and made("off", "cuda") is None
    assert proposer(EngineConfig(model="m").resolved("cpu"), "cpu") is None  # nobody configured it


@pytest.mark.parametrize("method", list(PROPOSERS))
def test_every_method_is_made_by_its_name(method: str) -> None:
    config = {"method": method} | ({"model": "x"} if method == "eagle3" else {})
    assert made(json.dumps(config)).source == "hybrid"


def test_the_number_of_tokens_is_the_engines_and_the_devices_when_it_is_left_out() -> None:
    given = configured(EngineConfig(model="m", speculative='{"num_speculative_tokens": 5}'))
    assert given.resolved("cpu").max_drafts == given.resolved("cuda").max_drafts == 5
    left = configured(EngineConfig(model="m"))
    for kind in ("cpu", "cuda"):
        assert left.resolved(kind).max_drafts == DEFAULTS[kind].max_drafts != 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("on", "auto, off, or JSON"),
        ('{"method": "sufix"}', "Did you mean suffix?"),
        ('{"method": "zzz"}', "Known: hybrid, suffix, forced, eagle3"),
        ('{"modell": "x"}', "unknown field `modell`"),
        ('{"method": "eagle3"}', "needs a model"),
        ('{"method": "suffix", "model": "x"}', "suffix takes no model"),
        ('{"num_speculative_tokens": 0}', "it is 1 to 64"),
        ('{"num_speculative_tokens": 65}', "it is 1 to 64"),
        ('{"num_speculative_tokens": "5"}', "Expected `int | null`"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_loaded(text: str, says: str) -> None:
    with pytest.raises(BadConfig, match="speculative-config") as error:
        configured(EngineConfig(model="m", speculative=text))
    assert says in str(error.value)
