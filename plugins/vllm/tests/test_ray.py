"""Workers inside vLLM that pull over sharded_rdt: processes that join a Ray cluster, or actors of vLLM's executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from core.tests.distributed_ranks import process_group
from plugins.rdt.tests.cluster import Cluster, join
from plugins.rdt.tests.fleet import start_producer
from plugins.vllm.tests import sharded_trainer
from plugins.vllm.tests.conftest import TWO_RANKS, Lineup, Models, with_old_weights
from plugins.vllm.tests.scene import Server, open_trainer, send
from plugins.vllm.tests.test_trainer_lost import lose_trainer
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import Rank, RankPool

# A cluster, a server and the actors beside trainer ranks start one after the other.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(560)]

BACKEND: Final = "sharded_rdt"
ROOT: Final = Path(__file__).parents[3]
EXECUTOR: Final = "plugins.vllm.tests.ray_on_cpu.RayExecutorOnCPU"
JOIN_SECONDS: Final = 110.0


@pytest.fixture(scope="module")
def cluster(lineup: Lineup) -> Iterator[Cluster]:
    """A Ray cluster, which outlives the servers whose workers are in it."""
    with Cluster() as started:
        yield started
        lineup.stop()


@pytest.fixture
def members(pool: RankPool, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[BorrowRanks]:
    """`members(n)` lends n new ranks that are in the cluster; they end with the test, since the cluster soon does."""
    lent: list[Rank] = []

    def borrow(count: int) -> list[Rank]:
        more = pool.borrow(count, fresh=True)
        lent.extend(more)
        for joining in [rank.start(join, cluster.variables) for rank in more]:
            joining.result(JOIN_SECONDS)
        for starting in [rank.start(start_producer) for rank in more]:
            starting.result(JOIN_SECONDS)
        return more

    yield borrow
    for rank in lent:
        rank.kill()
    pool.give_back(lent, after=request.node.nodeid)


Serve = Callable[[str, int], Server]


@pytest.fixture
def serve(lineup: Lineup, models: Models, cluster: Cluster) -> Serve:
    """`serve("processes", 2)`: two workers on the old weights, processes of vLLM or `"actors"`."""

    def serve(kind: str, workers: int) -> Server:
        arguments = TWO_RANKS if workers == 2 else ()
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if workers == 2 else "nobind"}
        if kind == "actors":
            arguments = (*arguments, "--distributed-executor-backend", EXECUTOR)
            environment = {"PYTHONPATH": str(ROOT)}
        server = lineup.get(models.old.folder, *arguments, **environment, **cluster.variables)
        assert [is_actor(worker["pid"]) for worker in server.workers()] == [kind == "actors"] * workers
        return with_old_weights(server, models)

    return serve


def is_actor(process: int) -> bool:
    """Whether a process is a worker of Ray's."""
    return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::")


def check_rounds(server: Server, models: Models, trainer: Rank, **info: Any) -> None:
    """Rounds from one trainer rank, each over a link of its own, to other weights."""
    for number, model in enumerate((models.new, models.old)):
        trainer.call(open_trainer, server.url, model.weights, BACKEND, **info)
        report = trainer.call(send, f"pulled-{number}", pause="keep")
        trainer.call(sharded_trainer.close)
        assert server.greedy() == model.greedy()
        assert server.label() == f"pulled-{number}"
        way = info.get("tensor_transport", "nixl")
        assert [rank["details"]["way"] for rank in pulled(report)] == [way] * len(server.workers())


def pulled(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the worker ranks report."""
    return [rank for rank in report["ranks"] if "commit" in rank["seconds"]]


@pytest.mark.thorough
def test_one_worker(serve: Serve, models: Models, members: BorrowRanks) -> None:
    (trainer,) = members(1)
    check_rounds(serve("processes", 1), models, trainer)


both_kinds = pytest.mark.parametrize("kind", ["processes", "actors"], scope="module")
"""Of the module, so that pytest runs all tests of one server together."""


@pytest.mark.thorough
@both_kinds
def test_rounds(serve: Serve, models: Models, members: BorrowRanks, kind: str) -> None:
    (trainer,) = members(1)
    check_rounds(serve(kind, 2), models, trainer)


@both_kinds
def test_regions_from_a_sharded_trainer(
    serve: Serve, models: Models, members: BorrowRanks, tmp_path: Path, kind: str
) -> None:
    server = serve(kind, 2)
    with process_group(members, 4, tmp_path) as group:
        port = group.ranks[0].call(sharded_trainer.hold_port)
        group.run(sharded_trainer.shard, models.old.weights)
        group.run(sharded_trainer.open_trainer, server.url, BACKEND, port)
        for number, model in enumerate((models.new, models.old)):
            group.run(sharded_trainer.fill, model.weights)
            report = group.run(sharded_trainer.send, f"regions-{number}")[0]
            assert server.greedy() == model.greedy()
            assert server.label() == f"regions-{number}"
            assert len(pulled(report)) == 2
            for worker in pulled(report):
                assert worker["bytes"] < 0.6 * report["bytes"]
                assert len(worker["details"]["pulled"]) == 4
                assert worker["details"]["opaque"] == []
        group.run(sharded_trainer.close)


@pytest.mark.thorough
@both_kinds
@pytest.mark.parametrize("way", ["ray_nixl", "gloo", "object_store"])
def test_other_ways_for_the_bytes(serve: Serve, models: Models, members: BorrowRanks, kind: str, way: str) -> None:
    (trainer,) = members(1)
    check_rounds(serve(kind, 2), models, trainer, tensor_transport=way)


@pytest.mark.parametrize("kind", ["processes", pytest.param("actors", marks=pytest.mark.thorough)], scope="module")
def test_after_a_trainer_was_killed(serve: Serve, models: Models, members: BorrowRanks, kind: str) -> None:
    server = serve(kind, 2)
    lose_trainer(members, server, models, BACKEND, "trainer.begin", "kill")
    (trainer,) = members(1)
    check_rounds(server, models, trainer)
