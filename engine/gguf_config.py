"""A model's shape out of a GGUF's keys.  Reads no weights but the rotary factor table.

Key names are ggml's; the numbers mean what config.json's mean, with two twists: floats were stored
in 32 bits (1e-5 comes back as 9.99999975e-06), and llama3 rotary scaling is a table of divisors.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from engine.gguf_file import GgufFile
from engine.model_config import BadCheckpoint, ModelConfig, RopeScaling

ROPE_TABLE = "rope_freqs.weight"


def config_of(gguf: GgufFile) -> ModelConfig:
    """The shape of a GGUF of architecture `llama`; raise BadCheckpoint for others and odd keys."""
    keys = _Keys(gguf)
    family = gguf.values.get("general.architecture")
    if family != "llama":
        raise BadCheckpoint(f"{gguf.path.name} holds the architecture {family!r:.40}; this engine "
                            "reads llama from GGUF. Choose another model.")
    if keys.whole("llama.expert_count", 0):
        raise BadCheckpoint(f"{gguf.path.name} is a mixture of experts; only dense models are "
                            "known.")
    if (parts := keys.whole("split.count", 1)) > 1:
        raise BadCheckpoint(f"{gguf.path.name} is one of {parts} parts. Merge them with llama.cpp"
                            "'s gguf-split, or use the model's safetensors folder.")
    heads, hidden = keys.whole("llama.attention.head_count"), keys.whole("llama.embedding_length")
    head_dim = keys.whole("llama.attention.key_length", hidden // max(heads, 1))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if keys.whole(key, head_dim) != head_dim:
            raise BadCheckpoint(f"{gguf.path.name} has {key} {keys.whole(key)} and heads of "
                                f"{head_dim}; they must be equal.")
    embedding = gguf.tensors.get("token_embd.weight")
    theta = keys.real("llama.rope.freq_base", 10000.0)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab=embedding.shape[0] if embedding else keys.whole("llama.vocab_size"),
        hidden=hidden,
        layers=keys.whole("llama.block_count"),
        heads=heads,
        kv_heads=keys.whole("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=keys.whole("llama.feed_forward_length"),
        max_len=keys.whole("llama.context_length"),
        rope_theta=theta,
        rope_scaling=_scaling(keys, theta, head_dim),
        rms_eps=keys.real("llama.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in gguf.tensors,
        attention_bias="blk.0.attn_q.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_down.bias" in gguf.tensors,
    )


class _Keys:
    """Typed look-ups that name the key they miss."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.gguf.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadCheckpoint(f"{self.gguf.path.name} has {value!r:.40} as {key}; it must be one "
                                "whole number.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.gguf.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadCheckpoint(f"{self.gguf.path.name} has {value!r:.40} as {key}; it must be one "
                                "number.")
        return float(str(np.float32(value)))  # the shortest text of the 32-bit value


def _scaling(keys: _Keys, theta: float, head_dim: int) -> RopeScaling | None:
    kind = keys.gguf.values.get("llama.rope.scaling.type", "none")
    if ROPE_TABLE in keys.gguf.tensors:
        return _llama3(keys.gguf, theta, head_dim)
    if kind == "none":
        return None
    if kind != "linear":
        raise BadCheckpoint(f"{keys.gguf.path.name} has rotary scaling {kind!r:.40}; known are "
                            "none, linear and llama3.")
    factor = keys.real("llama.rope.scaling.factor")
    if not (math.isfinite(factor) and factor >= 1.0):
        raise BadCheckpoint(f"{keys.gguf.path.name} has the rotary factor {factor}; it must be 1 "
                            "or more.")
    return RopeScaling("linear", factor)


def _llama3(gguf: GgufFile, theta: float, head_dim: int) -> RopeScaling:
    """The settings whose divisors are those of the table; raise BadCheckpoint when none are.

    All published Llama 3.x models share the ramp's ends (1, 4, 8192); only the factor differs.
    """
    tensor = gguf.tensors[ROPE_TABLE]
    if tensor.kind != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise BadCheckpoint(f"{gguf.path.name} has {ROPE_TABLE} of shape {tensor.shape} in "
                            f"{tensor.kind.name}; {head_dim // 2} F32 values are known.")
    table = np.fromfile(gguf.path, "<f4", count=head_dim // 2, offset=tensor.offset)
    factor = round(float(table.max()), 3) if np.isfinite(table).all() else 0.0
    scaling = RopeScaling("llama3", factor)
    if factor < 1.0 or not np.allclose(table, _divisors(scaling, theta, head_dim), rtol=1e-3):
        raise BadCheckpoint(f"{gguf.path.name}'s {ROPE_TABLE} is not that of a Llama 3 model. "
                            "Use the model's safetensors folder.")
    return scaling


def _divisors(scaling: RopeScaling, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """What each rotary frequency is divided by: 1 if fast, `factor` if slow, a ramp between.

    The ramp is Llama 3.1's: linear, in 1 / divisor, over the turns made within original_max_len.
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_len * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1.0 / (kept + (1.0 - kept) / scaling.factor)
    return divisors
