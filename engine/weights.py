"""Load a checkpoint's tensors under Hugging Face names.  Decides nothing about the model's shape.

Names and shapes of all tensors are checked before the first is read; then each is read, dequantised
and cast on its own, so memory beyond the result is a few megabytes a thread.  On a GPU, safetensors
go there in pieces (engine/pinned.py) and the host never holds a whole tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine import pinned
from engine.checkpoint import BadCheckpoint, Checkpoint, ModelConfig
from engine.gguf_config import ROPE_TABLE
from engine.gguf_file import GgufFile, GgufTensor, read_gguf

TARGETS = (torch.bfloat16, torch.float32, torch.float64)
STORED = {  # safetensors types we read
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}
CHUNK = 1 << 18  # weights dequantised at a time: 1 MiB in fp32 stays in a core's cache
THREADS = 4
CPU = torch.device("cpu")
# Written by other software though they follow from the config; an untied model expects its head.
HARMLESS = ("rotary_emb.inv_freq", "lm_head.weight")

GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class BadWeights(BadCheckpoint):
    """The tensors are not those of the model, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in its file, not yet read."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]
    size: int  # bytes in the file
    file: str  # for messages
    read: Callable[[torch.dtype], Tensor]  # to the CPU
    place: Place | None = None  # where its values lie as they are; None = they must be made


@dataclass(frozen=True, slots=True)
class Place:
    """Values in a file."""

    file: Path
    offset: int  # bytes from the start of the file
    dtype: torch.dtype


def load(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    device: torch.device = CPU,
) -> dict[str, Tensor]:
    """Exactly the `expected` tensors (name -> shape) in `dtype`, contiguous on `device`.

    `progress(done, total)`, in bytes of the files, is called on this thread after each tensor, or
    after each piece on its way to a GPU.
    Values are those stored, rounded once; GGUF blocks are widened to fp32 first and rows of q and k
    put back in Hugging Face order.  Raises BadWeights naming the tensor and both shapes, or the
    file.
    """
    if dtype not in TARGETS:
        raise BadWeights(
            f"Weights cannot be loaded as {dtype}; bfloat16, float32 and float64 are possible. "
            "float16 is left out on purpose: activations of these models pass its largest value, "
            "65,504. Use bfloat16.")
    with ExitStack() as files:
        if checkpoint.kind == "gguf":
            found = _by_name(_in_gguf(checkpoint))
        else:
            found = _by_name(_in_safetensors(checkpoint, files))
        _compare(found, expected)
        wanted = [found[name] for name in expected]
        try:
            if device.type == "cpu" or checkpoint.kind == "gguf":
                return _read(wanted, dtype, progress, device)
            return _streamed(wanted, dtype, progress, device)
        except torch.OutOfMemoryError as error:
            size = sum(math.prod(shape) for shape in expected.values()) * dtype.itemsize
            raise MemoryError(
                f"The weights need {size / 2**30:,.1f} GiB on {device}, which cannot be had. Free "
                "the GPU (nvidia-smi shows who uses it), or choose a smaller model.") from error


