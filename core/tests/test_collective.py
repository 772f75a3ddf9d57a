from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from core.tests.collective_ranks import (
    KIB,
    MIB,
    State,
    close_all,
    connect,
    connect_all,
    connected,
    content,
    finish_receive,
    post_receive,
    receive,
    resources,
    send,
    settle_at,
)
from weightwire import wires
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, OrderError, TransferError
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool_rank import at_tidy

PIECE = 64 * KIB
GLOO_SECONDS = 1.0
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE // 2, 0, 40 * PIECE]


@pytest.mark.parametrize("window", [1, 2, 8])
def test_one_to_one(strict_ranks: BorrowRanks, tmp_path: Path, window: int) -> None:
    lent = first, second = connected(strict_ranks, 2, tmp_path, piece_bytes=PIECE, window=window)
    sent = first.start(send, SIZES, [1])
    assert second.call(receive, SIZES, 0)
    sent.result()
    close_all(lent)


@pytest.mark.parametrize("collective", [False, True])
def test_messages_of_several_buffers(strict_ranks: BorrowRanks, tmp_path: Path, collective: bool) -> None:
    lent = connected(strict_ranks, 3, tmp_path, piece_bytes=PIECE, window=2, collective=collective, senders=[0])
    calls = [rank.start(move_messages, number) for number, rank in enumerate(lent)]
    assert all(call.result() for call in calls)
    close_all(lent)


def move_messages(state: State, rank: int) -> bool:
    """Messages whose buffers fill parcels in part, to the byte and several times over."""
    communicator: TorchCommunicator = state["communicator"]
    deadline = Deadline(20)
    messages = [SIZES, [PIECE, PIECE], [1] * 40, [], [0], [2 * PIECE - 1, 1, 2 * PIECE + 1, 5]]
    sent = [[content(size, seed) for seed, size in enumerate(sizes)] for sizes in messages]
    if rank == 0:
        handles = [communicator.send(buffers, [1, 2], deadline=deadline) for buffers in sent]
        received = sent
    else:
        received = [[torch.zeros_like(buffer) for buffer in buffers] for buffers in sent]
        handles = [communicator.receive(buffers, 0, deadline=deadline) for buffers in received]
    for handle in handles:
        handle.wait(deadline)
    return all(map(torch.equal, itertools.chain(*received), itertools.chain(*sent)))


@pytest.mark.parametrize("collective", [False, True])
def test_one_to_two(strict_ranks: BorrowRanks, tmp_path: Path, collective: bool) -> None:
    lent = connected(strict_ranks, 3, tmp_path, piece_bytes=PIECE, collective=collective, senders=[0])
    sent = lent[0].start(send, SIZES, [1, 2])
    received = [rank.start(receive, SIZES, 0) for rank in lent[1:]]
    assert all(call.result() for call in received)
    sent.result()
    close_all(lent)


@pytest.mark.parametrize("collective", [False, True])
def test_a_rank_that_comes_late_costs_nobody_the_link(
    strict_ranks: BorrowRanks, tmp_path: Path, collective: bool
) -> None:
    """The first two stand in gloo's constructor, each for longer than gloo itself would wait, for the third."""
    lent = first, second, late = strict_ranks(3)
    for rank in lent:
        rank.call(have_gloo_wait, GLOO_SECONDS)
    options: State = {"collective": collective, "senders": [0]}
    calls = [
        rank.start(connect, number, 3, str(tmp_path / "store"), **options)
        for number, rank in enumerate((first, second))
    ]
    time.sleep(2 * GLOO_SECONDS)
    late.call(connect, 2, 3, str(tmp_path / "store"), **options)
    for call in calls:
        call.result()
    sent = first.start(send, SIZES, [1, 2])
    received = [rank.start(receive, SIZES, 0) for rank in (second, late)]
    assert all(call.result() for call in received)
    sent.result()
    close_all(lent)


def have_gloo_wait(state: State, seconds: float) -> None:
    at_tidy(partial(setattr, wires, "_CONNECT_SECONDS", wires._CONNECT_SECONDS))
    wires._CONNECT_SECONDS = seconds


