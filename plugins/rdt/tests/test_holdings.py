"""What workers ask for, from plan to request to messages and back: equal to plain loading, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugins.m2n.tests.random_scenes import Array, Scene, loaded, memories, random_scene, tensors
from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.layout import ParamMeta, Shard
from weightwire.packing import BufferRing
from weightwire.region import Region
from weightwire.region_boxes import whole as everything
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.incoming import Incoming, Landing, incoming_of, separated
from weightwire.resharding.outgoing import Sending, merged, new_ring
from weightwire.resharding.planner import Plan
from weightwire.resharding.receipts import message_number
from weightwire_rdt.holdings import groups_of, holding_of, layouts_of, outgoing_of, write_request
from weightwire_rdt.installer import Installer
from weightwire_rdt.pulling import Chunk, Pulling
from weightwire_rdt.requests import Holding

randoms = st.randoms(use_true_random=False)
CPU = torch.device("cpu")
_MARGIN = 64  # what a trainer rank's buffers have beyond buffer_bytes


class Wire:
    """Chunks in memory. What is offered is read late, in any order: a buffer that is used again too soon is seen."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._next: dict[int, int] = {}
        self._offered: dict[tuple[int, int], Sequence[Tensor]] = {}
        self.chunks: dict[tuple[int, int], list[bytes]] = {}
        """By worker and ordinal, what was read."""

    def send(self, buffers: Sequence[Tensor], to: Sequence[int], *, deadline: Deadline) -> Offered:
        (worker,) = to
        key = worker, self._next.setdefault(worker, 0)
        self._next[worker] += 1
        self._offered[key] = buffers
        while self._offered and self._random.random() < 0.3:
            self.read(self._random.choice(sorted(self._offered)))
        return Offered(self, key)

    def read(self, key: tuple[int, int]) -> None:
        if key in self._offered:
            self.chunks[key] = [buffer.numpy().tobytes() for buffer in self._offered.pop(key)]

    def unread(self) -> set[tuple[int, int]]:
        return set(self._offered)

    def wait(self, keys: set[tuple[int, int]], deadline: Deadline) -> None:
        for key in self._random.sample(sorted(keys), len(keys)):
            self.read(key)

    def flush(self, deadline: Deadline) -> None:
        self.wait(self.unread(), deadline)


class Offered:
    def __init__(self, wire: Wire, key: tuple[int, int]) -> None:
        self._wire, self._key = wire, key

    @property
    def done(self) -> bool:
        return self._key not in self._wire.unread()

    def wait(self, deadline: Deadline) -> None:
        self._wire.read(self._key)


@dataclasses.dataclass
class Asked:
    """One worker: what it pulls, and its request to each trainer rank."""

    plan: Plan
    incoming: Incoming
    requests: list[str]


