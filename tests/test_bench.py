"""The benchmarks measure what they say, in miniature.  Judges no speed: the machine is shared."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

import slipstream
from engine.bench import decode, kv_values, parameters, prefill
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from gateway import bench, load
from gateway.poke import show_bench
from tests.tiny import write_llama


@pytest.mark.timed
@pytest.mark.parametrize("workers", [1, 2])
def test_the_gateways_rows_come_from_real_requests(workers):
    async def go() -> None:
        async with bench.served("--workers", str(workers), "--step-ms", "5") as server:
            assert len(server._pids) == (1 if workers == 1 else 1 + workers)
            rate = await load.many(server.port, 0.2, 2)
            assert 2 < rate < 2 * 1000 / (8 * 5) + 10  # 8 tokens at 5 ms each bound it
            times = await load.one_by_one(server.port, 0.2)
            assert min(times) > 7 * 0.005
            user, system = server.cpu_s()
            gaps, frames = await load.streams(server.port, 4, 30)
            assert 4 * 4 <= frames <= 4 * 34  # late ones merge; role, end, [DONE]
            assert len(gaps) <= 4 * 29
            assert load.percentile(gaps, 50) > 0.002
            user_after, system_after = server.cpu_s()
            assert user_after >= user and system_after >= system
            gaps, *costs = await bench._events(server, 20)
            assert len(gaps) > 19 * bench.STREAMS / 2 and all(cost < 1000 for cost in costs)
            assert max(await load.disconnects(server.port, 2)) < 2
            memory = server.resident()
            assert memory > 1e6
            async with load.idle(server.port, 50):
                assert server.resident() >= memory
    asyncio.run(go())


def test_a_refused_request_stops_a_measurement_instead_of_counting():
    async def go() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
        with pytest.raises(RuntimeError, match="429"):
            await load.answer(reader)
    asyncio.run(go())


def test_a_row_says_whether_its_target_was_met():
    assert bench.at_most("x", 2.0, "ms", 2)["beside"] == "target <= 2: met"
    assert bench.at_most("x", 2.1, "ms", 2)["beside"] == "target <= 2: missed"
    assert bench.at_least("x", 1.9, "ms", 2)["beside"] == "target >= 2: missed"


def test_percentiles_are_taken_from_the_sorted_values():
    values = [float(v) for v in range(100, 0, -1)]
    assert load.percentile(values, 50) == 51
    assert load.percentile(values, 99) == 100
    assert load.percentile([7.0], 99) == 7


def test_the_byte_tokenizer_spells_printable_letters_by_their_own_number():
    tokenizer = Tokenizer.from_str(bench.byte_tokenizer())
    assert tokenizer.encode("az~").ids == [97, 122, 126]
    assert tokenizer.get_vocab_size() == 259
    assert tokenizer.decode(tokenizer.encode("naïve 東").ids) == "naïve 東"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_decode_and_prefill_measure_a_tiny_model(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.bench.BATCHES", (1, 2))
    monkeypatch.setattr("engine.bench.LENGTHS", (64, 10_000))
    monkeypatch.setattr("engine.bench._bandwidth", lambda: 1e10)
    monkeypatch.setattr("engine.bench._flops", lambda dtype: 1e10)
    folder = str(write_llama(tmp_path / "model"))
    checkpoint = open_checkpoint(folder)
    config = EngineConfig(model=folder, device="cpu", dtype="float32", threads=1)
    rows = list(decode(config, checkpoint, 0.1))
    assert [row["what"] for row in rows[1::2]] == [
        "decode  1 sequences: step", "decode  2 sequences: step"
    ]
    for step, output in zip(rows[1::2], rows[2::2], strict=True):
        sequences = int(str(step["what"]).split()[1])
        assert output["value"] == pytest.approx(sequences * 1e3 / step["value"], rel=0.01)
    rows = list(prefill(config, checkpoint, 0.1))
    assert len(rows) == 2  # the prompt that is longer than the model's context is left out
    assert "of the arithmetic roof" in rows[1]["beside"]


def test_the_weights_that_a_token_reads_are_counted_as_torch_counts_them(tmp_path):
    from safetensors import safe_open

    folder = write_llama(tmp_path / "model")
    shape = open_checkpoint(str(folder)).config
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    assert parameters(shape) == sum(sizes.values()) - norms
    assert kv_values(shape) == 2 * shape.layers * shape.kv_heads * shape.head_dim


def test_a_run_adds_one_json_line_with_all_its_rows(tmp_path, capsys):
    rows = [bench.at_most("x", 1.0, "ms", 2), bench.at_most("y", 3.0, "ms", 2)]
    for _ in range(2):
        show_bench("gateway", iter(rows), tmp_path / "out")
    lines = (tmp_path / "out" / "gateway.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert [row["what"] for row in json.loads(lines[1])["rows"]] == ["x", "y"]
    assert "target <= 2: missed" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_bench_hands_what_was_asked_for_to_the_engines_benchmark(tmp_path):
    folder = write_llama(tmp_path / "model")
    said = CliRunner().invoke(slipstream.cli, [
        "bench", "decode", str(folder), "--device", "cpu", "--batches", "2,3", "--context", "9",
        "--seconds", "0.05", "--out", str(tmp_path),
    ])  # fmt: skip
    assert said.exit_code == 0, said.output
    assert "decode  2 sequences: step" in said.output and "decode  3" in said.output
    assert len((tmp_path / "decode.jsonl").read_text().splitlines()) == 1
