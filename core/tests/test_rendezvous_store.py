from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from core.tests.epochs import LIMIT, Epoch, error_of
from core.tests.test_rendezvous_processes import enter, exchange, host, world
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, MessageError, PeerLost, TransferAborted, TransferError
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_rank import at_tidy

PROMPT = 2.0


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: PrefixStore("sub", store)], ids=["bare", "prefix"])
def test_it_is_a_store(wrap: Callable[[Any], Any]) -> None:
    with Epoch(workers=1) as epoch:
        first, second, other = (
            wrap(epoch.members[rank].store(prefix, Deadline(LIMIT))) for rank, prefix in ((0, "a"), (1, "a"), (1, "b"))
        )
        first.set("bytes", b"\x00\xff")
        first.set("text", "ä")
        assert (second.get("bytes"), second.get("text")) == (b"\x00\xff", "ä".encode())
        assert [second.check(keys) for keys in (["bytes"], ["bytes", "none"])] == [True, False]
        assert not other.check(["bytes"])
        assert [first.add("count", 2), second.add("count", -5)] == [2, -3]
        assert first.get("count") == b"-3"
        second.wait(["bytes", "text"])
        second.wait(["bytes", "text"], timedelta(seconds=1))
        assert second.num_keys() == 3
        assert [second.delete_key("text"), second.delete_key("text")] == [True, False]
        assert second.num_keys() == 2
        assert other.num_keys() == 0
        with pytest.raises(MessageError, match="the value of .*bytes' is not a number"):
            second.add("bytes", 1)
        second.multi_set(["x", "y"], ["1", "2"])
        assert first.multi_get(["x", "y"]) == [b"1", b"2"]


def test_a_wait_ends_when_the_key_comes() -> None:
    with Epoch() as epoch:
        stores = [member.store("a", Deadline(LIMIT)) for member in epoch.members]
        gets = [epoch.start(rank, lambda member: stores[member.rank].get("key")) for rank in range(3)]
        stores[2].wait([], None)  # answered at once, and after the get of this member is parked or not: both are fine
        stores[1].set("key", b"value")
        assert [get.result(LIMIT) for get in gets] == [b"value"] * 3


def test_a_wait_that_takes_too_long_says_who_wrote_nothing_and_leaves_the_epoch_alone() -> None:
    with Epoch(workers=3) as epoch:
        epoch.members[2].store("a", Deadline(LIMIT)).set("here", "1")
        store = epoch.members[1].store("a", Deadline(0.2), ranks=[1, 2, 3])
        match = r"get of there in the store 'a' did not end within 0.2 s: nothing was written by worker rank 0 \(pid"
        with pytest.raises(DeadlineExceeded, match=match) as raised:
            store.get("there")
        assert "worker rank 2 (pid" in str(raised.value)
        assert "worker rank 1" not in str(raised.value)
        patient = epoch.members[1].store("a", Deadline(LIMIT))
        with pytest.raises(DeadlineExceeded, match="did not end within 0.1 s"):
            patient.wait(["there"], timedelta(seconds=0.1))
        epoch.members[2].store("a", Deadline(LIMIT)).set("there", "2")
        assert patient.get("there") == b"2"
        assert all(outcome.unanimous for outcome in epoch.all_exchange("after"))


def test_a_wait_can_be_cancelled_and_ends_with_the_epoch() -> None:
    with Epoch(workers=1) as epoch:
        deadline, reason = Deadline(LIMIT), TransferAborted("abort")
        cancelled = epoch.start(1, lambda member: member.store("a", deadline).get("never"))
        failed = epoch.start(1, lambda member: member.store("b", Deadline(LIMIT)).get("never"))
        deadline.cancel(reason)
        assert error_of(cancelled) is reason
        epoch.members[0].fail(TransferError("enough"))
        assert "enough" in str(error_of(failed))


def test_who_leaves_while_others_wait_for_a_key_is_named() -> None:
    with Epoch(workers=1) as epoch:
        waiting = epoch.start(0, lambda member: member.store("a", Deadline(LIMIT)).get("never"))
        epoch.members[1].close()
        error = error_of(waiting)
        assert isinstance(error, PeerLost)
        assert "worker rank 0 (pid" in str(error)
        assert "others wait for a key" in str(error)


def build(state: dict[str, Any], size: int, seconds: float = LIMIT) -> None:
    """Make a gloo group of `size` members over the store."""
    member = state["member"]
    store = state["store"] = member.store("gloo", Deadline(seconds), ranks=range(size))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=member.local_address)]
    options._timeout = timedelta(seconds=LIMIT)
    state["group"] = ProcessGroupGloo(PrefixStore("0", store), member.rank, size, options)
    at_tidy(lambda: state.pop("group"))


def broadcast(state: dict[str, Any], root: int, size: int) -> list[float]:
    rank = state["member"].rank
    tensor = torch.arange(size, dtype=torch.float32) if rank == root else torch.full((size,), float("nan"))
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    state["group"].broadcast([tensor], options).wait()
    return [tensor.sum().item(), tensor[-1].item()]


def test_gloo_stands_on_it_and_moves_bytes(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 3)
    for pending in [member.start(build, 3) for member in members]:
        pending.result(LIMIT)
    for root in range(3):
        sums = [member.start(broadcast, root, 1000) for member in members]
        assert [pending.result(LIMIT) for pending in sums] == [[499500.0, 999.0]] * 3
    met = [member.start(exchange, "connected") for member in members]
    assert all(pending.result(LIMIT) for pending in met)


def test_gloo_without_one_rank_says_in_time_which(strict_ranks: BorrowRanks) -> None:
    members = world(strict_ranks, 3)
    began = time.monotonic()
    building = [members[number].start(build, 3, 1.0) for number in (0, 1)]
    for pending in building:
        with pytest.raises(
            DeadlineExceeded, match=r"nothing was written by worker rank 1 \(pid \d+\) is still in hello"
        ):
            pending.result(LIMIT)
    assert time.monotonic() - began < 1.0 + PROMPT


def test_gloo_that_loses_a_rank_while_it_is_built_says_which(strict_ranks: BorrowRanks) -> None:
    members = strict_ranks(3)
    port = members[0].call(host, 2)
    for number in (1, 2):
        members[number].call(enter, port, number)
    building = [members[number].start(build, 3) for number in (0, 1)]
    began = time.monotonic()
    members[2].kill()
    for pending in building:
        with pytest.raises(PeerLost, match=r"worker rank 1 \(pid \d+\) was lost during join"):
            pending.result(LIMIT)
    assert time.monotonic() - began < PROMPT
