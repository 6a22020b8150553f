"""A device draft that knows what will be answered, as launches on a GPU.  Learns nothing."""

from __future__ import annotations

import torch

from engine.kernels.sampler_tables import SEED


class KnowingChains:
    """engine.proposer.CapturedDraft: chains out of a table by the request's seed, some wrong."""

    source = "eagle3"
    taps = (-1, 1)
    shape = "knowing"

    def __init__(self, texts: dict[int, list[int]], wrong: int, device: str) -> None:
        """`texts`: prompt and answer by seed; every `wrong`th position has another token, 0 = none.
        """
        width = max(map(len, texts.values())) + 32
        table = torch.zeros(max(texts) + 1, width, dtype=torch.int32)
        for seed, ids in texts.items():
            table[seed, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        if wrong:
            table[:, ::wrong] += 1
        self._table = table.to(device)
        self.extended = self.joined = 0

    def block_bytes(self, size: int) -> int:
        return 0

    def reserve(self, blocks, size, dtype, device) -> None:
        pass

    def prepare(self, tokens: int, rows: int) -> None:
        pass

    def copy(self, source: int, target: int) -> None:
        pass

    def extend(self, kept, tokens, positions, slots, ends) -> None:
        assert len(kept) == len(self.taps)
        assert all(len(one) == len(tokens) == len(positions) for one in kept)
        self.extended += 1

    def join(self, tokens, positions, slots, blocks) -> None:
        self.joined += 1

    def draw(self, chains, step, place, table, records) -> None:
        seeds = records[:, SEED].index_select(0, place)
        at = (chains.positions[step] + 2).clamp(max=self._table.shape[1] - 1)
        flat = seeds * self._table.shape[1] + at
        chains.tokens[step].copy_(self._table.view(-1).index_select(0, flat))