def _streamed(
    wanted: list[Stored], dtype: torch.dtype, progress: Callable[[int, int], None] | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Through pinned buffers to a GPU."""
    tensors = {stored.name: torch.empty(stored.shape, dtype=dtype, device=device)
               for stored in wanted}
    torch.cuda.synchronize(device)  # the lanes' streams do not wait for what used that memory
    try:
        stream(wanted, tensors, lambda size: pinned.CudaLane(size, device), progress)
    finally:
        if hasattr(torch.accelerator, "empty_host_cache"):  # newer than the oldest torch we run on
            torch.accelerator.empty_host_cache()  # half a gigabyte of pinned buffers
    return tensors


def stream(
    wanted: list[Stored],
    tensors: Mapping[str, Tensor],
    lane: Callable[[int], pinned.Lane],
    progress: Callable[[int, int], None] | None = None,
    readers: int = pinned.READERS,
    piece: int = 0,
) -> None:
    """Fill `tensors` from the files through the lanes of several readers; see pinned.read."""
    total, finished = sum(stored.size for stored in wanted), 0

    def done(size: int) -> None:
        nonlocal finished
        finished += size
        if progress is not None:
            progress(finished, total)

    sources = []
    for stored in wanted:
        assert stored.place is not None, f"{stored.name} must be made, not copied"
        sources.append(pinned.Source(stored.name, stored.place.file, stored.place.offset,
                                     stored.place.dtype, tensors[stored.name]))
    try:
        pinned.read(sources, lane, done, min(readers, os.cpu_count() or 1), piece)
    except pinned.ReadFailed as error:
        raise BadWeights(f"{error.source.name} cannot be read from {error.source.file.name}. "
                         "Download the file again.") from error


def _read(
    wanted: list[Stored], dtype: torch.dtype, progress: Callable[[int, int], None] | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Read on a few threads, largest first so that no thread ends on a long one alone."""
    total, done = sum(stored.size for stored in wanted), 0
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        queue = {pool.submit(_moved, stored.read, dtype, device): stored
                 for stored in sorted(wanted, key=lambda stored: -stored.size)}
        try:
            for future in as_completed(queue):
                stored = queue[future]
                tensors[stored.name] = future.result()
                done += stored.size
                if progress is not None:
                    progress(done, total)
        except (SafetensorError, OSError, ValueError) as error:
            raise BadWeights(f"{stored.name} cannot be read from {stored.file}. "
                             "Download the file again.") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return {stored.name: tensors[stored.name] for stored in wanted}


def _moved(
    read: Callable[[torch.dtype], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Moved by the thread that read it: finished tensors must not pile up on the host."""
    return read(dtype).to(device)


def _by_name(listed: Iterator[Stored]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for stored in listed:
        if other := found.get(stored.name):
            raise BadWeights(f"{stored.name} is in {other.file} and again in {stored.file}. "
                             "Remove one of the files.")
        found[stored.name] = stored
    return found


def _compare(found: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse missing, mis-shaped and left-over tensors, by name."""
    for name, shape in expected.items():
        stored = found.get(name)
        if stored is None:
            raise BadWeights(f"The model needs {name} of shape {shape}; the files have none. "
                             "Download the missing files, or choose another model.")
        if stored.shape != shape:
            raise BadWeights(f"{name} in {stored.file} has the shape {stored.shape}; the model's "
                             f"config needs {shape}. One of the two is of another model.")
    extra = [name for name in found if name not in expected and not name.endswith(HARMLESS)]
    if extra:
        stored = found[extra[0]]
        raise BadWeights(f"{stored.file} has {stored.name} of shape {stored.shape}, which this "
                         f"model does not use ({len(extra)} such tensors). Its config is of "
                         "another model.")


def _in_safetensors(checkpoint: Checkpoint, files: ExitStack) -> Iterator[Stored]:
    """Every tensor of every shard; the shards stay open until `files` closes."""
    for path in checkpoint.files:
        try:
            shard = files.enter_context(safe_open(path, framework="pt", device="cpu"))
            entries = [(name, shard.get_slice(name)) for name in shard.keys()]
            shapes = {name: (tuple(entry.get_shape()), entry.get_dtype())
                      for name, entry in entries}
        except (SafetensorError, OSError, ValueError) as error:
            raise BadWeights(f"{path.name} is not a sound safetensors file. "
                             "Download it again.") from error
        starts = _starts(path)
        for name, (shape, kind) in shapes.items():
            if kind not in STORED:
                raise BadWeights(f"{name} in {path.name} is stored as {kind}; "
                                 f"{', '.join(STORED)} are read. Choose the unquantised model.")
            dtype = STORED[kind]
            yield Stored(name, shape, math.prod(shape) * dtype.itemsize, path.name,
                         partial(_copied, shard.get_tensor, name), Place(path, starts[name], dtype))


def _starts(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a file whose header the library has found sound.

    A safetensors file is a little-endian u64, a JSON header of that many bytes, and the data that
    the header's offsets count from; the library itself gives only whole tensors.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        return {name: 8 + length + entry["data_offsets"][0]
                for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadWeights(f"{path.name} changed while it was read. Start again.") from error


def _copied(read: Callable[[str], Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A copy in our own memory: a view of the mapped file would die with the file."""
    return read(name).to(dtype, copy=True).contiguous()


def _in_gguf(checkpoint: Checkpoint) -> Iterator[Stored]:
    """Every tensor of the file but the rotary table, which is in the config already."""
    parsed = read_gguf(checkpoint.files[0])
    for tensor in parsed.tensors.values():
        if tensor.name != ROPE_TABLE:
            yield Stored(
                _huggingface_name(tensor.name, parsed), tensor.shape, tensor.size,
                parsed.path.name, partial(_dequantised, parsed, tensor, checkpoint.config))


def _huggingface_name(name: str, parsed: GgufFile) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, part, ending] if part in GGUF_LAYER_NAMES:
            return f"model.layers.{layer}.{GGUF_LAYER_NAMES[part]}.{ending}"
        case [part, ending] if part in GGUF_NAMES:
            return f"{GGUF_NAMES[part]}.{ending}"
    raise BadWeights(f"{parsed.path.name} has the tensor {name!r:.80}, which no Llama model has. "
                     "Choose another file.")


def _dequantised(
    parsed: GgufFile, tensor: GgufTensor, config: ModelConfig, dtype: torch.dtype
) -> Tensor:
    """One tensor's blocks as weights, a chunk at a time; the file is mapped only for that long."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    raw = np.memmap(parsed.path, np.uint8, "r", tensor.offset, tensor.size)
    weights = torch.empty(math.prod(tensor.shape), dtype=dtype)
    step = max(1, CHUNK // per_block)
    with np.errstate(all="ignore"):  # a damaged scale may overflow; that is no crash
        for start in range(0, tensor.size // block_bytes, step):
            blocks = np.array(raw[start * block_bytes : (start + step) * block_bytes])
            values = _weights_of(blocks.reshape(1, -1), tensor)
            weights[start * per_block : start * per_block + values.numel()] = values
    part = tensor.name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        heads = config.heads if part == "attn_q" else config.kv_heads
        return _halves(weights.view(tensor.shape), heads)
    return weights.view(tensor.shape)


def _weights_of(blocks: npt.NDArray[np.uint8], tensor: GgufTensor) -> Tensor:
    try:
        return torch.from_numpy(gguf.dequantize(blocks, tensor.kind).reshape(-1))
    except NotImplementedError:
        raise BadWeights(f"{tensor.name} is stored as {tensor.kind.name}, which cannot be "
                         "dequantised. Choose another quantisation of the model.") from None


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order of q or k: its row 2i+j of a head is row j * head_dim/2 + i of ours.

    ggml's llama rotates neighbouring rows, Hugging Face's the two halves of a head.
    """
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
