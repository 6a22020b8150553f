"""Choose the device that the engine runs on.  Allocates nothing on it."""

from __future__ import annotations

import torch

from engine.config import BadConfig


def pick(name: str) -> torch.device:
    """The device for a config's `auto`, `cpu` or `cuda`; its `type` is the kind for `resolved`.

    Raise BadConfig when a GPU is asked for and torch sees none: a silent CPU would be 100x slower.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    build = torch.version.cuda or "none"
    raise BadConfig(
        f"device {name!r} is asked for, but torch {torch.__version__} (CUDA build: {build}) sees "
        "no GPU. `slipstream doctor` says more; or start with --device cpu."
    )


def processors(device: torch.device) -> int:
    """Multiprocessors of the device; what is not a GPU runs programs one by one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
