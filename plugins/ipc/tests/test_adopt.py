"""Workers that compute on memory they share: one copy for all, never written while somebody looks, nothing stray."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plugins.ipc.tests.fleet import (
    Scene,
    blocks,
    close,
    details,
    digests,
    holdings,
    info,
    leave,
    loading,
    model_digests,
    send,
    settled,
    zoo,
)
from weightwire.errors import PeerLost
from weightwire.testing.fixtures import BorrowRanks

State = dict[str, Any]

MODEL = 8 << 20


def memory_files(state: State) -> dict[str, dict[str, int]]:
    """Of every memory file mapped here, by inode: bytes that are resident, and that are this process's own."""
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] | None = None
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                mine = "/memfd:weightwire" in line
                current = found.setdefault(words[4], {"Rss:": 0, "Anonymous:": 0, "Size:": 0}) if mine else None
            elif current is not None and words[0] in current:
                current[words[0]] += int(words[1]) << 10
    return found


def private_bytes(state: State) -> int:
    """Memory that is this process's alone."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


def inode_of(state: State) -> str:
    """The memory file that the first parameter lies in."""
    address = next(state["model"].parameters()).data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            words = line.split()
            start, end = (int(one, 16) for one in words[0].split("-"))
            if start <= address < end:
                return words[4]
    raise AssertionError("a parameter lies nowhere")


def addresses(state: State) -> list[int]:
    """Where the parameters lie."""
    return [parameter.data_ptr() for parameter in state["model"].parameters()]


def test_all_workers_compute_on_one_copy_and_rounds_alternate_between_two(strict_ranks: BorrowRanks) -> None:
    scene = Scene(strict_ranks, "adopt")
    before = [rank.call(private_bytes) for rank in scene.workers]
    inodes = []
    for _ in range(6):
        sent = scene.send()
        first, second = (rank.call(inode_of) for rank in scene.workers)
        assert first == second
        inodes.append(first)
    assert inodes == inodes[:2] * 3
    assert inodes[0] != inodes[1]
    for rank, private in zip(scene.workers, before, strict=True):
        files = rank.call(memory_files)
        assert files[inodes[-1]]["Rss:"] >= MODEL
        assert sum(one["Anonymous:"] for one in files.values()) == 0
        assert rank.call(private_bytes) < private + MODEL // 2
    assert "one copy for all that adopt it" in sent["report"]["path"]
    assert [details(sent, f"worker rank {place}")["adopted"] for place in range(2)] == [8, 8]
    scene.trainer.call(close)


def keep_view(state: State) -> None:
    """Hold a view of what is live now, as a cache of the model's might."""
    state["view"] = state["model"].block_2.detach()[4:]


def view_is(state: State) -> float:
    view: Tensor = state["view"]
    assert view.eq(view[0]).all()
    return view[0].item()


def live_is(state: State) -> float:
    value: float = state["model"].block_2[4].item()
    return value