@pytest.mark.parametrize("collective", [False, True])
def test_two_senders_to_two_receivers(strict_ranks: BorrowRanks, tmp_path: Path, collective: bool) -> None:
    lent = connected(strict_ranks, 4, tmp_path, piece_bytes=PIECE, collective=collective, senders=[0, 1])
    for rank in lent[:2]:
        rank.start(send, SIZES, [2, 3])
    received = [rank.start(receive_from_both, SIZES) for rank in lent[2:]]
    assert all(call.result() for call in received)
    close_all(lent)


def receive_from_both(state: State, sizes: list[int]) -> bool:
    return receive(state, sizes, 0) and receive(state, sizes, 1)


def test_both_ways_at_once(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    lent = connected(strict_ranks, 2, tmp_path, piece_bytes=PIECE)
    calls = [rank.start(exchange, 7 * PIECE + 5, 1 - number) for number, rank in enumerate(lent)]
    assert [call.result() for call in calls] == [True, True]
    close_all(lent)


def exchange(state: State, size: int, peer: int) -> bool:
    communicator: TorchCommunicator = state["communicator"]
    deadline = Deadline(20)
    incoming = torch.zeros(size, dtype=torch.uint8)
    handles = [
        communicator.send([content(size, 1 - peer)], [peer], deadline=deadline),
        communicator.receive([incoming], peer, deadline=deadline),
    ]
    communicator.flush(deadline)
    return all(handle.done for handle in handles) and torch.equal(incoming, content(size, peer))


DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]


