"""What is kept of a layer for a device draft is that layer's output, side by side.  No model."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.kernels.overlap import OVERLAPS  # noqa: E402
from engine.kernels.taps import keep  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, width", [(1, 64), (5, 96), (3, 576), (130, 40)])
def test_three_layers_lie_side_by_side_and_nothing_else_is_written(rows, width, dtype):
    noise = torch.Generator().manual_seed(rows)
    outputs = [torch.randn(rows, width, generator=noise).to(DEVICE, dtype) for _ in range(3)]
    kept = torch.full((rows + 2, 3 * width), 7.0, dtype=dtype, device=DEVICE)
    for place in (2, 0, 1):
        part = kept[:rows, place * width : (place + 1) * width]
        keep(outputs[place], part, overlap=OVERLAPS and DEVICE == "cuda")
    assert torch.equal(kept[:rows], torch.cat(outputs, dim=1))
    assert (kept[rows:] == 7.0).all()