def test_a_view_that_is_held_elsewhere_sees_commits_and_nothing_between(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt")
    scene.send()
    viewer = scene.workers[0]
    viewer.call(keep_view)
    for _ in range(5):
        old = viewer.call(view_is)
        viewer.at("worker.vote", "hold")
        sending = scene.trainer.start(send)
        viewer.reached("worker.vote")
        assert viewer.call(view_is) == viewer.call(live_is) == old
        viewer.let_go("worker.vote")
        sent = sending.result()
        assert viewer.call(view_is) == viewer.call(live_is) == old + 1
        assert [rank.call(model_digests) for rank in scene.workers] == [sent["digests"]] * 2


class Keeping(nn.Module):
    """Loads weights itself, and keeps what it was shown the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        for name, parameter in blocks({}).named_parameters():
            self.register_parameter(name, parameter)

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            KEPT.setdefault(name, tensor)
            with torch.no_grad():
                self.get_parameter(name).copy_(tensor)


KEPT: dict[str, Tensor] = {}


def keeping(state: State, value: float = 0.0) -> nn.Module:
    """A worker's model that keeps what it was shown; a trainer's is as it is."""
    if value:
        return blocks(state, value)
    KEPT.clear()
    state["model"] = model = Keeping()
    return model


def kept_digests(state: State) -> dict[str, str]:
    """Digests of what was kept."""
    model = nn.Module()
    for name, tensor in KEPT.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return digests(model)


def test_memory_that_somebody_still_looks_at_is_not_written(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt", model=keeping)
    shown = scene.send()["digests"]
    for _ in range(5):
        scene.send()
        assert [rank.call(kept_digests) for rank in scene.workers] == [shown] * 2


def write_strays(state: State, *names: str, same: bool = False) -> None:
    """Write into parameters, as a model does that scales its own weights."""
    for name in names:
        data = state["model"].get_parameter(name).data
        data[10] = data[10].item() if same else -99.0


def listen_to_the_log(state: State) -> None:
    """Note warnings."""
    state["heard"] = heard = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("weightwire_ipc").addHandler(Noting(logging.WARNING))


def heard(state: State) -> list[str]:
    words: list[str] = state["heard"]
    logging.getLogger("weightwire_ipc").handlers.clear()
    return words


def test_a_stray_write_is_reported_by_name_reaches_nobody_and_is_gone_with_the_next_round(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt")
    first, second = scene.workers
    first.call(listen_to_the_log)
    scene.send()
    current = scene.send()["digests"]
    first.call(write_strays, "block_3", "block_6")
    assert first.call(model_digests) != current
    assert second.call(model_digests) == current
    assert scene.trainer.call(model_digests) == current
    sent = scene.send()
    assert details(sent, "worker rank 0")["strays"] == ["block_3", "block_6"]
    assert "strays" not in details(sent, "worker rank 1")
    # The memory that was written comes round again.
    for _ in range(4):
        assert "strays" not in details(scene.send(), "worker rank 0")
    (warning,) = first.call(heard)
    assert "2 adopted parameters were written in this process (block_3, block_6 ...)" in warning


def test_a_stray_write_of_what_is_there_anyway_does_not_hide_what_comes_later(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt", workers=1)
    for _ in range(5):
        sent = scene.send()
        assert "strays" not in details(sent, "worker rank 0")
        scene.workers[0].call(write_strays, "block_1", same=True)


def test_a_stray_write_in_the_midst_of_a_round_does_not_hide_what_comes_later(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt", workers=1)
    (worker,) = scene.workers
    for _ in range(4):
        worker.at("worker.vote", "hold")
        sending = scene.trainer.start(send)
        worker.reached("worker.vote")
        worker.call(write_strays, "block_5")
        worker.let_go("worker.vote")
        assert sending.result()["digests"] == worker.call(model_digests)


@pytest.mark.thorough
def test_a_worker_that_is_killed_while_it_adopts_lets_go_of_the_memory(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt")
    old = scene.send()["digests"]
    healthy, lost = scene.workers
    lost.at("ipc.adopted", "kill")
    sending = scene.trainer.start(send)
    with pytest.raises(PeerLost, match=rf"worker rank 1.*{lost.pid}"):
        sending.result()
    scene.check([healthy], old)
    scene.drop(lost)
    inodes = []
    for _ in range(4):
        scene.send()
        inodes.append(healthy.call(inode_of))
    assert len(set(inodes)) == 2
    assert scene.trainer.call(holdings)["mapped"] <= 3


def test_who_has_left_goes_on_serving_whatever_this_trainer_and_the_next_send(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt")
    served = scene.send()["digests"]
    stays, left = scene.workers
    left.call(leave)
    scene.drop(left)
    for _ in range(4):
        scene.send()
        assert left.call(model_digests) == served
    scene.trainer.call(close)
    assert left.call(model_digests) == served
    latest = stays.call(model_digests)
    (other,) = ranks(1)
    scene.open(other, arguments=(50.0,))
    for _ in range(4):
        assert scene.send(trainer=other)["digests"] != latest
        assert left.call(model_digests) == served
    other.kill()
    assert left.call(model_digests) == served


@pytest.mark.parametrize("end", [pytest.param("shut down", marks=pytest.mark.thorough), "killed"])
def test_workers_serve_on_without_their_trainer(ranks: BorrowRanks, end: str) -> None:
    scene = Scene(ranks, "adopt")
    scene.send()
    served = scene.send()["digests"]
    if end == "killed":
        scene.trainer.kill()
    else:
        scene.trainer.call(close)
    for rank in scene.workers:
        settled(lambda rank=rank: rank.call(info)["state"] == "uninitialised")  # type: ignore[misc]
        assert rank.call(info)["weights"] == "whole"
        assert rank.call(model_digests) == served
    (other,) = ranks(1)
    scene.open(other, arguments=(50.0,))
    scene.send(trainer=other)


@pytest.mark.parametrize(
    ("model", "theirs"),
    [(loading, {}), pytest.param(zoo, {"commit": "copy"}, marks=pytest.mark.thorough)],
    ids=["a loader", "fixed addresses"],
)
def test_who_cannot_adopt_copies(ranks: BorrowRanks, model: Any, theirs: dict[str, Any]) -> None:
    scene = Scene(ranks, "adopt", workers=1, model=model, theirs=theirs, trained=(4,), checksum=True)
    before = scene.workers[0].call(addresses)
    for _ in range(3):
        sent = scene.send()
        assert details(sent, "worker rank 0")["adopted"] == 0
        assert "strays" not in details(sent, "worker rank 0")
    if theirs:
        assert scene.workers[0].call(addresses) == before


@pytest.mark.thorough
def test_who_receives_in_place_adopts_too_and_has_no_second_copy(ranks: BorrowRanks) -> None:
    scene = Scene(ranks, "adopt", theirs={"staging": "in_place"})
    for _ in range(3):
        sent = scene.send()
        assert details(sent, "worker rank 1")["adopted"] == 8
    assert len({rank.call(inode_of) for rank in scene.workers}) == 1
