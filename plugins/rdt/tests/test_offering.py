"""A trainer rank's pass: how many layers it holds at a time, and what it notices of writes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugins.m2n.tests.random_scenes import Scene
from plugins.rdt.tests.test_holdings import CPU, Pulls, Wire
from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.errors import PeerStalled, TransferError
from weightwire.layout import ParamMeta
from weightwire.region_boxes import whole
from weightwire.resharding.demands import Demand
from weightwire.resharding.outgoing import Outgoing, Sending, merged, new_ring
from weightwire_rdt.holdings import groups_of, outgoing_of
from weightwire_rdt.offering import Offering

DIRECT = 32
BUFFER = 64
randoms = st.randoms(use_true_random=False)


class Recording(Wire):
    """Reads when somebody waits, or by chance; notes for what was waited.

    Args:
        random: Chance.
        eager: Whether anything is read that nobody waits for.
    """

    def __init__(self, random: Random, *, eager: bool = False) -> None:
        super().__init__(random)
        self._eager = eager
        self.waits: list[set[tuple[int, int]]] = []

    def unread(self) -> set[tuple[int, int]]:
        if self._eager and self._offered and self._random.random() < 0.5:
            self.read(self._random.choice(sorted(self._offered)))
        return super().unread()

    def wait(self, keys: set[tuple[int, int]], deadline: Deadline) -> None:
        self.waits.append(set(keys))
        super().wait(keys, deadline)


class Calm(Random):
    """A chance that never comes: nothing is read before somebody waits for it."""

    def random(self) -> float:
        return 0.99


class Pass:
    """Layers of parameters of some sizes in bytes, all of which some workers want."""

    def __init__(self, layers: Sequence[Sequence[int]], workers: int, wire: Recording, lookahead: int | None) -> None:
        self.metadata = [
            ParamMeta(f"layers.{layer}.w{at}", torch.uint8, (size,))
            for layer, sizes in enumerate(layers)
            for at, size in enumerate(sizes)
        ]
        wanted = [Demand(at, whole(of.shape), at, whole(of.shape)) for at, of in enumerate(self.metadata)]
        pulls = Pulls(Scene(self.metadata, 1, [wanted] * workers, BUFFER), whole=False, direct=DIRECT)
        holding, asked = pulls.holding(0), [pulls.ask(worker) for worker in range(workers)]
        self.outgoing: Outgoing = merged(
            [outgoing_of(holding.read(one.requests[0], at), holding, at) for at, one in enumerate(asked)]
        )
        self.groups = groups_of(self.metadata)
        self.layer_of = {
            (at, message.ordinal): self.groups[message.parameters[0]]
            for at, one in enumerate(asked)
            for message in one.incoming.messages
        }
        self.tensors = [torch.full(meta.shape, at, dtype=torch.uint8) for at, meta in enumerate(self.metadata)]
        self.wire, self.deadline = wire, Deadline(20)
        sending = Sending(
            self.outgoing,
            wire,
            new_ring(workers, 1000, BUFFER + 64, CPU),  # so many that no buffer is ever waited for
            offset=0,
            deadline=self.deadline,
            checksums=Checksums(enabled=False),
            number=lambda message: message.ordinal,
            tell=lambda sent: None,
        )
        self.sending = sending
        self.offering = Offering(
            sending,
            wire,
            self.groups,
            lookahead=lookahead,
            metadata=self.metadata,
            straight={place for place, of in self.outgoing.pieces.items() if any(piece.straight for piece in of)},
        )

    def offer(self, place: int, tensor: Tensor | None = None) -> None:
        self.offering.offer(place, self.tensors[place] if tensor is None else tensor, self.deadline)

    def held(self) -> set[int]:
        """The layers of which chunks have not been read."""
        return {self.layer_of[key] for key in Wire.unread(self.wire)}


LAYERS = st.lists(st.lists(st.sampled_from([1, 5, 40, 70]), min_size=1, max_size=4), min_size=1, max_size=7)


@given(LAYERS, st.integers(1, 3), st.sampled_from([0, 1, 3]), randoms, st.booleans())
def test_never_more_layers_than_the_lookahead_allows(
    layers: list[list[int]], workers: int, lookahead: int, random: Random, eager: bool
) -> None:
    wire = Recording(random if eager else Calm(1), eager=eager)
    one = Pass(layers, workers, wire, lookahead)
    for place, layer in enumerate(one.groups):
        assert len(one.held() | {layer}) <= lookahead + 1
        one.offer(place)
        assert len(one.held()) <= lookahead + 1
        if not eager:  # no more is waited for than has to be
            assert one.held() >= set(range(max(0, layer - lookahead + 1), layer))
    one.sending.finish()
    one.offering.check_unwritten()
    assert not one.held()
    assert set(wire.chunks) == set(one.layer_of)
    content = b"".join(b"".join(wire.chunks[key]) for key in sorted(wire.chunks) if key[0] == 0)
    assert sorted(content) == sorted(b"".join(bytes(tensor.tolist()) for tensor in one.tensors))


@given(LAYERS, st.integers(1, 2))
def test_what_is_there_anyway_waits_for_nobody(layers: list[list[int]], workers: int) -> None:
    wire = Recording(Calm(1))
    one = Pass(layers, workers, wire, None)
    for place in range(len(one.groups)):
        one.offer(place)
    assert wire.waits == []
    assert one.held() == set(one.groups)
    one.sending.finish()
    one.offering.check_unwritten()


def test_a_layer_that_nobody_wants_holds_nothing_up() -> None:
    wire = Recording(Calm(1))
    one = Pass([[40], [40], [40]], 1, wire, 1)
    one.outgoing.pieces.pop(1)
    for place in range(3):
        one.offer(place)
    assert wire.waits == [{(0, 0)}]


def test_waiting_is_for_the_oldest_layer_alone() -> None:
    wire = Recording(Calm(1))
    one = Pass([[40, 70], [40], [3, 3], [70]], 2, wire, 1)
    for place in range(len(one.groups)):
        one.offer(place)
    layers = [{one.layer_of[key] for key in keys} for keys in wire.waits]
    assert layers == [{0}, {1}]
    one.sending.finish()


def test_an_error_of_the_wire_is_raised_where_the_next_layer_would_begin() -> None:
    class Stuck(Recording):
        def wait(self, keys: set[tuple[int, int]], deadline: Deadline) -> None:
            raise PeerStalled("trainer rank 0 waits for worker rank 0 to read")

    one = Pass([[40], [40]], 1, Stuck(Calm(1)), 0)
    with pytest.raises(PeerStalled, match="waits for worker rank 0"):
        one.offer(0)


# Writes


@pytest.mark.parametrize("lookahead", [None, 0, 1, 3])
def test_a_parameter_that_is_written_while_it_can_be_read(lookahead: int | None) -> None:
    one = Pass([[40, 70], [40]], 1, Recording(Calm(1)), lookahead)
    one.offer(0)
    one.tensors[0].add_(1)
    words = "parameter 'layers.0.w0' was written while workers were reading it: send between optimiser steps"

    def rest() -> None:
        for place in (1, 2):
            one.offer(place)
        one.offering.check_unwritten()

    with pytest.raises(TransferError, match=words) as caught:
        rest()
    assert caught.value.parameter == "layers.0.w0"
    assert caught.value.transport == "sharded_rdt"


def test_a_write_through_another_tensor_of_the_same_memory() -> None:
    one = Pass([[40]], 1, Recording(Calm(1)), None)
    base = torch.zeros(80, dtype=torch.uint8)
    one.offer(0, base[:40].detach())
    base.zero_()
    with pytest.raises(TransferError, match=r"'layers\.0\.w0'"):
        one.offering.check_unwritten()


def test_a_write_to_the_last_parameter() -> None:
    one = Pass([[40], [40]], 1, Recording(Calm(1)), 0)
    one.offer(0)
    one.offer(1)
    one.tensors[1].add_(1)
    one.sending.finish()
    with pytest.raises(TransferError, match=r"'layers\.1\.w0'"):
        one.offering.check_unwritten()


def test_writes_that_do_no_harm() -> None:
    one = Pass([[40, 3], [40], [40]], 1, Recording(Calm(1)), 0)
    one.tensors[0].add_(1)  # before it is offered
    one.offer(0)
    one.offer(1)
    one.tensors[0].add_(1)  # its layer has been read
    one.tensors[1].add_(1)  # it was packed
    one.offer(2)
    with torch.inference_mode():  # has no version to look at
        unversioned = torch.zeros(40, dtype=torch.uint8)
    one.offer(3, unversioned)
    one.sending.finish()
    one.offering.check_unwritten()
    one.offering.check_unwritten()