def test_every_dtype_as_bytes(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    lent = first, second = connected(strict_ranks, 2, tmp_path)
    sent = first.start(move_dtypes, sending=True)
    assert second.call(move_dtypes, sending=False)
    assert sent.result()
    close_all(lent)


def move_dtypes(state: State, sending: bool) -> bool:
    communicator, deadline, same = state["communicator"], Deadline(20), True
    for seed, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        expected = content(24 * dtype.itemsize, seed)
        buffer = torch.empty(24, dtype=dtype).reshape(-1).view(torch.uint8)
        if sending:
            buffer.copy_(expected)
            communicator.send([buffer], [1], deadline=deadline).wait(deadline)
        else:
            communicator.receive([buffer], 0, deadline=deadline).wait(deadline)
        same = same and torch.equal(buffer, expected)
    return same


def test_a_bad_call_is_refused_and_harms_nothing(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    lent = connected(strict_ranks, 3, tmp_path, senders=[0], collective=True)
    refusals = lent[0].call(refused)
    assert refusals == ["ValueError"] * 8
    sent = lent[0].start(send, [1000], [1, 2])
    received = [rank.start(receive, [1000], 0) for rank in lent[1:]]
    assert all(call.result() for call in received)
    sent.result()
    close_all(lent)


def refused(state: State) -> list[str]:
    communicator: TorchCommunicator = state["communicator"]
    deadline = Deadline(5)
    good = torch.zeros(8, dtype=torch.uint8)
    bad: list[Callable[[], object]] = [
        lambda: communicator.send([torch.zeros(8)], [1, 2], deadline=deadline),
        lambda: communicator.send([torch.zeros(8, dtype=torch.int8)], [1, 2], deadline=deadline),
        lambda: communicator.send([good.reshape(2, 4)], [1, 2], deadline=deadline),
        lambda: communicator.send([good[::2]], [1, 2], deadline=deadline),
        lambda: communicator.send([good.to("meta")], [1, 2], deadline=deadline),
        lambda: communicator.send([good], [1], deadline=deadline),
        lambda: communicator.send([good], [0, 3], deadline=deadline),
        lambda: communicator.receive([good], 1, deadline=deadline),
    ]
    kinds = []
    for call in bad:
        try:
            call()
        except ValueError as error:
            kinds.append(type(error).__name__)
    return kinds


def test_a_full_window_blocks_until_the_deadline(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, _ = connected(ranks, 2, tmp_path, piece_bytes=PIECE, window=2)
    assert first.call(send_nobody_receives, 2 * PIECE) == "queued"
    with pytest.raises(DeadlineExceeded, match="the transfer with rank 1 did not end within 0\\.3 s"):
        first.call(send_nobody_receives, 1)
    with pytest.raises(TransferError, match="an earlier transfer failed, DeadlineExceeded"):
        first.call(send_nobody_receives, 0)


def send_nobody_receives(state: State, size: int) -> str:
    state["communicator"].send([torch.zeros(size, dtype=torch.uint8)], [1], deadline=Deadline(0.3))
    return "queued"


def test_nothing_is_left_after_many_lives(strict_ranks: BorrowRanks, tmp_path: Path) -> None:
    lent = strict_ranks(2)
    before = [rank.call(resources) for rank in lent]
    for life in range(20):
        connect_all(lent, tmp_path / str(life))
        sent = lent[0].start(send, [100], [1])
        assert lent[1].call(receive, [100], 0)
        sent.result()
        close_all(lent)
    assert [rank.call(settle_at, one) for rank, one in zip(lent, before, strict=True)] == before


def test_what_was_sent_arrives_after_the_sender_closed_and_died(ranks: BorrowRanks, tmp_path: Path) -> None:
    first, second = connected(ranks, 2, tmp_path, piece_bytes=MIB)
    second.call(post_receive, 8 * MIB, 0)
    first.call(send_and_close, 8 * MIB)
    first.kill()
    assert second.call(finish_receive)


def send_and_close(state: State, size: int) -> None:
    deadline = Deadline(10)
    state["communicator"].send([torch.zeros(size, dtype=torch.uint8)], [1], deadline=deadline).wait(deadline)
    state["communicator"].close(deadline)


def test_alone() -> None:
    communicator = TorchCommunicator(
        None, rank=0, world_size=1, labels=["trainer rank 0"], device="cpu", deadline=Deadline(5)
    )
    communicator.flush(Deadline(1))
    communicator.close(Deadline(1))
    communicator.close(Deadline(1))
    assert not communicator.failed
    with pytest.raises(OrderError, match="closed"):
        communicator.flush(Deadline(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2},
        {"labels": ["one"]},
        {"piece_bytes": 0},
        {"window": 0},
        {"stall_limit": 0.0},
        {"senders": []},
        {"senders": [0, 0]},
        {"senders": [2]},
    ],
    ids=str,
)
def test_numbers_that_do_not_fit(wrong: dict[str, object]) -> None:
    options = {"rank": 0, "world_size": 2, "labels": ["a", "b"], "device": "cpu", "deadline": Deadline(1)} | wrong
    with pytest.raises(ValueError):
        TorchCommunicator(None, **options)  # type: ignore[arg-type]


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(TransferError, match="cannot listen on '203\\.0\\.113\\.1'"):
        TorchCommunicator(
            None,
            rank=0,
            world_size=2,
            labels=["a", "b"],
            device="cpu",
            deadline=Deadline(1),
            hostname="203.0.113.1",
        )


def move_on_cuda(state: State, rank: int, world: int, store: str, collective: bool) -> bool:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    communicator = TorchCommunicator(
        FileStore(store, world),
        rank=rank,
        world_size=world,
        labels=[f"rank {other}" for other in range(world)],
        device=device,
        deadline=Deadline(50),
        senders=[0],
        collective=collective,
    )
    deadline = Deadline(50)
    expected = content(40 * MIB + 5, 1)
    buffer = expected.to(device) if rank == 0 else torch.zeros(expected.numel(), dtype=torch.uint8, device=device)
    if rank == 0:
        communicator.send([buffer], range(1, world), deadline=deadline).wait(deadline)
    else:
        communicator.receive([buffer], 0, deadline=deadline).wait(deadline)
    communicator.close(deadline)
    return torch.equal(buffer.cpu(), expected)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of two ranks")
@pytest.mark.parametrize("collective", [False, True])
def test_one_to_many_on_cuda(ranks: BorrowRanks, tmp_path: Path, collective: bool) -> None:
    world = torch.cuda.device_count()
    calls = [
        rank.start(move_on_cuda, number, world, str(tmp_path / "store"), collective)
        for number, rank in enumerate(ranks(world))
    ]
    assert all(call.result() for call in calls)
