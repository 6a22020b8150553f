"""Put an engine together: weights, model, pages, pool, grammar.  Runs no step.

The slow parts of a start share it: weights load while the grammar library builds its view of the
tokenizer and, on a GPU, while kernels are compiled for a model of the same shape.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING

import torch

from cache.blocks import BlockPool
from cache.pages import Pages
from cache.prefix import BLOCK
from cache.sessions import SessionTable
from engine.attention import BACKENDS
from engine.config import BadConfig, ResolvedConfig
from engine.device import pick
from engine.grammar.masks import Masks
from engine.grammar.matcher import Compiler
from engine.grammar.trial import Limits
from engine.memory import out_of_memory
from engine.messages import PROTOCOL, VERSION, Hello
from engine.model_config import BadCheckpoint
from engine.models import family
from engine.proposer import CapturedDraft
from engine.runner import Runner, StepRunner
from engine.threads import Threads, cores, read_usage, unseen
from engine.timeline import Timeline
from engine.weights import BadWeights, load

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.model_config import ModelConfig
    from engine.models import Model
    from engine.proposer import AnyDraft, HeadMaker

log = logging.getLogger("engine.build")

DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


MASKERS = 4  # threads that make masks, at most: more gained nothing (masks.py)
SWITCH_S = 0.0005  # how long a thread may keep Python's lock while others wait, in a GPU's start


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step needs, made once."""

    hello: Hello
    runner: StepRunner
    head: AnyDraft | None
    pool: BlockPool
    sessions: SessionTable
    compiler: Compiler
    masks: Masks
    threads: Threads


def build(
    config: ResolvedConfig,
    checkpoint: Checkpoint,
    head: AnyDraft | None = None,
    progress: Callable[[int, int], None] | None = None,
    timeline: Timeline | None = None,
    drafting: bool = False,
    maker: HeadMaker | None = None,
) -> Parts:
    """Load and allocate; raise BadConfig, BadWeights or MemoryError, with nothing left behind.

    `drafting`: rows will carry draft tokens, of a host proposer or of `head`, which `maker` makes
    when there is none.
    """
    config.check()
    timeline = timeline or Timeline()
    device = pick(config.device)
    shape = checkpoint.config
    max_len = _max_len(config, shape.max_len)
    dtype = DTYPES[config.dtype]
    if fused(device):
        with timeline.span("triton"):  # late: a CPU engine needs none
            from engine.cuda.parts import check
        check(shape, dtype)
    threads = _threads(config, device)
    kind = family(checkpoint.architecture)
    drafts = config.max_drafts if drafting else 0
    with _brisk(fused(device)), ThreadPoolExecutor(2) as side, _told() as given_up:
        compiler = side.submit(
            timeline.run, "grammar", Compiler, checkpoint.tokenizer_json, shape.vocab,
            checkpoint.stop_ids, config.compile_threads, _trials(config),
        )
        kernels = side.submit(
            _compile, kind, shape, config, max_len, dtype, device, drafts, maker, given_up,
            timeline,
        )
        if device.type == "cpu":
            _keep_freed_memory()
        weights = timeline.run(
            "weights", load, checkpoint, kind.expected(shape), dtype, progress, device)
        if maker is not None:
            head = timeline.run("draft", maker.open, shape, weights, max_len, dtype, device)
        model = _met(kind, shape, weights, max_len, head, maker, device, timeline)
        kernels.result()
        make = _gpu_runner if fused(device) else _cpu_runner
        runner = make(model, shape, config, max_len, dtype, device, head, drafts, timeline)
        grammar = compiler.result()
    pool = BlockPool(runner.blocks, BLOCK)
    return Parts(
        hello=_hello(config, checkpoint, runner, max_len, device),
        runner=runner,
        head=head,
        pool=pool,
        sessions=SessionTable(pool, config.cache),
        compiler=grammar,
        masks=Masks(shape.vocab, min(config.max_sequences * (drafts + 1), config.max_batch_tokens),
                    _maskers(device)),
        threads=threads,
    )


def _met(
    kind: type[Model], shape: ModelConfig, weights: dict[str, torch.Tensor], max_len: int,
    head: AnyDraft | None, maker: HeadMaker | None, device: torch.device, timeline: Timeline,
) -> Model:  # fmt: skip
    """The model; a head that `maker` made has looked at it."""
    if maker is not None and head is not None and fused(device):
        timeline.run("probe", _probed, kind, shape, weights, max_len, head, maker)
    model = timeline.run("model", _model, kind, shape, weights, max_len, head, device)
    if maker is not None and head is not None and not fused(device):
        timeline.run("probe", maker.meet, head, model, shape)
    return model


def _probed(
    kind: type[Model], shape: ModelConfig, weights: dict[str, torch.Tensor], max_len: int,
    head: AnyDraft, maker: HeadMaker,
) -> None:  # fmt: skip
    """Have a head that `maker` made look at the target, where there is memory for that."""
    try:
        # A model that kernels run has its rows in another order than plain torch wants.
        maker.meet(head, kind(shape, dict(weights), max_len, (), apart=True), shape)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        log.warning("the draft head was not tried on the model: the device has no memory left for "
                    "that beside the weights. It serves all the same; where few of its tokens are "
                    "accepted (vllm:spec_decode_num_accepted_tokens), give another head")


def _model(
    kind: type[Model], shape: ModelConfig, weights: dict[str, torch.Tensor], max_len: int,
    head: AnyDraft | None, device: torch.device,
) -> Model:  # fmt: skip
    return kind(shape, weights, max_len, head.taps if head is not None else (),
                paired=fused(device))  # fmt: skip


