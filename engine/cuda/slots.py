"""Places of running sequences in the device's tables: block ids, sampling, newest token.

A place holds nothing that the host could not write again, so a sequence without a row may lose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.layout import ALIGN, Ints, Layout, Mirror
from engine.kernels.embed import UPDATES, update_table
from engine.kernels.sampler_tables import WORDS, SlotParams, SlotTables
from engine.messages import Sampling

if TYPE_CHECKING:
    from engine.cuda.graphs import Graphs
    from engine.plan import Row
    from engine.sequence import Sequence


COPIES = 4  # buffers of new table entries that may be on their way
_COLUMNS = np.arange(WORDS, dtype=np.int32)  # of a record


@dataclass(slots=True)
class Place:
    """Where a sequence is, and what of it the device knows."""

    slot: int
    life: int  # `preempted` of the sequence when it came: a later life has other blocks
    flags: int  # of its sampling, see kernels/sampler_tables.py
    least: int  # position before which min_tokens holds stop ids back
    known: int = 0  # block ids in the table


class Slots:
    """The map from sequences to slots; the slot after the last belongs to nobody."""

    def __init__(
        self, count: int, width: int, vocab: int, device: torch.device, graphs: Graphs
    ) -> None:
        """`width` is the most blocks of a sequence."""
        self.count, self._graphs = count, graphs
        self.tables = SlotTables.allocate(count, vocab, device)
        self.table = torch.zeros(count + 1, width, dtype=torch.int32, device=device)
        self.ids: Ints = np.zeros((count + 1, width), dtype=np.int32)  # the host's own `table`
        self.least: Ints = np.zeros(count + 1, dtype=np.int32)  # see Place
        self._params = SlotParams(self.tables)
        self._places: dict[Sequence, Place] = {}  # the one that came first is first
        self._free = list(range(count - 1, -1, -1))
        self._fresh: list[tuple[int, int, int]] = []  # (slot, index, block id) not sent yet
        # Most steps have few such, and few new sequences, whose records are table entries like any
        # other: a buffer that is there already takes both.
        layout = Layout({"blocks": (4, UPDATES), "records": (4, UPDATES)})
        self._mirror = Mirror(layout.words, COPIES, device)
        self._few = layout.device(self._mirror.buffer)
        self._hosts = self._mirror.hosts(layout)

    def placed(self, rows: list[Row]) -> list[Place]:
        """The place of each row's sequence, in order."""
        find, found = self._places.get, []
        for row in rows:
            seq = row.seq
            place = find(seq)
            if place is None or place.known < len(seq.blocks) or place.life != seq.preempted:
                place = self.place(seq)
            found.append(place)
        return found

    def place(self, seq: Sequence) -> Place:
        """The place of a sequence that is planned, made when it has none; note its new blocks."""
        place = self._places.get(seq)
        if place is None or place.life != seq.preempted:
            place = self._settle(seq, place)
        if place.known < len(seq.blocks):
            slot = place.slot
            for index in range(place.known, len(seq.blocks)):
                block = self.ids[slot, index] = seq.blocks[index].id
                self._fresh.append((slot, index, block))
            place.known = len(seq.blocks)
        return place

    def _settle(self, seq: Sequence, old: Place | None) -> Place:
        if old is not None:
            slot = old.slot
        else:
            slot = self._free.pop() if self._free else self._evicted()
        submit = seq.submit
        flags = self._params.write(
            slot, submit.sampling, submit.stop_ids, seq.index,
            submit.prompt, seq.tokens[len(submit.prompt) :],
        )  # fmt: skip
        least = self.least[slot] = seq.prompt_len + seq.sampling.min_tokens
        place = self._places[seq] = Place(slot, seq.preempted, flags, least)
        return place

    def _evicted(self) -> int:
        """The slot of a sequence that nothing in flight computes."""
        for seq, place in self._places.items():
            if not seq.flying:
                del self._places[seq]
                return place.slot
        raise AssertionError("more sequences in flight than slots")

    def forget(self, seq: Sequence) -> None:
        """Free its slot; what is in flight for it may still write there before anyone else does."""
        place = self._places.pop(seq, None)
        if place is not None:
            self._free.append(place.slot)

    def warm(self) -> None:
        """Compile and capture what `upload` needs, on the slot that belongs to nobody."""
        for records, blocks in ((True, True), (True, False), (False, True)):
            if records:
                self._params.write(self.count, Sampling(), [], 0, [], [])
            if blocks:
                self._fresh.append((self.count, 0, 0))
            self.upload()

    def upload(self) -> None:
        """Send what `place` noted to the device, in stream order."""
        fresh, records = self._fresh, self._params.records
        device, count = self.table.device, len(fresh)
        if fresh or records:
            if len(records) * WORDS <= UPDATES and count <= UPDATES:
                self._upload_few(fresh, records)
                self._fresh = []
                records.clear()
        elif not self._params.staged:
            return
        self._params.upload()
        if not self._fresh:
            return
        # Every row begins where 16 bytes do: another alignment would be another kernel to compile.
        width = -(-count // ALIGN) * ALIGN
        packed = torch.zeros(4, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        packed[:3, :count] = torch.tensor([*zip(*fresh, strict=True)], dtype=torch.int32)
        packed[3, 0] = count
        sent: Tensor = packed.to(device, non_blocking=True)
        update_table(self.table, sent[0], sent[1], sent[2], sent[3])
        self._fresh = []  # only now: a transfer that failed is made again

    def _upload_few(
        self, fresh: list[tuple[int, int, int]], records: Mapping[int, NDArray[np.int32]]
    ) -> None:
        """Send block ids and records in one copy."""
        number = self._mirror.next()
        host = self._hosts[number]
        host["blocks"][:3, : len(fresh)] = [*zip(*fresh, strict=True)] if fresh else 0
        host["blocks"][3, 0] = len(fresh)
        words = len(records) * WORDS
        if words:
            rows, end = host["records"], 0
            for slot, record in records.items():  # mostly one
                begin, end = end, end + WORDS
                rows[0, begin:end], rows[1, begin:end], rows[2, begin:end] = slot, _COLUMNS, record
            rows[3, 0] = words
        self._mirror.send(number, (8 if words else 4) * UPDATES)
        what = bool(fresh), bool(words)
        self._graphs.run(("slots", *what), self._update(*what))  # quicker than to launch kernels

    def _update(self, blocks: bool, records: bool) -> Callable[[], None]:
        """Write what `_upload_few` sent where it belongs."""

        def body() -> None:
            if blocks:
                update_table(self.table, *self._few["blocks"])
            if records:
                update_table(self.tables.records, *self._few["records"])

        return body
