"""Rows behind a draft that go without a mask change no answer, on the host or on the device.

test_equality.py runs every source that way, too; here it is seen that it happens, and what must
not remember it: penalties, a device's newest token, its head.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.guessing import Guessing  # noqa: E402
from engine.kernels import chain_attention as attention  # noqa: E402
from engine.messages import Sampling, Submit  # noqa: E402
from speculative.captured import CapturedEagle3  # noqa: E402
from speculative.eagle3 import Eagle3  # noqa: E402
from tests.captured import KnowingChains  # noqa: E402
from tests.driver import Run, answers, make  # noqa: E402
from tests.exact import BUDGETS, GRAMMARS, preempt_some, requests  # noqa: E402
from tests.heads import config, head_of  # noqa: E402
from tests.proposers import AdversarialDrafts, Eager, OracleDrafts  # noqa: E402
from tests.scripted import EOS  # noqa: E402
from tests.speculative.test_captured import F32  # noqa: E402
from tests.speculative.test_captured import make as make_device  # noqa: E402
from tests.tiny import write_llama  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("lean") / "model", hidden=64, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=512,
    )


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """An interpreter takes them one by one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "FULL", 8)


@pytest.mark.parametrize("grammar", ["json", "choice", "tight"])
@pytest.mark.parametrize("draw", ["greedy", "greedy-penalised", "hot"])
def test_tokens_are_drawn_again_where_a_mask_was_left_out_and_only_of_greedy_rows(
    folder, draw, grammar
):
    submits = requests(draw, grammar, 2)
    plain = make(folder, depth=1)
    truth = {key: text for one in submits for key, text in answers(plain, one).items()}
    assert plain.stats().redrawn == 0
    redrawn = 0
    for drafts in (OracleDrafts(truth), AdversarialDrafts(truth, 259, EOS), Eager(("suffix",))):
        for depth in (0, 1):
            engine = make(folder, drafts=drafts, max_drafts=6, depth=depth)
            run = Run(engine).put(*submits).drain(disturb=preempt_some if depth else None)
            assert run.tokens == truth and not run.failed and engine.pool.used == 0
            again = engine.stats().redrawn
            assert again == 0 if depth == 0 or draw == "hot" else True
            redrawn += again
    assert (redrawn > 3) == (draw != "hot")


def constrained() -> list[Submit]:
    """Greedy ones, some with penalties, that the device counts."""
    draws = [Sampling(temperature=0.0, seed=i, frequency=1.8 * (i % 2), presence=1.8 * (i % 2))
             for i in range(6)]
    kinds = ["json", "choice", "tight", "json", "choice", "json"]
    return [
        Submit(f"r{i}", list(range(5, 12 + 5 * i)), BUDGETS.get(kinds[i], 24), draw,
               stop_ids=[EOS], grammar=GRAMMARS[kinds[i]])
        for i, draw in enumerate(draws)
    ]


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_devices_chains_and_counts_are_those_of_the_answer(folder, wrong):
    """It had drafted on from a token that never was, and counted that one."""
    submits = constrained()
    wanted = Run(make_device(folder, None, False)).put(*submits).drain().tokens
    texts = {one.sampling.seed: [*one.prompt, *wanted[one.id, 0]] for one in submits}
    engine = make_device(folder, KnowingChains(texts, wrong, DEVICE), True)
    run = Run(engine).put(*submits).drain()
    assert run.tokens == wanted and not run.failed
    assert engine.stats().redrawn > 3 and engine.guessing.accepted > 20


@pytest.mark.skipif(DEVICE == "cuda", reason="its heads lie on the CPU; see test_card_drafts.py")
def test_a_head_drafts_behind_a_token_that_was_drawn_again_as_behind_any(folder, monkeypatch):
    """A chain is a function of the text: it is the CPU's, which has a mask in every row."""
    shape = config(head_dim=32, heads=4, kv_heads=2)
    take = Guessing.take
    chains: list[dict] = []

    def noted(self, seq, tokens):
        if tokens:
            chains[-1][seq.key, len(seq.tokens)] = list(tokens)
        take(self, seq, tokens)

    monkeypatch.setattr(Guessing, "take", noted)
    texts = []
    for fused, head in ((False, Eagle3), (True, CapturedEagle3)):
        chains.append({})
        made = head(head_of(shape, 3, F32), *([512] if fused else []))
        engine = make_device(folder, made, fused)
        # Right drafts bring rows without masks; the head's own are only looked at.
        host = OracleDrafts(texts[0] if texts else {})
        host.ahead = lambda load, most: most
        engine.guessing.host = host
        texts.append(Run(engine).put(*constrained()).drain().tokens)
    assert texts[0] == texts[1] and engine.stats().redrawn > 3
    common = chains[0].keys() & chains[1].keys()
    assert len(common) > 20
    assert {key: chains[1][key] for key in common} == {key: chains[0][key] for key in common}
