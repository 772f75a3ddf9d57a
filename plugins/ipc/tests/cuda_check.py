"""What needs a GPU, in one run of a few minutes on one: `python -m plugins.ipc.tests.cuda_check`.

A trainer and a worker in a process each, both on the same GPU. Test modules run the same checks with less.
"""

# ruff: noqa: T201 - a program that prints
from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightwire.errors import PeerFailed, PeerLost
from weightwire.registry import WeightTransferTrainerFactory
from weightwire.report import GIB
from weightwire.source import ModuleSource, as_bytes
from weightwire.testing.fixtures import BorrowRanks
from weightwire.testing.pool import Rank, RankPool
from weightwire.testing.workers import RankClient, host_workers
from weightwire_ipc.messages import IPCTrainerInitInfo
from weightwire_ipc.pickled import VARIABLE

State = dict[str, Any]
BLOCK_BYTES = 32 << 20
CALL_SECONDS = 120.0


class JSONClient(RankClient):
    """Marked as a client over HTTP, so that handles come pickled."""

    base_url = "a worker's rank"


# Runs in a rank


def weights(state: State, value: float = 0.0, nbytes: int = 2 * BLOCK_BYTES) -> nn.Module:
    """A model of `nbytes` on the GPU, and small parameters of odd sizes before wider ones."""
    torch.cuda.set_device(0)
    model = state["model"] = nn.Module()
    shapes = [(3,), (4, 5), (0, 4)] + [(BLOCK_BYTES // 2048, 1024)] * max(1, nbytes // BLOCK_BYTES)
    for place, shape in enumerate(shapes):
        dtype = torch.float32 if shape == (4, 5) else torch.bfloat16
        data = torch.full(shape, value + place, dtype=dtype, device="cuda")
        model.register_parameter(f"block_{place}", nn.Parameter(data, requires_grad=False))
    return model


def open_trainer(state: State, client: Any, nbytes: int, **info: Any) -> None:
    """A trainer of such a model."""
    model = weights(state, 1.0, nbytes)
    state["trainer"] = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(timeout=CALL_SECONDS, **info), client=client, source=ModuleSource(model)
    )


def send(state: State, client: Any = None) -> dict[str, Any]:
    """Change every parameter and send; returns the report."""
    if client is not None:
        state["trainer"].client = client
    for parameter in state["model"].parameters():
        parameter.add_(1)
    report: dict[str, Any] = state["trainer"].send_weights().to_json()
    return report


def close(state: State) -> None:
    """Leave the workers."""
    state.pop("trainer").shutdown()


def checksums(state: State) -> dict[str, str]:
    """SHA-256 of every parameter's bytes."""
    return {
        name: hashlib.sha256(as_bytes(parameter.cpu()).numpy().tobytes()).hexdigest()
        for name, parameter in state["model"].named_parameters()
    }


def usage(state: State) -> dict[str, int]:
    """What this process holds: bytes on the GPU, and descriptors."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    held = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return held | {"descriptors": len(os.listdir("/proc/self/fd"))}


def allow_pickled(state: State) -> None:
    """Have this rank's worker read pickled handles."""
    os.environ[VARIABLE] = "1"


def copy_speed(state: State, nbytes: int) -> float:
    """GiB/s of a copy from one part of the GPU's memory to another: the best of five."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source)
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1000)
    return nbytes / GIB / best


# The checks


def equal(trainer: Rank, client: RankClient) -> None:
    """Fail unless every worker holds the trainer's bytes."""
    sent = trainer.call(checksums, timeout=CALL_SECONDS)
    for held in client.checksums():
        assert held == sent, "a worker holds other bytes than the trainer"


def flat(before: list[dict[str, int]], ranks: list[Rank]) -> None:
    """Fail if a rank holds another amount of the GPU than before, or more descriptors."""
    for rank, held in zip(ranks, before, strict=True):
        now = rank.call(usage)
        # The connection of a call that has just been answered may still be open.
        now["descriptors"] = max(held["descriptors"], now["descriptors"] - 3)
        assert now == held, f"{rank} held {held} and now holds {now}"


def speed(report: dict[str, Any]) -> float:
    """GiB/s of a round's transfer, which has to have gone through the GPU's memory."""
    assert "CUDA IPC" in report["path"], f"the bytes took another way: {report['path']}"
    return float(report["bytes"] / GIB / report["seconds"]["transfer"])


def check_rounds(ranks: BorrowRanks, *, packed: bool, rounds: int = 20, nbytes: int = 2 * BLOCK_BYTES) -> float:
    """Rounds over weightwire's own wire: bytes equal, memory and descriptors flat. Returns the last one's GiB/s."""
    trainer, worker = ranks(2)
    client = host_workers([worker], weights, 0.0, nbytes)
    options = {"packed_buffer_size_bytes": BLOCK_BYTES} if packed else {}
    trainer.call(open_trainer, client, nbytes, memory="device", packed=packed, **options, timeout=CALL_SECONDS)
    before: list[dict[str, int]] = []
    for number in range(rounds):
        report = trainer.call(send, timeout=CALL_SECONDS)
        if number in (0, rounds // 2, rounds - 1):
            equal(trainer, client)
        if number == min(3, rounds - 2):
            before = [rank.call(usage) for rank in (trainer, worker)]
    flat(before, [trainer, worker])
    trainer.call(close, timeout=CALL_SECONDS)
    return speed(report)


def check_kill(ranks: BorrowRanks, *, point: str = "worker.received", nbytes: int = 2 * BLOCK_BYTES) -> None:
    """A worker is killed in mid-round: the trainer says so, serves the next one, and holds no more than before."""
    trainer, first, second = ranks(3)
    clients = [host_workers([rank], weights, 0.0, nbytes) for rank in (first, second)]
    trainer.call(
        open_trainer,
        clients[0],
        nbytes,
        memory="device",
        packed=True,
        packed_buffer_size_bytes=BLOCK_BYTES,
        peer_timeout=5.0,
        timeout=CALL_SECONDS,
    )
    trainer.call(send, timeout=CALL_SECONDS)
    before = trainer.call(usage)["allocated"]
    first.at(point, "kill")
    error = trainer.start(send).exception(CALL_SECONDS)
    assert isinstance(error, PeerLost | PeerFailed), f"the trainer says {error!r}"
    for _ in range(2):
        trainer.call(send, clients[1], timeout=CALL_SECONDS)
        equal(trainer, clients[1])
    after = trainer.call(usage)["allocated"]
    assert after <= before, f"the trainer holds {after} bytes of the GPU, and {before} before the worker was killed"
    trainer.call(close, timeout=CALL_SECONDS)


def check_stock(
    ranks: BorrowRanks, *, packed: bool, pickled: bool, rounds: int = 5, nbytes: int = 2 * BLOCK_BYTES
) -> float:
    """Rounds over vLLM's wire, to a worker that takes them as a stock one. Returns the last one's GiB/s."""
    trainer, worker = ranks(2)
    worker.call(allow_pickled)
    client = host_workers([worker], weights, 0.0, nbytes, backend="ipc")
    if pickled:
        client = JSONClient(client.addresses, client.labels)
    trainer.call(
        open_trainer,
        client,
        nbytes,
        wire="vllm",
        packed=packed,
        packed_buffer_size_bytes=BLOCK_BYTES,
        timeout=CALL_SECONDS,
    )
    before: list[dict[str, int]] = []
    for number in range(rounds):
        report = trainer.call(send, timeout=CALL_SECONDS)
        equal(trainer, client)
        if number == min(2, rounds - 2):
            before = [rank.call(usage) for rank in (trainer, worker)]
    flat(before, [trainer, worker])
    trainer.call(close)
    return speed(report)


def main() -> int:
    """Run every check; prints one line each and returns the exit status."""
    parser = argparse.ArgumentParser(description="Check backend ipc on one GPU: a trainer and a worker process.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model in GiB (four are held at most)")
    nbytes = int(parser.parse_args().gib * GIB)
    if torch.cuda.device_count() == 0:
        print("cuda_check: this machine has no CUDA device, so nothing was checked", file=sys.stderr)
        return 1
    checks: dict[str, Callable[[BorrowRanks], float | None]] = {
        "unpacked": lambda ranks: check_rounds(ranks, packed=False, nbytes=nbytes),
        "packed": lambda ranks: check_rounds(ranks, packed=True, nbytes=nbytes),
        "worker killed": check_kill,
        "vLLM's wire": lambda ranks: check_stock(ranks, packed=False, pickled=False, nbytes=nbytes),
        "vLLM's wire, packed": lambda ranks: check_stock(ranks, packed=True, pickled=False, nbytes=nbytes),
        "vLLM's wire, pickled": lambda ranks: check_stock(ranks, packed=False, pickled=True, nbytes=nbytes),
    }
    with RankPool() as pool:
        with pool.ranks(1) as (alone,):
            floor = alone.call(copy_speed, nbytes, timeout=CALL_SECONDS)
        print(f"{'copy within the GPU':24} {floor:8.1f} GiB/s")
        failed = [name for name, check in checks.items() if not passed(pool, name, check, floor)]
    return 1 if failed else 0


def passed(pool: RankPool, name: str, check: Callable[[BorrowRanks], float | None], floor: float) -> bool:
    """Run one check with ranks of its own and print how it went."""
    borrowed: list[Rank] = []

    def borrow(count: int) -> list[Rank]:
        # Fresh ones: what an earlier check left on the GPU would count.
        more = pool.borrow(count, fresh=True)
        borrowed.extend(more)
        return more

    try:
        reached = check(borrow)
    except Exception as error:  # noqa: BLE001 - printed, and the exit status tells
        print(f"{name:24} FAILED: {type(error).__name__}: {error}")
        return False
    finally:
        for rank in borrowed:
            rank.kill()
        pool.give_back(borrowed)
    told = "ok" if reached is None else f"{reached:8.1f} GiB/s, {reached / floor:.2f} of the copy"
    print(f"{name:24} {told}")
    return True


if __name__ == "__main__":
    raise SystemExit(main())
