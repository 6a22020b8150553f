"""Reading GGUF: shape, tokenizer, damage and hostile headers.  Loads no weights."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.checkpoint import BadCheckpoint, Checkpoint, RopeScaling, open_checkpoint
from engine.gguf_file import read_gguf
from tests.scripted import BOS, EOS
from tests.tiny import CHATML, write_llama
from tests.tiny_gguf import VOCAB, write_gguf


def refusal(path: Path) -> str:
    """The message with which a file is refused."""
    with pytest.raises(BadCheckpoint) as caught:
        open_checkpoint(str(path))
    return str(caught.value)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(write_llama(tmp_path / "hf", layers=1, vocab=VOCAB), tmp_path / "m.gguf")


def test_a_gguf_gives_the_same_shape_as_the_folder_it_was_made_from(tmp_path):
    folder = write_llama(tmp_path / "hf", vocab=VOCAB, head_dim=24, tied=False, rope_theta=12345.5,
                         attention_bias=True, mlp_bias=True)
    opened = open_checkpoint(str(write_gguf(folder, tmp_path / "m.gguf")))
    assert opened.config == open_checkpoint(str(folder)).config
    assert (opened.stop_ids, opened.bos_id, opened.add_bos) == ([EOS], BOS, False)
    assert (opened.chat_template, opened.kind) == (CHATML, "gguf")


def test_the_rebuilt_tokenizer_merges_splits_digits_and_keeps_control_tokens_whole(tiny_gguf):
    tokenizer = Tokenizer.from_str(open_checkpoint(str(tiny_gguf)).tokenizer_json)
    assert tokenizer.encode("the the", add_special_tokens=False).ids == [260, 261]
    assert tokenizer.encode("<|im_start|>12").ids == [BOS, ord("1"), ord("2")]
    text = "naïve 日本語 🙂\n\t  x"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([EOS], skip_special_tokens=True) == ""


@pytest.mark.parametrize(("pre", "parts"), [
    ("gpt-2", ["abc", "Ġ1234"]),
    ("default", ["abc", "Ġ1234"]),
    ("smollm", ["abc", "Ġ", "1", "2", "3", "4"]),
    ("llama-bpe", ["abc", "Ġ", "123", "4"]),
    ("qwen2", ["abc", "Ġ", "1", "2", "3", "4"]),
])
def test_each_pre_tokenizer_splits_numbers_its_own_way(tmp_path, pre, parts):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB)
    opened = open_checkpoint(str(write_gguf(folder, tmp_path / "m.gguf", pre=pre)))
    tokenizer = Tokenizer.from_str(opened.tokenizer_json)
    assert [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("abc 1234")] == parts
    split = tokenizer.encode("e\u0301")
    assert tokenizer.decode(split.ids) == ("\u00e9" if pre == "qwen2" else "e\u0301")


def test_byte_tokens_decode_to_their_byte_and_user_tokens_are_not_special(tmp_path):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB + 2)
    plain = read_gguf(write_gguf(folder, tmp_path / "plain.gguf"))
    tokens = [*plain.values["tokenizer.ggml.tokens"], "<0x0A>", "<tool_call>"]
    types = [*plain.values["tokenizer.ggml.token_type"].tolist(), 6, 4]
    path = write_gguf(folder, tmp_path / "m.gguf", keys={
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    tokenizer = Tokenizer.from_str(open_checkpoint(str(path)).tokenizer_json)
    assert tokenizer.decode([65, VOCAB, 66]) == "A\nB"
    assert tokenizer.encode("a<tool_call>").ids == [97, VOCAB + 1]
    assert not any(token.normalized for token in tokenizer.get_added_tokens_decoder().values())
    assert tokenizer.decode([VOCAB + 1], skip_special_tokens=True) == "<tool_call>"


def test_only_llama_bpe_takes_a_whole_word_that_no_merge_makes(tmp_path):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB + 1)
    plain = read_gguf(write_gguf(folder, tmp_path / "plain.gguf"))
    longer = {
        "tokenizer.ggml.tokens": [*plain.values["tokenizer.ggml.tokens"], "xyz"],
        "tokenizer.ggml.token_type": [*plain.values["tokenizer.ggml.token_type"].tolist(), 1],
    }
    for pre, ids in (("llama-bpe", [VOCAB]), ("smollm", [ord(letter) for letter in "xyz"])):
        path = write_gguf(folder, tmp_path / f"{pre}.gguf", pre=pre, keys=longer)
        tokenizer = Tokenizer.from_str(open_checkpoint(str(path)).tokenizer_json)
        assert tokenizer.encode("xyz").ids == ids, pre


def test_llama_bpe_files_without_the_key_start_plain_prompts_with_bos(tmp_path):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB)
    path = write_gguf(folder, tmp_path / "m.gguf", pre="llama-bpe",
                      keys={"tokenizer.ggml.add_bos_token": None})
    assert open_checkpoint(str(path)).add_bos


@pytest.mark.parametrize(("keys", "said"), [
    ({"general.architecture": "qwen2"}, "qwen2"),
    ({"llama.expert_count": 8}, "experts"),
    ({"split.count": 3}, "one of 3 parts"),
    ({"tokenizer.ggml.tokens": [str(i) for i in range(VOCAB + 1)]}, "tokens for 262 rows"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
    ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "factor"),
    ({"llama.block_count": None}, "llama.block_count"),
    ({"llama.block_count": "30"}, "llama.block_count"),
    ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv"),
    ({"tokenizer.ggml.model": "llama"}, "safetensors folder"),
    ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
    ({"tokenizer.ggml.tokens": ["a", "a"]}, "differ"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.token_type": [1]}, "token_type"),
    ({"tokenizer.ggml.merges": ["th"]}, "merge"),
    ({"tokenizer.ggml.eos_token_id": 100_000}, "eos_token_id"),
    ({"general.alignment": 3}, "alignment"),
])
def test_a_gguf_that_we_would_read_wrongly_is_refused_by_name(tmp_path, keys, said):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB)
    assert said in refusal(write_gguf(folder, tmp_path / "m.gguf", keys=keys))


def test_linear_scaling_in_a_gguf_is_read(tmp_path):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB)
    path = write_gguf(folder, tmp_path / "m.gguf", keys={
        "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert open_checkpoint(str(path)).config.rope_scaling == RopeScaling("linear", 4.0)


def test_llama3_scaling_is_recognised_by_its_table_and_any_other_table_refused(tmp_path):
    folder = write_llama(tmp_path / "hf", layers=1, vocab=VOCAB, head_dim=16)
    # Divisors of Llama 3.1 for head_dim 16 and theta 10,000, from its published rule, by hand:
    # wavelengths 2 pi 10^(i/2); kept below 8192 / 4, divided by 8 above 8192, a ramp between.
    table = np.ones(8)
    for i in range(8):
        wave = 2 * np.pi * 10.0 ** (i / 2)
        if wave > 8192:
            table[i] = 8.0
        elif wave > 2048:
            blend = (8192 / wave - 1) / 3
            table[i] = 1 / ((1 - blend) / 8 + blend)
    assert 1 < table[6] < 8 == table[7]
    path = write_gguf(folder, tmp_path / "m.gguf", tables={"rope_freqs.weight": table})
    assert open_checkpoint(str(path)).config.rope_scaling == RopeScaling("llama3", 8.0)
    table[0] = 3.0
    path = write_gguf(folder, tmp_path / "n.gguf", tables={"rope_freqs.weight": table})
    assert "rope_freqs" in refusal(path)


def crafted(*, version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(dimensions: int) -> bytes:
    """A tensor table of one F32 tensor `t` of 2^62 by 2^62."""
    shape = struct.pack("<IQQ", dimensions, 1 << 62, 1 << 62)
    return struct.pack("<Q", 1) + b"t" + shape + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(("file", "said"), [
    (b"", "0 bytes"),
    (b"PK\x03\x04" + b"\0" * 40, "not with GGUF"),
    (crafted(version=1), "version 1"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (crafted(keys=1 << 60), "keys"),
    (crafted(tensors=1 << 60), "tensors"),
    (crafted(keys=1, body=struct.pack("<Q", 1 << 62) + b"\0" * 16), "limit"),
    (crafted(keys=1, body=key(b"a", 8, struct.pack("<Q", 1 << 62))), "bytes"),
    (crafted(keys=1, body=key(b"a", 9, struct.pack("<IQ", 4, 1 << 20))), "elements"),
    (crafted(keys=1, body=key(b"a", 9, struct.pack("<IQ", 4, 1 << 40))), "limit"),
    (crafted(keys=1, body=key(b"a", 9, struct.pack("<IQ", 9, 1))), "type 9"),
    (crafted(keys=1, body=key(b"a", 9, struct.pack("<IQQ", 8, 1, 99))), "passes its end"),
    (crafted(keys=1, body=key(b"a", 77, b"1234")), "type 77"),
    (crafted(keys=1, body=key(b"\xff", 7, b"1") + b"\0" * 8), "UTF-8"),
    (crafted(keys=2, body=key(b"a", 7, b"\1") * 2), "twice"),
    (crafted(tensors=1, body=tensor(2)), "cut short"),
    (crafted(tensors=1, body=tensor(9)), "dimensions"),
])
def test_a_hostile_gguf_header_is_refused_without_a_large_allocation(tmp_path, file, said):
    (tmp_path / "m.gguf").write_bytes(file)
    assert said in refusal(tmp_path / "m.gguf")


def test_damage_anywhere_in_the_metadata_is_our_error_or_no_harm(tmp_path, tiny_gguf):
    whole = tiny_gguf.read_bytes()
    metadata = read_gguf(tiny_gguf).data_start
    chance = random.Random(11)
    path, refused = tmp_path / "damaged.gguf", 0
    for turn in range(200):
        damaged = bytearray(whole)
        if turn % 4 == 0:
            del damaged[chance.randrange(len(whole)):]
        else:
            damaged[chance.randrange(metadata)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            Tokenizer.from_str(open_checkpoint(str(path)).tokenizer_json)
        except BadCheckpoint:
            refused += 1
    assert refused > 50


def test_every_truncation_of_a_gguf_is_refused(tmp_path, tiny_gguf):
    whole = tiny_gguf.read_bytes()
    for length in random.Random(5).sample(range(len(whole) - 32), 50):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        assert "cut.gguf" in refusal(tmp_path / "cut.gguf")


# ---- the real model ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.mark.model
def test_smollm2_has_the_published_shape(smollm2):
    config = smollm2.config
    assert (config.vocab, config.hidden, config.layers, config.heads) == (49152, 576, 30, 9)
    assert (config.kv_heads, config.head_dim, config.intermediate) == (3, 64, 1536)
    assert (config.max_len, config.rope_theta, config.rms_eps) == (8192, 100000.0, 1e-5)
    assert (config.tied, config.rope_scaling) == (True, None)
    assert (smollm2.stop_ids, smollm2.bos_id, smollm2.add_bos) == ([2], 1, False)
    assert "You are a helpful AI assistant named SmolLM" in smollm2.chat_template


@pytest.mark.model
@pytest.mark.parametrize(("text", "ids"), [
    ("Hello world", [19556, 905]),
    ("In 2024", [788, 216, 34, 32, 34, 36]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("don't we'll", [12420, 982, 392, 3060]),
])
def test_smollm2_tokenizes_as_published(smollm2, text, ids):
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.encode(text).ids == ids


@pytest.mark.model
@pytest.mark.parametrize("text", [
    "naïve café 日本語 🙂", "  two  spaces\n\n\tdone", "\r\n\x00\x7f", "e\u0301",
])
def test_smollm2_text_comes_back_from_its_ids(smollm2, text):
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_all_types_of_the_gguf_library_have_known_block_sizes():
    assert set(gguf.GGMLQuantizationType) == set(gguf.GGML_QUANT_SIZES)
