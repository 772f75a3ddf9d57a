"""Twenty rounds of whatever can happen: every worker equals the trainer bit for bit, or somebody has said why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core.tests.sharded_fleet import digests
from weightwire.clients.fanout import FanoutClient
from weightwire.clients.local import LocalClient
from weightwire.errors import PeerLost, WeightwireError
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.source import ModuleSource, as_bytes
from weightwire.worker import Worker
from weightwire_sparse import SparseNCCLTrainerInitInfo

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex128, torch.bool)


class Trained(nn.Module):
    """Projections by themselves, a head tied to the embedding."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], random: torch.Generator) -> None:
        super().__init__()
        for name, shape, dtype in zip(("query", "key", "up", "embed", "scale"), SHAPES, dtypes, strict=True):
            tensor = torch.zeros(shape, dtype=dtype)
            scramble(tensor, 1.0, random)
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))
        self.head = self.embed


SHAPES = ((12, 8), (6, 8), (10, 8), (40, 8), ())


class Fused(nn.Module):
    """One of two tensor-parallel ranks: fused and transposed parameters, padded rows, a tied head."""

    def __init__(self, like: Trained) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(9, 8, dtype=like.query.dtype), False)  # type: ignore[arg-type]
        self.key = nn.Parameter(torch.zeros(6, 8, dtype=like.key.dtype), False)  # type: ignore[arg-type]
        self.up = nn.Parameter(torch.zeros(8, 10, dtype=like.up.dtype), False)  # type: ignore[arg-type]
        self.embed = nn.Parameter(torch.zeros(24, 8, dtype=like.embed.dtype), False)  # type: ignore[arg-type]
        self.scale = nn.Parameter(torch.zeros((), dtype=like.scale.dtype), False)  # type: ignore[arg-type]
        self.head = self.embed

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            if name == "query":
                self.qk.data[3:].copy_(tensor[6:])
                self.qk.data[:3].copy_(tensor[:3])
            elif name == "up":
                self.up.data.copy_(tensor.t())
            elif name == "embed":
                self.embed.data[:20].copy_(tensor[20:])
            else:
                getattr(self, name).data.copy_(tensor)


def scramble(tensor: Tensor, share: float, random: torch.Generator) -> None:
    """Give some elements random bits; NaNs, infinities and negative zeros are among them."""
    rows = as_bytes(tensor).view(-1, tensor.element_size())
    chosen = torch.rand(len(rows), generator=random) < share
    fresh = torch.randint(0, 2 if tensor.dtype == torch.bool else 256, rows.shape, generator=random, dtype=torch.uint8)
    rows[chosen] = fresh[chosen]


class Trying(LocalClient):
    """A client whose calls are repeated, or of which an answer is lost."""

    repeats = False
    loses: str | None = None

    def _call(self, name: str, *arguments: Any, **options: Any) -> None:
        for _ in range(2 if self.repeats else 1):
            getattr(super(), name)(*arguments, **options)
        if self.loses == name:
            raise PeerLost(f"the answer to {name} was lost")

    def start_weight_update(self, **options: Any) -> None:
        self._call("start_weight_update", **options)

    def update_weights(self, *arguments: Any, **options: Any) -> None:
        self._call("update_weights", *arguments, **options)

    def finish_weight_update(self, *arguments: Any, **options: Any) -> None:
        self._call("finish_weight_update", *arguments, **options)


class Scene:
    """A trainer and two servers in this process, and what every revision holds."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], seed: int, **options: Any) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.model = Trained(dtypes, self.random)
        self.options = options
        self.clients: list[Trying] = []
        for _ in range(2):
            self.clients.append(Trying(Worker(nn.Module())))
        self.served: list[nn.Module] = [nn.Module(), nn.Module()]
        self.engine: Any = None
        self.states: dict[tuple[str, int], list[dict[str, str]]] = {}
        self.ways: list[tuple[str, str]] = []
        self.drifted = False
        self.restart_worker(0)
        self.restart_worker(1)

    def restart_worker(self, place: int) -> None:
        """A new process, as far as the trainer can tell."""
        self.clients[place].worker.shutdown()
        dtypes = tuple(getattr(self.model, name).dtype for name in ("query", "key", "up", "embed", "scale"))
        self.served[place] = Trained(dtypes, self.random) if place == 0 else Fused(self.model)
        client = Trying(Worker(self.served[place]))
        self.clients[place] = client
        if self.engine is not None:
            self.engine.client = FanoutClient(self.clients)

    def restart_trainer(self) -> None:
        """The trainer starts again from its present weights."""
        if self.engine is not None:
            self.engine.shutdown()
        info = SparseNCCLTrainerInitInfo(takeover=True, peer_timeout=5.0, timeout=30.0, **self.options)
        self.engine = WeightTransferTrainerFactory.trainer_init(
            info, client=FanoutClient(self.clients), source=ModuleSource(self.model)
        )

    def expected(self) -> list[dict[str, str]]:
        """What the two servers hold once they have the trainer's weights."""
        fused = Fused(self.model)
        fused.load_weights((name, tensor.data) for name, tensor in self.model.named_parameters())
        return [digests(self.model), digests(fused)]

    def held(self) -> list[dict[str, str]]:
        return [digests(model) for model in self.served]

    def send(self) -> None:
        """Send once, and see that nobody is on weights that nobody meant."""
        if self.engine is None:
            self.restart_trainer()
        next_revision = self.engine.next_revision
        for number in range(4):  # a link that is opened again, or a fallback, takes the next number
            self.states[next_revision.lineage, next_revision.number + number] = self.expected()
        try:
            report = self.engine.send_weights()
        except WeightwireError:
            self.check()
            return
        self.ways.append((report.ranks[0].details["way"], report.ranks[0].details["reason"]))
        self.drifted = self.drifted and not report.verified
        if not self.drifted:
            assert self.held() == self.expected()

    def check(self) -> None:
        """Each server is on what its revision says."""
        for place, client in enumerate(self.clients):
            revision = client.worker.info()["revision"]
            state = self.states.get((revision["lineage"], revision["number"]))
            if state is not None and not self.drifted:
                assert digests(self.served[place]) == state[place]

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        for client in self.clients:
            client.worker.shutdown()


