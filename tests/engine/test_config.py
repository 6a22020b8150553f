"""Settings that depend on the device, and the choice of the device.  Loads no model."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.config import DEFAULTS, BadConfig, EngineConfig, Limits, ResolvedConfig
from engine.device import pick


def limits(config: EngineConfig) -> tuple[float | None, ...]:
    return tuple(getattr(config, name) for name in Limits._fields)


@pytest.mark.parametrize("kind", list(DEFAULTS))
def test_what_is_left_open_is_filled_in_by_the_device(kind):
    config = EngineConfig(model="m").check()
    assert limits(config) == (None,) * len(Limits._fields)
    assert limits(config.resolved(kind)) == DEFAULTS[kind]


def test_what_is_given_stays_on_every_device_and_resolving_twice_changes_nothing():
    config = EngineConfig(model="m", max_sequences=7, mixed_tokens=9, dtype="float32", threads=3)
    resolved = config.resolved("cuda")
    assert limits(resolved) == (7, DEFAULTS["cuda"].max_batch_tokens, 9, 0.0, 31)
    assert (resolved.model, resolved.dtype, resolved.threads) == ("m", "float32", 3)
    assert resolved.resolved("cpu") == resolved


def test_every_field_survives_resolving_and_the_way_to_the_engine_process():
    config = EngineConfig(model="m", served_name="s", max_len=5, gpu_memory_utilization=0.5)
    sent = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig)
    assert sent == config
    assert ResolvedConfig.__struct_fields__ == EngineConfig.__struct_fields__
    resolved = sent.resolved("cpu")
    for name in EngineConfig.__struct_fields__:
        if getattr(config, name) is not None:
            assert getattr(resolved, name) == getattr(config, name), name


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_sequences": 512, "device": "cpu"}, "max_batch_tokens 512 cannot give 512"),
        ({"max_sequences": 2048}, "raise it above 2048"),
        ({"max_batch_tokens": 64}, "or lower max_sequences"),
        ({"max_batch_tokens": 100, "device": "cuda"}, "cannot give 256"),
        ({"max_sequences": 0}, "max_sequences is 0; it must be at least 1"),
        ({"mixed_tokens": 0}, "mixed_tokens is 0; it must be at least 1"),
        ({"compile_threads": 0}, "compile_threads is 0"),
        ({"compile_cpu_s": -1.0}, "compile_cpu_s is -1.0"),
        ({"compile_cpu_s": 4000.0}, "to 600"),
        ({"compile_memory_bytes": 512}, "compile_memory_bytes is 512"),
        ({"device": "tpu"}, "use auto, cpu, cuda"),
        ({"gpu_memory_utilization": 0.0}, "above 0, at most 1"),
        ({"gpu_memory_utilization": 1.2}, "above 0, at most 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(settings, says):
    with pytest.raises(BadConfig, match=says):
        EngineConfig(model="m", **settings).check()


def test_what_works_on_some_device_waits_for_the_device():
    config = EngineConfig(model="m", max_sequences=600).check()
    assert config.resolved("cuda").max_batch_tokens == 2048
    with pytest.raises(BadConfig, match="cannot give 600"):
        config.resolved("cpu")


def test_auto_is_a_gpu_only_when_torch_sees_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick("auto") == pick("cpu") == torch.device("cpu")
    with pytest.raises(BadConfig, match="doctor"):
        pick("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick("auto") == pick("cuda") == torch.device("cuda", 1)
    assert pick("cpu").type == "cpu"