def _hello(
    config: ResolvedConfig, checkpoint: Checkpoint, runner: StepRunner, max_len: int,
    device: torch.device,
) -> Hello:  # fmt: skip
    """What the engine tells its gateways of itself."""
    usable = min(max_len, runner.blocks * BLOCK - runner.lookahead)
    return Hello(
        PROTOCOL, config.served_name or checkpoint.name, checkpoint.config.vocab, usable, BLOCK,
        runner.blocks, list(checkpoint.stop_ids), VERSION, config.max_sequences, device.type,
    )


def _trials(config: ResolvedConfig) -> Limits | None:
    if not config.compile_cpu_s:
        return None
    return Limits(config.compile_cpu_s, config.compile_memory_bytes)


def _maskers(device: torch.device) -> int:
    """Threads for masks: where a GPU computes, the host's cores have little else to do."""
    return max(1, min(MASKERS, len(cores()) // 2)) if fused(device) else 1


def _threads(config: ResolvedConfig, device: torch.device) -> Threads:
    """A GPU's step needs none: what the host copies is short, and torch's threads spin behind it.

    (Masks of 22 rows and more are copied by all of them: 16 threads kept 10 cores busy.)
    """
    if fused(device):
        return Threads(config.threads or 1, torch.set_num_threads, unseen)
    return Threads(config.threads or len(cores()), torch.set_num_threads, read_usage)


def fused(device: torch.device) -> bool:
    """Whether Triton's kernels run the step; in tests also on a CPU, by their interpreter."""
    return device.type == "cuda"


@contextmanager
def _brisk(wanted: bool) -> Iterator[None]:
    """Threads that need Python's lock for moments get it soon from those that compute in Python.

    Weights come in thousands of pieces, each of which takes the lock for microseconds.  Beside one
    thread that names kernels they took 9.7 s instead of 0.4 at Python's own 5 ms; 0.7 at 1.
    """
    before = sys.getswitchinterval()
    try:
        if wanted:
            sys.setswitchinterval(min(SWITCH_S, before))
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _told() -> Iterator[Event]:
    """An event that is set when the block raises, for those who work beside it."""
    given_up = Event()
    try:
        yield given_up
    except BaseException:
        given_up.set()
        raise


def _compile(
    kind: type[Model], shape: ModelConfig, config: ResolvedConfig, max_len: int,
    dtype: torch.dtype, device: torch.device, drafts: int, maker: HeadMaker | None,
    given_up: Event, timeline: Timeline,
) -> None:  # fmt: skip
    """Make a GPU's kernels ready for a model of this shape and its head; nothing elsewhere."""
    if device.type != "cuda":
        return
    from engine.cuda.parts import compile_kernels  # late: needs Triton

    with timeline.span("kernels"), suppress(torch.OutOfMemoryError):  # compiled at first use, then
        one = replace(shape, layers=1)  # the others launch the same
        # Not torch's "meta" device: joining two such tensors imports 900 modules of torch, 6 s of a
        # start on a machine whose Python has to compile them.
        weights = {
            name: torch.empty(size, dtype=dtype, device=device)
            for name, size in kind.expected(one).items()
        }
        head = None
        if maker is not None:
            with suppress(BadCheckpoint, BadWeights):  # said where it is loaded
                head = maker.open(shape, weights, max_len, dtype, device, blank=True)
        taps = head.taps if head is not None else ()
        compile_kernels(
            kind(one, weights, max_len, taps, paired=True), one, config, size=BLOCK,
            max_len=max_len, dtype=dtype, device=device, drafts=drafts, stop=given_up,
            head=head if isinstance(head, CapturedDraft) else None,
        )


def _cpu_runner(
    model: Model, shape: ModelConfig, config: ResolvedConfig, max_len: int, dtype: torch.dtype,
    device: torch.device, head: AnyDraft | None, drafts: int, timeline: Timeline,
) -> StepRunner:  # fmt: skip
    assert not isinstance(head, CapturedDraft), "such a draft runs on a GPU"
    each = Pages.bytes_per_block(shape.layers, BLOCK, shape.kv_heads, shape.head_dim, dtype)
    blocks = config.cache.pool_blocks(each)
    pages = Pages(shape.layers, blocks, BLOCK, shape.kv_heads, shape.head_dim, dtype, device)
    module, name = BACKENDS["cpu"].split(":")
    attention = getattr(import_module(module), name)(
        shape.heads, shape.kv_heads, shape.head_dim, BLOCK, dtype
    )
    return Runner(model, pages, attention, device, head, config.max_drafts)


def _gpu_runner(
    model: Model, shape: ModelConfig, config: ResolvedConfig, max_len: int, dtype: torch.dtype,
    device: torch.device, head: AnyDraft | None, drafts: int, timeline: Timeline,
) -> StepRunner:  # fmt: skip
    from engine.cuda.parts import sized_runner  # late: needs Triton, which a CPU engine does not

    runner = sized_runner(
        model, shape, config, size=BLOCK, max_len=max_len, dtype=dtype, device=device, head=head,
        drafts=drafts, timeline=timeline,
    )
    if device.type == "cuda":
        runner.warm(timeline)
    return runner


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees: else every step's buffers are mapped and faulted in anew.

    Measured on two cores, SmolLM2-135M: a decode step of 16 sequences 221 -> 85 ms on one thread, a
    chunk of 512 prompt tokens 665 -> 410 ms.  What is kept is bounded: one arena, and 128 of
    oneDNN's compiled shapes instead of 1,024, or every new prompt length adds half a megabyte.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # read at the first product
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # names of malloc.h
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(arena_max, 1)


def _max_len(config: ResolvedConfig, trained: int) -> int:
    if config.max_len is None:
        return trained
    if config.max_len > trained:
        raise BadConfig(
            f"max_len {config.max_len:,} is beyond the {trained:,} tokens this model was made for. "
            f"Start with --max-model-len {trained} or less."
        )
    return config.max_len