EVENTS = ("send", "send", "send", "send", "lost finish", "lost update", "repeat", "worker", "trainer", "drift", "again")


def play(scene: Scene, events: list[tuple[str, float, int]]) -> None:
    for event, share, place in events:
        if event != "again":
            for tensor in scene.model.parameters():
                scramble(tensor.data, share, scene.random)
        client = scene.clients[place]
        if event == "worker":
            scene.restart_worker(place)
        elif event == "trainer":
            scene.restart_trainer()
        elif event == "drift":
            scene.drifted = True
            scramble(next(iter(scene.served[place].parameters())).data, 0.5, scene.random)
        client = scene.clients[place]
        client.repeats = event == "repeat"
        client.loses = {"lost finish": "finish_weight_update", "lost update": "update_weights"}.get(event)
        scene.send()
        client.repeats, client.loses = False, None
    scene.send()
    assert scene.drifted or scene.held() == scene.expected()


OPTIONS = st.fixed_dictionaries(
    {
        "kernels": st.sampled_from(["numpy", "numba"]),
        "snapshot": st.sampled_from(["copy", "copy", "hash"]),
        "compression": st.sampled_from(["none", "zstd"]),
        "verify_every": st.sampled_from([0, 1, 3]),
        "dense_above": st.sampled_from([0.6, 100.0]),
        "history_bytes": st.sampled_from([0, 600, 1 << 20]),
    }
)


HISTORIES = {
    "dtypes": st.tuples(*[st.sampled_from(DTYPES)] * 5),
    "events": st.lists(
        st.tuples(st.sampled_from(EVENTS), st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.integers(0, 1)),
        min_size=20,
        max_size=20,
    ),
    "options": OPTIONS,
    "seed": st.integers(0, 2**31),
}


def end_well(
    dtypes: tuple[torch.dtype, ...], events: list[tuple[str, float, int]], options: dict[str, Any], seed: int
) -> None:
    scene = Scene(dtypes, seed, **options)
    try:
        play(scene, events)
    finally:
        scene.close()


@settings(deadline=None, max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(**HISTORIES)
def test_every_history_ends_well(**history: Any) -> None:
    end_well(**history)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(**HISTORIES)
def test_many_histories_end_well(**history: Any) -> None:
    end_well(**history)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene((torch.bfloat16,) * 5, 1, verify_every=0)
    yield scene
    scene.close()


def change(scene: Scene) -> None:
    for tensor in scene.model.parameters():
        scramble(tensor.data, 0.02, scene.random)


def test_a_lost_answer_costs_no_dense_round(scene: Scene) -> None:
    """Nobody knows whether the round committed: what it brought is sent again, and nothing else."""
    scene.send()
    for lost in ("finish_weight_update", "update_weights"):
        change(scene)
        scene.clients[0].loses = lost
        scene.send()
        scene.clients[0].loses = None
        change(scene)
        scene.send()
        assert scene.ways[-1][0] == "delta"
        assert scene.held() == scene.expected()


def test_drift_is_found_and_mended(scene: Scene) -> None:
    scene.engine = None
    scene.options["checksum"] = True
    scene.send()
    fused: Any = scene.served[1]
    fused.qk.data[4, 2] += 1
    change(scene)
    scene.send()
    assert scene.ways[-1][0] == "dense"
    assert "this worker's weights were not those of its revision" in scene.ways[-1][1]
    assert scene.held() == scene.expected()
    change(scene)
    scene.send()
    assert scene.ways[-1] == ("delta", "")


def test_who_missed_rounds_gets_what_it_missed(scene: Scene) -> None:
    """One of two servers is left out for a while, and is not a reason to send everything to both."""
    scene.send()
    change(scene)
    scene.send()
    both, one = FanoutClient(scene.clients), FanoutClient(scene.clients[:1])
    scene.engine.client = one
    scene.clients[1].worker.shutdown()
    behind = digests(scene.served[1])
    for _ in range(2):
        change(scene)
        assert scene.engine.send_weights().ranks[0].details["way"] == "delta"
    assert digests(scene.served[0]) == scene.expected()[0]
    assert digests(scene.served[1]) == behind
    scene.engine.client = both
    scene.clients[0].worker.shutdown()
    change(scene)
    details = scene.engine.send_weights().ranks[0].details
    assert (details["way"], details["reason"]) == ("delta", "worker rank 1 missed a round")
    assert scene.held() == scene.expected()
