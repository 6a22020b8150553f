"""Slots of sequences in the GPU's tables: places, block ids, evictions.  Runs no model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from engine.cuda import slots as cuda_slots  # noqa: E402
from engine.cuda.graphs import Graphs  # noqa: E402
from engine.cuda.slots import Slots  # noqa: E402
from engine.kernels import sampler_tables  # noqa: E402
from engine.kernels.embed import UPDATES  # noqa: E402
from engine.kernels.sampler_tables import WORDS, SlotParams, SlotTables  # noqa: E402
from engine.messages import Sampling, Submit  # noqa: E402
from engine.sequence import Sequence  # noqa: E402

VOCAB = 259
GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.7, repetition=1.3, frequency=0.4, presence=0.3, seed=13)


def sequence(name: str, blocks: list[int], sampling: Sampling = GREEDY) -> Sequence:
    submit = Submit(name, [1, 2, 3], 50, sampling)
    seq = Sequence(submit, 0, b"", 0.0, [1, 2, 3], 0.0)
    seq.blocks = [SimpleNamespace(id=block) for block in blocks]
    return seq


@dataclass
class Table:
    """Slots, and a way to read one's block ids."""

    slots: Slots = field(
        default_factory=lambda: Slots(3, 8, VOCAB, torch.device(DEVICE), Graphs(False)))

    def put(self, seq: Sequence) -> list[int]:
        """Place and upload; the ids that the device now has for it."""
        place = self.slots.place(seq)
        self.slots.upload()
        return self.slots.table[place.slot, : len(seq.blocks)].tolist()


def test_a_placed_sequence_has_its_blocks_and_its_growth_on_the_device():
    table, seq = Table(), sequence("a", [5, 9])
    assert table.put(seq) == [5, 9]
    slot = table.slots.place(seq).slot
    table.slots.table[slot, 0] = 77  # what is known already is not sent again
    seq.blocks.append(SimpleNamespace(id=30))
    assert table.put(seq) == [77, 9, 30]
    assert table.slots.place(seq).slot == slot


def test_a_life_after_preemption_has_other_blocks_in_the_same_slot():
    table, seq = Table(), sequence("a", [5, 9, 12], PENALISED)
    table.put(seq)
    slot = table.slots.place(seq).slot
    seq.preempted, seq.blocks = 1, [SimpleNamespace(id=b) for b in (21, 22)]
    seq.tokens += [8, 8]
    assert table.put(seq) == [21, 22]
    assert table.slots.place(seq).slot == slot
    history = table.slots.tables.history[slot]
    assert history[[1, 2, 3, 8]].tolist() == [1, 1, 1, 4], "prompt bit, and twice its count"


def test_slots_are_taken_from_whoever_used_none_longest_and_does_not_fly():
    table = Table()
    seqs = [sequence(name, [i + 1]) for i, name in enumerate("abcd")]
    for seq in seqs[:3]:
        table.put(seq)
    seqs[0].flying = 1
    taken = table.slots.place(seqs[1]).slot
    assert table.put(seqs[3]) == [4]
    assert table.slots.place(seqs[3]).slot == taken, "the first in line flies"
    seqs[2].flying = seqs[3].flying = 1
    with pytest.raises(AssertionError, match="more sequences in flight than slots"):
        table.slots.place(seqs[1])
    table.slots.forget(seqs[2])
    assert table.put(seqs[1]) == [2]
    table.slots.forget(sequence("unknown", []))
    assert len({table.slots.place(seqs[i]).slot for i in (0, 1, 3)}) == 3


def test_however_many_blocks_are_new_one_compiled_kernel_writes_them(monkeypatch):
    """Triton compiles anew for every alignment, in the middle of everybody's stream."""
    addresses, update = [], cuda_slots.update_table

    def watched(table, *given):
        addresses.extend(tensor.data_ptr() for tensor in given)
        update(table, *given)

    monkeypatch.setattr(cuda_slots, "update_table", watched)
    table, seq = Table(), sequence("a", [])
    for count in (1, 3, 6, 8):
        seq.blocks = [SimpleNamespace(id=10 + i) for i in range(count)]
        assert table.put(seq) == [10 + i for i in range(count)]
    assert len(addresses) == 4 * 4 + 4  # block ids, and once a record
    assert all(address % 16 == 0 for address in addresses)


@pytest.mark.parametrize("count", [1, 3, UPDATES // WORDS, UPDATES // WORDS + 1])
def test_records_of_few_or_many_new_sequences_are_the_same(count):
    """Few lie in the buffer of the block ids, more go by themselves."""
    draws = [Sampling(temperature=0.1 * i, seed=i, top_k=i, min_tokens=i % 2, bias=((3, 1.5),))
             for i in range(count)]
    seqs = [sequence(f"s{i}", [i + 1], draw) for i, draw in enumerate(draws)]
    slots = Slots(count, 8, VOCAB, torch.device(DEVICE), Graphs(False))
    wanted = SlotTables.allocate(count, VOCAB, DEVICE)
    apart = SlotParams(wanted)
    for seq in seqs:
        place = slots.place(seq)
        apart.write(place.slot, seq.sampling, seq.submit.stop_ids, 0, seq.submit.prompt, [])
    slots.upload()
    apart.upload()
    assert torch.equal(slots.tables.records, wanted.records)
    assert torch.equal(slots.tables.bias_ids, wanted.bias_ids)
    assert [slots.table[slots.place(seq).slot, 0] for seq in seqs] == [i + 1 for i in range(count)]
    before = slots.tables.records.clone()
    slots.tables.records.zero_()
    slots.upload()  # nothing is new: nothing is sent
    assert before.any() and not slots.tables.records.any()


def test_a_bias_that_found_no_memory_is_sent_with_the_next_step(monkeypatch):
    sampling = Sampling(temperature=0.5, bias=((3, 1.5),), frequency=0.3)
    seq = sequence("a", [1], sampling)
    seq.tokens.append(9)
    slots = Slots(2, 8, VOCAB, torch.device(DEVICE), Graphs(False))
    slot = slots.place(seq).slot
    sent, failing = sampler_tables._sent, [True]

    def short(array, device):
        if failing:
            raise torch.OutOfMemoryError
        return sent(array, device)

    monkeypatch.setattr(sampler_tables, "_sent", short)
    with pytest.raises(torch.OutOfMemoryError):
        slots.upload()
    failing.clear()
    slots.upload()
    assert slots.tables.bias_ids[slot, 0] == 3 and slots.tables.bias_values[slot, 0] == 1.5
    assert slots.tables.history[slot, [1, 9]].tolist() == [1, 2]
    assert slots.table[slot, 0] == 1 and slots.tables.records[slot].any()


def test_many_blocks_of_few_sequences_go_another_way():
    slots = Slots(4, UPDATES, VOCAB, torch.device(DEVICE), Graphs(False))
    seqs = [sequence(f"s{i}", [UPDATES * i + j for j in range(UPDATES - 1)]) for i in range(3)]
    for seq in seqs:
        slots.place(seq)
    slots.upload()
    for seq in seqs:
        slot = slots.place(seq).slot
        assert slots.table[slot, : UPDATES - 1].tolist() == [block.id for block in seq.blocks]
        assert slots.tables.records[slot].any()
    late = sequence("late", [])
    slot = slots.place(late).slot
    before = slots.table.clone()
    slots.upload()  # a record alone: no block id of a step before is written again
    assert slots.tables.records[slot].any() and torch.equal(slots.table, before)