@dataclasses.dataclass
class Pulls:
    """A scene in which each worker plans alone."""

    scene: Scene
    whole: bool
    direct: int
    beside: int | None = None

    @classmethod
    def random(cls, random: Random) -> Pulls:
        scene = random_scene(random)
        names = [f"model.layers.{random.randrange(3)}.w{at}" if random.random() < 0.7 else f"w{at}" for at in range(9)]
        named = zip(names, scene.metadata, strict=False)
        scene.metadata = [dataclasses.replace(meta, name=name) for name, meta in named]
        direct, beside = random.choice([1, 16, 48, 100, 5000]), random.choice([None, 1, 100, 2000])
        return cls(scene, random.random() < 0.3, direct, beside)

    def ask(self, worker: int) -> Asked:
        scene = self.scene
        plan = Plan(
            layouts_of(scene.metadata, whole=self.whole),
            scene.trainers,
            Workers.of([scene.demands[worker]]),
            buffer=scene.buffer,
            large=min(self.direct, scene.buffer),
            groups=groups_of(scene.metadata),
            beside=self.beside,
            ordinal=worker,
        )
        incoming, moves = incoming_of(plan, scene.metadata, 0), plan.for_worker(0)
        by_sender = [[one for one in incoming.messages if one.sender == rank] for rank in range(scene.trainers)]
        return Asked(plan, incoming, [write_request(moves, of, scene.metadata) for of in by_sender])

    def holding(self, rank: int) -> Holding:
        return holding_of(
            self.scene.metadata, rank, whole=self.whole, buffer_bytes=self.scene.buffer, direct_bytes=self.direct
        )

    def part(self, meta: ParamMeta, rank: int, content: Array) -> Tensor:
        """What trainer rank `rank` has of a parameter."""
        full = torch.from_numpy(content.view(np.uint8)).view(meta.dtype).reshape(meta.shape)
        return full if self.whole else full[meta.box(rank).slices()]

    def serve(self, rank: int, asked: Sequence[Asked], full: list[Array], random: Random) -> Wire:
        """All that a trainer rank sends, read by the workers in some order."""
        holding, wire = self.holding(rank), Wire(random)
        parts = [outgoing_of(holding.read(one.requests[rank], at), holding, at) for at, one in enumerate(asked)]
        deadline = Deadline(20)
        sending = Sending(
            merged(parts),
            wire,
            new_ring(len(asked), 2, self.scene.buffer + _MARGIN, CPU),
            offset=0,
            deadline=deadline,
            checksums=Checksums(enabled=False),
            number=lambda message: message.ordinal,
            tell=lambda sent: None,
        )
        for place, meta in enumerate(self.scene.metadata):
            if meta.owned_by(rank):
                sending.send(place, self.part(meta, rank, full[place]))
        sending.finish()
        assert sending.sent == sum(part.nbytes for part in parts)
        return wire


def landing(memory: dict[int, Array]) -> Landing:
    return Landing({target: torch.from_numpy(flat.view(np.uint8)) for target, flat in memory.items()})


def check_equal(found: dict[int, Array], expected: dict[int, Array]) -> None:
    assert found.keys() == expected.keys()
    assert all((found[target] == expected[target]).all() for target in expected)


def check_messages(pulls: Pulls, asked: Asked) -> None:
    groups = groups_of(pulls.scene.metadata)
    for message in asked.incoming.messages:
        assert len({groups[place] for place in message.parameters}) == 1
        small = [segment for segment in message.segments if not segment.straight]
        assert all(segment.stop <= pulls.scene.buffer for segment in small)
        assert sum(segment.stop - segment.start for segment in small) <= pulls.scene.buffer


