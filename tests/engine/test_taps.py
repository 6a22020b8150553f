"""What a device draft reads is what each tapped layer gave, and taps change no answer.  One card,
or Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.kernels.launch import library  # noqa: E402
from engine.messages import Sampling, Submit  # noqa: E402
from engine.models import family  # noqa: E402
from engine.weights import load  # noqa: E402
from speculative.witness import Witness  # noqa: E402
from tests.captured import KnowingChains  # noqa: E402
from tests.driver import Run  # noqa: E402
from tests.speculative.test_captured import make  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

LAYERS = 3
PROMPT = [(7 * i + i // 5) % 250 for i in range(21)]


class Reading(KnowingChains):
    """Keeps what it was given last."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        super().__init__({0: [1] * 200}, 0, DEVICE)
        self.taps = taps

    def prepare(self, tokens: int, rows: int) -> None:
        self.read = torch.zeros(len(self.taps), tokens, 64, device=DEVICE)

    def extend(self, kept, tokens, positions, slots, ends) -> None:
        super().extend(kept, tokens, positions, slots, ends)
        for mine, one in zip(self.read, kept, strict=True):
            mine[: len(one)].copy_(one)  # a graph holds this, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("taps") / "model", layers=LAYERS, hidden=64, heads=2, kv_heads=1,
        head_dim=32, intermediate=48, max_len=256)


@pytest.fixture(scope="module")
def witness(folder):
    checkpoint = open_checkpoint(str(folder))
    kind, shape = family(checkpoint.architecture), checkpoint.config
    weights = load(checkpoint, kind.expected(shape), torch.float32, None, torch.device("cpu"))
    return Witness(kind(shape, weights, 256), shape)


def answered(engine, count: int) -> list[int]:
    run = Run(engine).put(Submit("r", PROMPT, count, Sampling(temperature=0.0, seed=0))).drain()
    assert not run.failed and not run.refused
    return run.tokens["r", 0]


@pytest.fixture(scope="module")
def plain(folder):
    return answered(make(folder, None, True), 4)


@pytest.mark.parametrize("taps", [(1,), (0, LAYERS - 1), tuple(range(-1, LAYERS))], ids=str)
def test_a_draft_reads_each_tapped_layers_output(folder, witness, plain, taps):
    head = Reading(taps)
    engine = make(folder, head, True)
    answered(engine, 1)  # the prompt's step is the only one
    wanted, _ = witness.read(PROMPT, [tap + 1 for tap in taps])
    found = torch.cat(list(head.read[:, : len(PROMPT)].cpu()), dim=1)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    assert answered(engine, 4) == plain


@pytest.mark.parametrize("apart", [False, True], ids=["in place", "to another place"])
def test_a_librarys_product_is_added_to_what_was_there(apart):
    noise = torch.Generator().manual_seed(3)
    x, w, before = (torch.randn(shape, generator=noise).to(DEVICE) for shape in
                    ((5, 48), (32, 48), (5, 32)))
    wanted = torch.addmm(before, x, w.t())
    out = torch.full_like(before, 7.0) if apart else before.clone()
    kept = before.clone()
    library(x, w, out, before if apart else out)
    torch.testing.assert_close(out, wanted)
    assert torch.equal(before, kept)
    library(x, w, out)
    torch.testing.assert_close(out, x @ w.t())
