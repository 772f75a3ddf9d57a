"""How much of what a source makes a trainer rank holds at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.tests.sharded_fleet import Pairs, digests, full, held, serve, whole
from plugins.rdt.tests.fleet import Trainers
from plugins.rdt.tests.test_topology import FullSource
from weightwire.layout import ParamMeta
from weightwire.source import WeightSource
from weightwire.testing.fixtures import BorrowRanks

State = dict[str, Any]
LAYERS = 12
ELEMENTS = 16 << 10
METADATA = [ParamMeta(f"layers.{layer}.{part}", torch.float32, (ELEMENTS,)) for layer in range(LAYERS) for part in "ab"]
LAYER = 2 * 4 * ELEMENTS


class Counting(FullSource):
    """Makes every tensor when it is asked for, and knows how many bytes of them are alive."""

    alive = 0
    most = 0

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for meta in self._metadata:
            tensor = full(meta, self.seed)
            self.alive += meta.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor.untyped_storage(), self.let_go, meta.nbytes)
            yield meta.name, tensor
            del tensor

    def let_go(self, nbytes: int) -> None:
        self.alive -= nbytes


class Layers(nn.Module):
    """Takes every tensor whole; the names of layers have dots, which those of parameters have not."""

    def __init__(self) -> None:
        super().__init__()
        for meta in METADATA:
            zeros = torch.zeros(meta.shape, dtype=meta.dtype)
            self.register_parameter(meta.name.replace(".", "_"), nn.Parameter(zeros, False))

    def load_weights(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            self.get_parameter(name.replace(".", "_")).data.copy_(tensor)


def layers(state: State, index: int, count: int) -> nn.Module:
    return Layers()


def counting(state: State, rank: int, count: int, metadata: Sequence[ParamMeta]) -> WeightSource:
    return Counting(metadata, rank)


def most_alive(state: State) -> int:
    most, state["source"].most = state["source"].most, 0
    return int(most)


@pytest.mark.parametrize("way", ["nixl", pytest.param("object_store", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("lookahead", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_rank_holds_as_many_layers_as_it_may(ranks: BorrowRanks, lookahead: int, way: str) -> None:
    """The layer that is being made, and those that are not read yet."""
    (worker,), (trainer,) = ranks(1), ranks(1)
    client = serve([worker], layers)
    options = {"tensor_transport": way, "gather_lookahead": lookahead, "buffer_bytes": 4096, "direct_bytes": 1024}
    fleet = Trainers([trainer], client, counting, METADATA, **options).opened()
    for seed in (1, 2):
        fleet.send(seed)
        expected = Layers()
        expected.load_weights(whole(METADATA, seed).items())
        assert worker.call(held) == digests(expected)
        most = trainer.call(most_alive)
        assert LAYER <= most <= (lookahead + 1) * LAYER
    fleet.close()
