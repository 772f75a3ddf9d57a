from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest
import torch

from plugins.sparse.tests.tracked import TrackedSource, Truth, flip, tensors
from plugins.sparse.tests.tracked import made as made
from plugins.sparse.tests.tracked import small_parts as small_parts
from weightwire.errors import MessageError
from weightwire.layout import ParamMeta
from weightwire.source import StateDictSource
from weightwire_sparse import snapshot
from weightwire_sparse.changes import Changes
from weightwire_sparse.memory import Recorder
from weightwire_sparse.snapshot import CopySnapshot, Part
from weightwire_sparse.tracker import DeltaTracker


def test_an_error_of_what_was_begun_ahead_is_raised_by_find(
    made: Callable[..., DeltaTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = made(StateDictSource(tensors({"a": 3000})))
    tracker.take()

    def compare(*arguments: object) -> None:
        raise MemoryError("no room for what was found")

    with monkeypatch.context() as patch:
        patch.setattr(CopySnapshot, "compare", compare)
        tracker.look(["a"])
    with pytest.raises(MemoryError, match="no room"):
        tracker.find()
    assert not tracker.ready


def test_what_was_looked_at_is_not_compared_again(
    made: Callable[..., DeltaTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    class Heard(CopySnapshot):
        def compare(self, recorder: Recorder, part: Part) -> list[Changes]:
            compared.append(part.number)
            return super().compare(recorder, part)

    monkeypatch.setattr(snapshot, "CopySnapshot", Heard)
    weights = tensors({"a": 3000, "b": 3000, "c": 3000, "d": 3000})
    tracker = made(StateDictSource(weights))
    mark = tracker.take()
    for tensor in weights.values():
        tensor[5] = 99
    tracker.look(["a", "b", "c"])
    tracker.look(["a"])
    weights["b"][6] = 98
    weights["c"] = weights["c"].clone()
    weights["c"][7] = 97
    tracker.find()
    found = tracker.since(mark)
    assert found is not None
    assert found.addresses.tolist() == [5, 3005, 3006, 6005, 6007, 9005]
    assert (
        found.values.tobytes()
        == torch.tensor([99, 99, 98, 99, 97, 99.0]).bfloat16().view(torch.uint8).numpy().tobytes()
    )
    once = compared.count(3)
    assert [compared.count(number) for number in range(4)] == [once, 2 * once, 2 * once, once]


def test_looking_from_many_threads_while_it_finds(made: Callable[..., DeltaTracker]) -> None:
    metadata = [ParamMeta(f"p{place}", torch.bfloat16, (700,)) for place in range(12)]
    source = TrackedSource(metadata, 0, Random(0), resident=True)
    tracker, random, ended = made(source), Random(1), threading.Event()
    truth, errors = Truth(tracker, source), []

    def look(seed: int) -> None:
        mine = Random(seed)
        try:
            while not ended.is_set():
                tracker.look([mine.choice(metadata).name])
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(3)]
    mark = tracker.take()
    truth.states[mark] = truth.present()
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
            source.change(random, 0.05)
            if number == 6:
                mark = tracker.take()
                truth.states = {mark: truth.present()}
                continue
            before, mark = mark, tracker.find()
            truth.states[mark] = truth.present()
            truth.looked.add(mark)
            found = tracker.since(before)
            assert found is not None
            truth.check(before, found)
    finally:
        ended.set()
        for thread in threads:
            thread.join(20)
    assert not errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex128])
def test_a_sample_tells_how_much_changes(made: Callable[..., DeltaTracker], dtype: torch.dtype) -> None:
    weights = tensors({"a": 1_000_000, "b": 10}, dtype) | {f"c{place}": torch.zeros(100, 20) for place in range(99)}
    tracker = made(StateDictSource(weights))
    assert tracker.sampled() is None
    assert tracker.sampled() == 0.0
    for tensor in weights.values():
        flip(tensor, Random(1), 0.25)
    share = tracker.sampled()
    assert share is not None and share == pytest.approx(0.25, abs=0.05)
    flip(weights["a"], Random(1), 1.0)
    for place in range(99):
        weights[f"c{place}"].t_()
        weights[f"c{place}"] = weights[f"c{place}"].contiguous().t()
    share = tracker.sampled()
    assert share is not None and share > 0.8
    assert not tracker.ready


def test_a_sample_holds_some_of_each_large_piece(made: Callable[..., DeltaTracker]) -> None:
    weights = {name: torch.zeros(300_000) for name in "abcd"}
    tracker = made(StateDictSource(weights))
    tracker.sampled()
    for tensor in weights.values():
        flip(tensor, Random(1), 1.0)
        share = tracker.sampled()
        assert share is not None and 0.2 < share < 0.3


def test_an_unknown_name_cannot_be_looked_at(made: Callable[..., DeltaTracker]) -> None:
    tracker = made(StateDictSource(tensors({"a": 3})))
    tracker.look(["a"])  # no snapshot yet: ignored
    with pytest.raises(MessageError, match="'b'"):
        tracker.look(["b"])