@given(randoms)
def test_what_is_pulled_is_what_plain_loading_leaves(random: Random) -> None:
    pulls = Pulls.random(random)
    full = tensors(pulls.scene)
    asked = [pulls.ask(worker) for worker in range(len(pulls.scene.demands))]
    wires = [pulls.serve(rank, asked, full, random) for rank in range(pulls.scene.trainers)]
    for worker, one in enumerate(asked):
        check_messages(pulls, one)
        assert one.incoming.nbytes == one.plan.coverage.lower_bound == one.plan.coverage.wire
        memory = memories(pulls.scene, worker)
        target = landing(memory)
        for message in one.incoming.messages:
            segments = wires[message.sender].chunks.pop((worker, message.ordinal))
            assert [len(each) for each in segments] == [each.stop - each.start for each in message.segments]
            for segment, content in zip(message.segments, segments, strict=True):
                target.install(segment, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        check_equal(memory, loaded(pulls.scene, worker, full))
    assert not any(wire.chunks for wire in wires)


@settings(max_examples=15)
@given(randoms)
def test_requests_are_a_pure_function(random: Random) -> None:
    pulls = Pulls.random(random)
    for worker in range(len(pulls.scene.demands)):
        assert pulls.ask(worker).requests == pulls.ask(worker).requests


@settings(max_examples=15)
@given(randoms)
def test_what_a_rank_holds_survives_json(random: Random) -> None:
    pulls = Pulls.random(random)
    for rank in range(pulls.scene.trainers):
        holding = pulls.holding(rank)
        assert Holding.from_json(holding.to_json()) == holding
        for meta, elements in zip(pulls.scene.metadata, holding.elements, strict=True):
            held = meta.shape if pulls.whole else meta.local_shape(rank) if meta.owned_by(rank) else (0,)
            assert elements == (math.prod(held) if meta.owned_by(rank) else 0)


# Pulling, whatever becomes ready first


class Arrived:
    def __init__(self, random: Random, fill: list[tuple[Tensor, bytes]]) -> None:
        self._random, self._fill = random, fill

    @property
    def done(self) -> bool:
        if self._fill and self._random.random() < 0.5:
            for buffer, content in self._fill:
                buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            self._fill = []
        return not self._fill


class Inbound:
    """Chunks that are ready at some time, of each trainer rank in order, and arrive later."""

    divides = True

    def __init__(self, random: Random, worker: int, wires: Sequence[Wire]) -> None:
        self._random, self._worker, self._wires = random, worker, wires
        self.on_their_way: list[Arrived] = []
        self.most = 0

    def begin_round(self, number: int) -> None:
        pass

    def ready(self, owner: int, ordinal: int) -> bool:
        return self._random.random() < 0.5

    def receive(self, chunks: Sequence[Chunk], owner: int, deadline: Deadline) -> Arrived:
        fill: list[tuple[Tensor, bytes]] = []
        for chunk in chunks:
            content = b"".join(self._wires[owner].chunks.pop((self._worker, chunk.ordinal)))
            ends = list(accumulate(buffer.numel() for buffer in chunk.buffers))
            assert ends[-1] == len(content)
            starts = [0, *ends[:-1]]
            fill += [(buffer, content[a:b]) for buffer, a, b in zip(chunk.buffers, starts, ends, strict=True)]
        self.on_their_way = [one for one in self.on_their_way if one._fill]
        self.on_their_way.append(Arrived(self._random, fill))
        self.most = max(self.most, len(self.on_their_way))
        return self.on_their_way[-1]

    def pause(self, deadline: Deadline, owners: Sequence[int]) -> None:
        deadline.check()

    def close(self, error: BaseException | None = None) -> None:
        pass


def pull(
    incoming: Incoming,
    inbound: Inbound,
    target: Landing,
    installer: Installer,
    depth: int,
    deadline: Deadline,
    buffer: int = 64,
    checksums: Checksums | None = None,
) -> None:
    Pulling(
        incoming,
        inbound,
        BufferRing(depth + 1, buffer, CPU),
        target,
        installer,
        depth=depth,
        deadline=deadline,
        checksums=checksums or Checksums(enabled=False),
        number=lambda message: message_number(message.sender, 0, message.ordinal),
    ).run()


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.integers(1, 3))
def test_chunks_that_come_in_any_order(seed: int, depth: int) -> None:
    random = Random(seed)  # how often it is asked depends on the installing thread
    pulls = Pulls.random(random)
    full, deadline = tensors(pulls.scene), Deadline(5)
    asked = [pulls.ask(worker) for worker in range(len(pulls.scene.demands))]
    wires = [pulls.serve(rank, asked, full, random) for rank in range(pulls.scene.trainers)]
    installer = Installer()
    for worker, one in enumerate(asked):
        memory, inbound = memories(pulls.scene, worker), Inbound(random, worker, wires)
        checksums = Checksums(enabled=random.random() < 0.5)
        installer.begin()
        incoming = separated(one.incoming) if random.random() < 0.7 else one.incoming
        pull(incoming, inbound, landing(memory), installer, depth, deadline, pulls.scene.buffer, checksums)
        installer.drain(deadline)
        check_equal(memory, loaded(pulls.scene, worker, full))
        assert inbound.most <= depth
        assert not any((worker, at) in wire.chunks for wire in wires for at in range(99))
        assert len(checksums.values) == (len(one.incoming.messages) if checksums.enabled else 0)


