"""A head as a GPU drafts with it, by Triton's interpreter: the CPU's chains.  Times nothing."""

from __future__ import annotations

import itertools
import os
import weakref

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.build as build  # noqa: E402
from cache.config import CacheConfig  # noqa: E402
from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.cuda.runner import CudaRunner  # noqa: E402
from engine.guessing import Guessing  # noqa: E402
from engine.kernels import chain_attention as attention  # noqa: E402
from engine.loop import Engine  # noqa: E402
from engine.messages import Sampling, Submit  # noqa: E402
from engine.proposer import ASLEEP, FREE, HOST  # noqa: E402
from speculative.captured import CapturedEagle3  # noqa: E402
from speculative.eagle3 import Eagle3  # noqa: E402
from speculative.probe import Whole  # noqa: E402
from tests.captured import KnowingChains  # noqa: E402
from tests.driver import Run  # noqa: E402
from tests.heads import config, head_of  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

F32 = torch.float32
HEADS = {
    "plain": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "wide": {"draft_vocab": 259, "norm_before_residual": True, "attention_bias": True,
             "norm_before_fc": True, "fc_bias": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("captured") / "model", hidden=64, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=512,
    )


def make(folder, head, fused: bool, **settings) -> Engine:
    settings = {"max_sequences": 8, "max_batch_tokens": 96, "mixed_tokens": 70,
                "max_drafts": 3} | settings
    given = EngineConfig(
        model=str(folder), dtype="float32", device=DEVICE if fused else "cpu", threads=1,
        cache=CacheConfig(blocks=60), **settings,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "fused", lambda device: fused)
        patch.setattr(CudaRunner, "compile", lambda *given: None)
        patch.setattr(CudaRunner, "warm", lambda *given: None)
        return Engine(given, open_checkpoint(str(folder)), head=head)


def chains(engine: Engine, *submits: Submit, monkeypatch) -> tuple[dict, dict, int]:
    """What is answered, every chain that was drafted on the way, by request; cached tokens."""
    seen: dict[tuple[str, int], list[list[int]]] = {}
    take = Guessing.take

    def noted(self, seq, tokens):
        if tokens:
            seen.setdefault(seq.key, []).append(list(tokens))
        take(self, seq, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Guessing, "take", noted)
        run = Run(engine).put(*submits).drain()
    assert not run.failed and not run.refused
    return run.tokens, seen, max(out.cached for outs in run.outs.values() for out in outs)


def asks() -> list[Submit]:
    prompts = [list(range(5, 5 + n)) for n in (9, 64, 61, 100)]
    return [
        Submit(f"r{i}", ids, 6 + i, Sampling(temperature=(i % 2) * 0.8, seed=i))
        for i, ids in enumerate(prompts)
    ]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """An interpreter takes them one by one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "FULL", 8)


@pytest.mark.skipif(DEVICE == "cuda", reason="its heads lie on the CPU; see test_card_drafts.py")
@pytest.mark.parametrize("name", HEADS)
def test_chains_are_those_of_the_cpu(folder, name, monkeypatch):
    shape = config(head_dim=32, heads=4, kv_heads=2, **HEADS[name])
    device = torch.device(DEVICE)
    wanted = chains(
        make(folder, Eagle3(head_of(shape, 3, F32)), False), *asks(), monkeypatch=monkeypatch)
    head = head_of(shape, 3, F32)
    assert device.type == "cpu" or head.device.type == "cuda"
    engine = make(folder, CapturedEagle3(head, 512), True)
    found = chains(engine, *asks(), monkeypatch=monkeypatch)
    assert found[:2] == wanted[:2]
    assert sum(map(len, wanted[1].values())) > 15


@pytest.mark.parametrize("name", HEADS)
def test_a_head_on_a_gpu_has_each_weight_once_and_can_still_be_probed(name):
    """The projection that is laid out anew is not kept beside the old one."""
    shape = config(head_dim=32, heads=4, kv_heads=2, **HEADS[name])
    head = head_of(shape, 3, F32)
    old = weakref.ref(head.layers[0].mix.qkv.weight)
    count, noise = 9, torch.Generator().manual_seed(2)
    feature = torch.randn(count, shape.hidden, generator=noise).to(head.device)
    places = torch.arange(count, device=head.device)
    whole = Whole(shape, count, F32, head.device)
    wanted = head.run(feature, places, places, whole)
    for _ in range(2):
        draft = CapturedEagle3(head, 512)
        torch.testing.assert_close(head.run(feature, places, places, whole), wanted)
    assert draft._qkv is head.layers[0].mix.qkv and old() is None


@pytest.mark.skipif(DEVICE == "cuda", reason="its heads lie on the CPU; see test_card_drafts.py")
def test_a_cached_prefix_is_drafted_behind_as_if_it_had_been_computed(folder, monkeypatch):
    """The row that consumes the first token behind a hit is made of the feature that was kept."""
    shape = config(head_dim=32, heads=4, kv_heads=2, fc_norm=True)
    ids = [*range(3, 131), 7, 8]
    first = Submit("a", ids, 4, Sampling(temperature=0.0))
    second = Submit("b", [*ids[:128], 9, 10], 5, Sampling(temperature=0.0))
    engine = make(folder, CapturedEagle3(head_of(shape, 3, F32), 512), True)
    warm = [chains(engine, one, monkeypatch=monkeypatch) for one in (first, second)][1]
    cold = chains(
        make(folder, CapturedEagle3(head_of(shape, 3, F32), 512), True), second,
        monkeypatch=monkeypatch)
    assert (warm[2], cold[2]) == (128, 0)
    assert warm[:2] == cold[:2] and warm[1]


@pytest.mark.skipif(DEVICE == "cuda", reason="its heads lie on the CPU; see test_card_drafts.py")
@pytest.mark.parametrize("name", HEADS)
def test_a_row_that_is_made_anew_is_the_row_that_was(name):
    """Of several blocks at once, each by its own end; and nothing else in the pages moves."""
    shape = config(head_dim=32, heads=4, kv_heads=2, **HEADS[name])
    draft = CapturedEagle3(head_of(shape, 3, F32), 512)
    draft.reserve(6, 4, None, None)
    draft.prepare(12, 2)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=draft.head.device)

    noise = torch.Generator().manual_seed(5)
    kept = torch.randn(9, shape.fused, generator=noise).to(draft.head.device)
    tokens, blocks = ints(*range(40, 49)), (3, 1, 4)  # of positions 1 .. 9
    slots = ints(*(blocks[n // 4] * 4 + n % 4 for n in range(1, 10)))
    ends = ints(*(blocks[n // 4 - 1] if n % 4 == 0 else -1 for n in range(1, 10)))
    draft.extend(kept.chunk(len(shape.taps), dim=1), tokens, ints(*range(9)), slots, ends)
    wanted = draft.pages.clone()
    draft.pages[[1, 4], :, 0] = 7.0
    draft.join(ints(43, 47), ints(3, 7), ints(4, 16), ints(3, 1))
    torch.testing.assert_close(draft.pages, wanted, rtol=1e-5, atol=1e-5)
    assert wanted[[1, 4], :, 0].any(dim=-1).all()


@pytest.mark.parametrize("wrong", [0, 3])
def test_right_chains_are_taken_and_no_answer_changes(folder, wrong):
    """Also where a step without chains flies ahead of one that has some, and where one forks."""
    submits = [*asks(), Submit("n", [4, 5, 6], 9, Sampling(temperature=1.0, seed=9), n=2)]
    wanted = Run(make(folder, None, False)).put(*submits).drain().tokens
    texts = {one.sampling.seed: [*one.prompt, *wanted[one.id, 0]] for one in submits}
    engine = make(folder, KnowingChains(texts, wrong, DEVICE), True)
    lengths = itertools.cycle([3, FREE, 0, ASLEEP, FREE, HOST, 2, 1])
    for ahead in (engine.guessing.ahead, lambda *given: next(lengths)):
        engine.guessing.ahead = ahead
        assert Run(engine).put(*submits).drain().tokens == wanted
    matched, drafted = engine.guessing.accepted, engine.guessing.drafted
    assert (0 < matched < drafted) if wrong else matched > 25
    assert engine.pool.used == 0


@pytest.mark.skipif(DEVICE == "cuda", reason="its heads lie on the CPU")
def test_a_prompt_that_a_sleeping_head_reads_gives_the_rows_of_one_awake(folder):
    """Beside others that it sleeps through, behind a cached beginning, and in chunks."""
    rows, ends = [], []
    first = [*range(5, 85)]
    asked = [Submit("a", first, 12, Sampling(temperature=0.0)),
             Submit("b", [*range(90, 120)], 12, Sampling(temperature=0.0)),
             Submit("c", [*first[:70], *range(60, 160)], 4, Sampling(temperature=0.0))]
    for ahead in (FREE, ASLEEP):
        draft = CapturedEagle3(head_of(config(head_dim=32, heads=4, kv_heads=2), 3, F32), 512)
        engine = make(folder, draft, True)
        engine.guessing.ahead = lambda *given, ahead=ahead: ahead
        run, ids = Run(engine).put(*asked[:2]), list[int]()
        for step in range(60):
            if step == 6:
                run.put(asked[2])
            run.step()
            seq = next((one for one in engine.scheduler.running if one.submit.id == "c"), None)
            if seq is not None and seq.computed >= len(seq.submit.prompt):
                ids = [block.id for block in seq.blocks[:3]]
        assert seq is None and run.finish(("c", 0)) and run.outs["c", 0][-1].cached >= 64
        rows.append(draft.pages[ids].transpose(0, 1).flatten(1, 2)[:, 1 : len(asked[2].prompt)])
        ends.append(draft.last_features[ids[:2]].clone())
    torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)
    assert rows[0].any(dim=(2, 3)).all() and ends[0].any(dim=-1).all()
