"""Several servers of different layouts, from one sharded trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from core.tests.distributed_ranks import process_group
from core.tests.sharded_fleet import Pairs, State, details_of, digests, held, serve
from core.tests.sharded_models import Served, flat, policy_tensors, served, sharded
from plugins.rdt.tests.fleet import Trainers
from weightwire.clients.fanout import FanoutClient
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_process import Rank


class Norms(nn.Module):
    """Serves what is called norm, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in policy_tensors(0).items():
            if "norm" in name:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor * 0, False))

    def load_weights(self, pairs: Pairs) -> None:
        own = dict(self.named_parameters())
        for name, tensor in pairs:
            if (mine := name.replace(".", "_")) in own:
                own[mine].data.copy_(tensor)


def norms(state: State, index: int, count: int) -> nn.Module:
    return Norms()


def check(workers: Sequence[Rank], models: Sequence[nn.Module], seed: int) -> None:
    for rank, expected in zip(workers, models, strict=True):
        expected.load_weights(policy_tensors(seed).items())  # type: ignore[operator]
        assert rank.call(held) == digests(expected)


def test_a_whole_server_one_of_two_parts_and_one_of_some_parameters(ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(ranks, 2, tmp_path) as group:
        whole, first, second, some = workers = ranks(4)
        clients = [serve([whole], served), serve([first, second], served), serve([some], norms)]
        options = {"buffer_bytes": 300, "direct_bytes": 200}
        fleet = Trainers(group.ranks, FanoutClient(clients), sharded, flat, **options).opened()
        for seed in (1, 2):
            report = fleet.send(seed)
            check(workers, [Served(0, 1), Served(0, 2), Served(1, 2), Norms()], seed)
        tensors = policy_tensors(0)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        shared = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
        pulled = [sum(details_of(report, index)["pulled"].values()) for index in range(4)]
        assert [pulled[0], pulled[1] + pulled[2], pulled[3]] == [needed, needed + shared, shared]
        fleet.close()