def test_an_error_while_installing_ends_the_round() -> None:
    """More chunks than buffers: what the installer does not install gives no buffer back."""
    metadata = [ParamMeta(f"w{at}", torch.uint8, (60,)) for at in range(9)]
    wanted = [Demand(at, everything((60,)), at, everything((60,))) for at in range(9)]
    pulls = Pulls(Scene(metadata, 1, [wanted], buffer=64), whole=False, direct=64)
    asked = [pulls.ask(0)]
    wires = [pulls.serve(0, asked, tensors(pulls.scene), Random(1))]
    small = Landing({at: torch.zeros(5 if at == 2 else 60, dtype=torch.uint8) for at in range(9)})
    installer, deadline = Installer(), Deadline(3)

    def round_() -> None:
        pull(asked[0].incoming, Inbound(Random(1), 0, wires), small, installer, 1, deadline)
        installer.drain(deadline)

    with pytest.raises(RuntimeError, match="size"):
        round_()


# One case, written out


def test_a_request_in_full() -> None:
    """Rows over two ranks to the columns of a second half, and a vector that one rank has."""
    metadata = [
        ParamMeta("layers.0.w", torch.bfloat16, (4, 6), owners=(0, 1), placements=(Shard(0),)),
        ParamMeta("layers.1.b", torch.float32, (3,), owners=(1,)),
    ]
    columns = Demand(0, Region(3, (4, 3), (6, 1)), 20, everything((4, 3)))
    scene = Scene(metadata, 2, [[columns, Demand(1, everything((3,)), 40, everything((3,)))]], buffer=64, large=16)
    asked = Pulls(scene, whole=False, direct=16).ask(0)
    first = '{"parameters":["layers.0.w"],"messages":[[[[0,3,[2,3],[6,1]]]]]}'
    second = '{"parameters":["layers.0.w","layers.1.b"],"messages":[[[[0,3,[2,3],[6,1]]]],[[[1,0,[3],[1]]]]]}'
    assert asked.requests == [first, second]
    assert asked.incoming.nbytes == 4 * 3 * 2 + 3 * 4
    whole = Pulls(scene, whole=True, direct=16).ask(0)
    assert [one.count("layers.0.w") for one in whole.requests] == [1, 0]
    assert "[[0,3,[4,3],[6,1]]]" in whole.requests[0]


def test_a_piece_that_goes_backwards() -> None:
    """The second and third elements of a transposed matrix, on one rank: they change places."""
    metadata = [ParamMeta("w", torch.bfloat16, (4,))]
    transposed = Demand(0, Region(0, (2, 2), (2, 1)), 27, Region(0, (2, 2), (1, 2)))
    middle = Demand(0, Region(1, (2,), (1,)), 28, everything((2,)))
    scene = Scene(metadata, 1, [[transposed, middle]], buffer=64, large=16)
    pulls = Pulls(scene, whole=False, direct=16)
    full, asked = tensors(scene), pulls.ask(0)
    wire, memory = pulls.serve(0, [asked], full, Random(1)), memories(scene, 0)
    assert any(write.flipped for one in asked.incoming.messages for part in one.segments for write in part.writes)
    for message in asked.incoming.messages:
        for segment, content in zip(message.segments, wire.chunks[0, message.ordinal], strict=True):
            landing(memory).install(segment, torch.frombuffer(bytearray(content), dtype=torch.uint8))
    check_equal(memory, loaded(scene, 0, full))


def test_a_piece_between_the_size_of_a_buffer_and_of_what_is_read_in_place() -> None:
    """A buffer that is smaller than `direct_bytes`: what does not fit it is read where it lies."""
    metadata = [ParamMeta("w", torch.uint8, (100,))]
    scene = Scene(metadata, 1, [[Demand(0, everything((100,)), 10, everything((100,)))]], buffer=64)
    pulls = Pulls(scene, whole=False, direct=1 << 20)
    full, asked = tensors(scene), pulls.ask(0)
    wire = pulls.serve(0, [asked], full, Random(1))
    assert b"".join(wire.chunks[0, 0]) == full[0].tobytes()
