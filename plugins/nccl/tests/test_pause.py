"""`send_weights(pause=...)`: who pauses, and how the readers' gate is afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from weightwire import LocalClient, ModuleSource, WeightTransferTrainerFactory, Worker
from weightwire.errors import OrderError, UpdateRefused, WeightsTorn
from weightwire.module_sink import ModuleSink
from weightwire.sink import UpdateSpec
from weightwire_nccl import NCCLTrainerInitInfo


class NotedClient(LocalClient):
    """Notes pauses, and what an update says."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.calls: list[str] = []
        self.updates: list[dict[str, Any]] = []

    def pause(self, mode: Any = "abort", *, timeout: float | None = None) -> None:
        self.calls.append(f"pause {mode}")
        super().pause(mode, timeout=timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        self.calls.append("resume")
        super().resume(timeout=timeout)

    def update_weights(self, update_info: Any, **options: Any) -> None:
        self.updates.append(update_info)
        super().update_weights(update_info, **options)


class HostedSink(ModuleSink):
    """The sink of a host that keeps readers out by itself."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "pauses_at_commit": True}


class FailingSink(ModuleSink):
    """Refuses, or fails to commit and is torn."""

    how = ""

    def begin(self, spec: UpdateSpec) -> None:
        if self.how == "refuse":
            raise UpdateRefused("not today")
        super().begin(spec)

    def commit(self) -> Any:
        if self.how == "tear":
            self._torn = True
            raise RuntimeError("the install failed")
        return super().commit()


@pytest.fixture
def trained() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 4)


@pytest.fixture
def connect(trained: nn.Module) -> Iterator[Any]:
    engines: list[Any] = []

    def connect(model: Any) -> tuple[NotedClient, Any]:
        client = NotedClient(Worker(model))
        engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(timeout=30), client=client, source=ModuleSource(trained)
        )
        engines.append(engine)
        return client, engine

    yield connect
    for engine in engines:
        engine.shutdown()


def test_the_trainer_pauses_and_resumes(connect: Any, trained: nn.Module) -> None:
    served = nn.Linear(3, 4)
    client, engine = connect(served)
    engine.send_weights(pause="wait", weight_version="one")
    assert client.calls == ["pause wait", "resume"]
    assert client.updates[0]["pause"] is None
    assert not client.worker.is_paused
    assert all(map(torch.equal, served.parameters(), trained.parameters()))


def test_a_host_that_pauses_by_itself_is_asked_to(connect: Any) -> None:
    model = nn.Linear(3, 4)
    client, engine = connect(HostedSink(model))
    engine.send_weights(pause="keep", weight_version="one")
    assert client.calls == []
    assert (client.updates[0]["pause"], client.updates[0]["label"]) == ("keep", "one")
    assert 0 < client.updates[0]["timeout"] <= 30


def test_a_refusal_ends_resumed(connect: Any) -> None:
    model = nn.Linear(3, 4)
    sink = FailingSink(model)
    client, engine = connect(sink)
    sink.how = "refuse"
    with pytest.raises(UpdateRefused, match="not today"):
        engine.send_weights(pause="keep")
    assert client.calls == ["pause keep", "resume"]
    assert not client.worker.is_paused
    sink.how = ""
    assert engine.send_weights(pause="keep").bytes == 64


def test_torn_weights_stay_refused_and_the_first_error_is_told(connect: Any) -> None:
    model = nn.Linear(3, 4)
    sink = FailingSink(model)
    client, engine = connect(sink)
    sink.how = "tear"
    with pytest.raises(Exception, match="the install failed"):
        engine.send_weights(pause="keep")
    with pytest.raises(OrderError, match="torn"):
        client.worker.resume()
    with pytest.raises(WeightsTorn), client.worker.reading():
        pass


def test_a_draft_model_may_come_later(trained: nn.Module) -> None:
    worker, draft = Worker(nn.Linear(3, 4)), nn.Linear(3, 4)
    client = LocalClient(worker)
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(timeout=30), client=client, source=ModuleSource(trained)
    )
    with pytest.raises(OrderError, match="no draft model"):
        client.start_weight_update(draft=True)
    worker.take_draft_model(draft)
    worker.take_draft_model(draft)
    client.start_weight_update(draft=True)
    with pytest.raises(OrderError, match="a new draft model"):
        worker.take_draft_model(nn.Linear(3, 4))
    client.abort_weight_update()
    engine.shutdown()


def test_a_trainer_of_the_draft_model(trained: nn.Module) -> None:
    served, draft = nn.Linear(3, 4), nn.Linear(3, 4)
    before = [one.clone() for one in served.parameters()]
    worker = Worker(served, draft_model=draft)
    engine = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(timeout=30, draft=True), client=LocalClient(worker), source=ModuleSource(trained)
    )
    engine.send_weights(weight_version="draft-1")
    engine.shutdown()
    assert all(map(torch.equal, draft.parameters(), trained.parameters()))
    assert all(map(torch.equal, served.parameters(), before))
    assert worker.weight_version != "draft-1"
