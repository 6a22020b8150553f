"""A model's shape: what config.json says, checked.  Reads no files and knows no weights.

Both spellings of the rotary settings are read: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5).  What we would compute wrongly is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.models import MODELS

ROPE_KINDS = ("linear", "llama3")  # and "default", which is no scaling
LIMIT = 1 << 31  # no dimension of a model we can run is above this


class BadCheckpoint(Exception):
    """The model's files cannot be served: missing, damaged, or of a kind we do not know."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: str  # "linear": all frequencies / factor; "llama3": only the slow ones, with a ramp
    factor: float
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_max_len / this are scaled
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_max_len / this are kept
    original_max_len: int = 8192  # tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions of a decoder; everything a model file needs to build itself."""

    architecture: str  # Hugging Face class name
    vocab: int  # rows of the embedding
    hidden: int
    layers: int
    heads: int
    kv_heads: int  # divides heads
    head_dim: int  # even; heads * head_dim need not be hidden
    intermediate: int
    max_len: int  # tokens
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_eps: float
    tied: bool  # the output head is the embedding
    attention_bias: bool  # on q, k, v and o
    mlp_bias: bool  # on gate, up and down

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be; raise BadCheckpoint."""
        for field in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim",
                      "intermediate", "max_len"):
            value = getattr(self, field)
            if not 0 < value < LIMIT:
                raise BadCheckpoint(f"The model's {field} is {value}; it must be 1 to {LIMIT - 1}.")
        if self.heads % self.kv_heads:
            raise BadCheckpoint(
                f"The model has {self.heads} heads and {self.kv_heads} key-value heads; "
                "the second must divide the first.")
        if self.head_dim % 2:
            raise BadCheckpoint(
                f"The model's head_dim is {self.head_dim}; rotary needs an even one.")
        for field in ("rope_theta", "rms_eps"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise BadCheckpoint(f"The model's {field} is {value}; it must be above zero.")


def known_architecture(name: str) -> str:
    """Return `name` when we can run it; raise BadCheckpoint naming it and the ones we can."""
    if name not in MODELS:
        raise BadCheckpoint(
            f"The model's architecture is {name:.80}; this engine runs {', '.join(MODELS)}. "
            "Choose another model, or add a file to engine/models/.")
    return name


def from_config_json(config: Mapping[str, object]) -> ModelConfig:
    """The shape in a Hugging Face config.json; `auto_map` and all code references are ignored.

    Raises BadCheckpoint for an unknown architecture, rotary kind, activation or quantisation, and
    for a missing or ill-typed number.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise BadCheckpoint(
            f"config.json's architectures is {names!r:.80}; it must name exactly one of "
            f"{', '.join(MODELS)}.")
    architecture = known_architecture(names[0])
    _refuse_unknown(config)
    heads = _int(config, "num_attention_heads")
    hidden = _int(config, "hidden_size")
    theta, scaling = _rope(config)
    return ModelConfig(
        architecture=architecture,
        vocab=_int(config, "vocab_size"),
        hidden=hidden,
        layers=_int(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_int(config, "num_key_value_heads", heads),
        head_dim=_int(config, "head_dim", hidden // max(heads, 1)),
        intermediate=_int(config, "intermediate_size"),
        max_len=_int(config, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=_float(config, "rms_norm_eps", 1e-6),
        tied=_bool(config, "tie_word_embeddings"),
        attention_bias=_bool(config, "attention_bias"),
        mlp_bias=_bool(config, "mlp_bias"),
    )


def _refuse_unknown(config: Mapping[str, object]) -> None:
    """Name what would silently give other logits."""
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise BadCheckpoint(
            f"The model is quantised ({method!r:.40}); only plain safetensors and GGUF are read. "
            "Choose the unquantised model or a GGUF of it.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise BadCheckpoint(f"The model's hidden_act is {activation!r:.40}; only silu is known.")
    if config.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise BadCheckpoint("The model rotates only part of each head (partial_rotary_factor); "
                            "only whole heads are known.")


def _rope(config: Mapping[str, object]) -> tuple[float, RopeScaling | None]:
    """Base and scaling out of either spelling; the newer one wins, as in transformers 5."""
    where = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    settings = config.get(where)
    if settings is None:
        return _float(config, "rope_theta", 10000.0), None
    if not isinstance(settings, Mapping):
        raise BadCheckpoint(f"config.json's {where} is no object; write one, or null.")
    theta = _float(settings, "rope_theta", _float(config, "rope_theta", 10000.0))
    kind = settings.get("rope_type", settings.get("type"))
    if kind is None and any(isinstance(value, Mapping) for value in settings.values()):
        raise BadCheckpoint(f"config.json's {where} differs by layer type; only one for all "
                            "is known.")
    if kind in ("default", None):
        return theta, None
    if kind not in ROPE_KINDS:
        raise BadCheckpoint(
            f"The model's rotary scaling is {kind!r:.40}; known are default, "
            f"{', '.join(ROPE_KINDS)}.")
    return theta, _scaling(str(kind), settings)


def _scaling(kind: str, settings: Mapping[str, object]) -> RopeScaling:
    factor = _float(settings, "factor")
    if not (math.isfinite(factor) and factor >= 1.0):
        raise BadCheckpoint(f"The model's rotary factor is {factor}; it must be 1 or more.")
    if kind == "linear":
        return RopeScaling(kind, factor)
    low = _float(settings, "low_freq_factor")
    high = _float(settings, "high_freq_factor")
    original = _int(settings, "original_max_position_embeddings")
    if not (0 < low < high < math.inf and original > 0):
        raise BadCheckpoint(
            f"The model's llama3 rotary factors are low {low}, high {high}, original length "
            f"{original}; they must be positive, and low below high.")
    return RopeScaling(kind, factor, low, high, original)


def _int(fields: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadCheckpoint(f"config.json's {key} is {value!r:.40}; it must be a whole number.")
    return value


def _float(fields: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCheckpoint(f"config.json's {key} is {value!r:.40}; it must be a number.")
    return float(value)


def _bool(fields: Mapping[str, object], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadCheckpoint(f"config.json's {key} is {value!r:.40}; it must be true or false.")
    return bool(value)
