"""Models that load weights themselves."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from core.tests.sink_models import content, push, same_bits, spec_of
from weightwire.errors import TransferAborted, Unsupported, UpdateRefused
from weightwire.loader_sink import LoaderSink

Pairs = Iterable[tuple[str, torch.Tensor]]


class Fused(nn.Module):
    """Loads `q` and `k` into one parameter and ties its head, as serving models do."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 3))
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.never_loaded = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.calls = 0

    def load_weights(self, pairs: Pairs) -> set[str]:
        self.calls += 1
        loaded = set()
        for name, tensor in pairs:
            if name in ("q", "k"):
                row = 0 if name == "q" else 2
                self.qk.data[row : row + 2].copy_(tensor)
            else:
                self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


def weights(state: int) -> dict[str, torch.Tensor]:
    shapes = {"q": torch.zeros(2, 3), "k": torch.zeros(2, 3), "embed.weight": torch.zeros(5, 3)}
    return {name: content(name, like, state) for name, like in shapes.items()}


def holds(model: Fused, new: dict[str, torch.Tensor]) -> bool:
    return (
        same_bits(model.qk, torch.cat([new["q"], new["k"]]))
        and same_bits(model.embed.weight, new["embed.weight"])
        and model.head.weight is model.embed.weight
    )


def test_a_twin_is_loaded_and_its_storages_exchanged() -> None:
    model = Fused()
    sink, objects = LoaderSink(model), dict(model.named_parameters())
    assert (sink.staging, sink.reason) == ("staged", None)
    places = []
    for state in range(1, 5):
        new = weights(state)
        sink.begin(spec_of(new))
        sink.load(new.items())
        assert not holds(model, new)
        sink.prepare()
        assert not holds(model, new)
        report = sink.commit()
        assert (report.copied, report.in_place) == (0, 0)
        assert holds(model, new)
        places.append(model.qk.data_ptr())
    assert places[0] == places[2] != places[1] == places[3]
    assert dict(model.named_parameters()) == objects
    assert model.calls == 0


def test_what_the_loader_leaves_alone_stays_as_it_is_live() -> None:
    model = Fused()
    sink = LoaderSink(model)
    push(sink, weights(1))
    with torch.no_grad():
        model.never_loaded.add_(1)
        model.cache.add_(1)
    cache = model.cache.data_ptr()
    push(sink, {"q": weights(2)["q"]}, "partial")
    assert holds(model, {**weights(1), "q": weights(2)["q"]})
    assert model.never_loaded.tolist() == [4.0, 4.0]
    assert model.cache.data_ptr() == cache
    assert model.cache.tolist() == [1.0] * 4


def test_load_may_be_called_in_chunks() -> None:
    model = Fused()
    sink = LoaderSink(model, staging="in_place")
    new = weights(1)
    sink.begin(spec_of(new))
    for pair in new.items():
        sink.load([pair])
    sink.prepare()
    assert sink.commit().in_place == 3
    assert model.calls == 3
    assert holds(model, new)


def test_bad_input_is_refused_and_nothing_is_lost() -> None:
    model = Fused()
    sink = LoaderSink(model)
    push(sink, weights(1))
    new = weights(2)
    spec = spec_of(new)
    with pytest.raises(UpdateRefused, match="twice"):
        sink.begin(type(spec)((*spec.metadata, spec.metadata[0])))
    cases: list[tuple[list[tuple[str, torch.Tensor]], str]] = [
        ([("q", new["q"]), ("q", new["q"])], "came twice"),
        ([("stranger", new["q"])], "not in this update"),
        ([("q", new["q"][:1])], "came as"),
        ([("q", new["q"])], "2 parameters of the update never came"),
    ]
    for pairs, words in cases:
        sink.begin(spec)
        with pytest.raises(UpdateRefused, match=words):  # noqa: PT012  either of the two may raise
            sink.load(pairs)
            sink.prepare()
        sink.abort()
        assert holds(model, weights(1))
    push(sink, new)
    assert holds(model, new)


def test_what_the_loader_raises_is_told_in_its_words() -> None:
    model = Fused()
    sink, stranger = LoaderSink(model), {"embed.wait": torch.zeros(1)}
    sink.begin(spec_of(stranger))
    with pytest.raises(UpdateRefused, match=r"load_weights of Fused raised at 'embed.wait': AttributeError") as caught:
        sink.load(stranger.items())
    assert caught.value.parameter == "embed.wait"
    assert isinstance(caught.value.__cause__, AttributeError)


def test_an_abort_stops_a_load() -> None:
    model = Fused()
    sink, new = LoaderSink(model), weights(1)

    def pairs() -> Pairs:
        yield "q", new["q"]
        sink.abort()
        yield "k", new["k"]

    sink.begin(spec_of(new))
    with pytest.raises(TransferAborted):
        sink.load(pairs())
    assert not holds(model, new)


def test_in_place_is_torn_by_an_abort_until_a_full_update() -> None:
    model = Fused()
    sink = LoaderSink(model, staging="in_place")
    sink.begin(spec_of(weights(1)))
    sink.load([("q", weights(1)["q"])])
    assert sink.dirty
    sink.abort()
    assert sink.torn
    push(sink, {"q": weights(1)["q"]}, "partial")
    assert sink.torn
    push(sink, weights(1))
    assert not sink.torn
    assert not sink.dirty


def unhashed(model: Fused) -> None:
    model.lock = threading.Lock()  # type: ignore[assignment]


def patched(model: Fused) -> None:
    model.load_weights = lambda pairs: Fused.load_weights(model, pairs)  # type: ignore[method-assign]


@pytest.mark.parametrize(("spoil", "words"), [(unhashed, "cannot be copied: TypeError"), (patched, "not a method")])
def test_without_a_twin_it_is_in_place_and_says_why(spoil: Callable[[Fused], None], words: str) -> None:
    model = Fused()
    spoil(model)
    sink = LoaderSink(model)
    assert sink.staging == "in_place"
    assert words in (sink.reason or "")
    push(sink, weights(1))
    assert holds(model, weights(1))


def test_an_object_that_is_no_module_is_in_place() -> None:
    class Runner:
        def __init__(self) -> None:
            self.model = Fused()

        def load_weights(self, pairs: Pairs) -> None:
            self.model.load_weights(pairs)

    runner = Runner()
    sink = LoaderSink(runner)
    assert sink.staging == "in_place"
    assert "no nn.Module" in (sink.reason or "")
    push(sink, weights(1))
    assert holds(runner.model, weights(1))
    for call in (sink.checksums, sink.reset):
        with pytest.raises(Unsupported, match="Runner"):
            call()


def test_no_memory_for_a_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(model: Any, memo: Any = None) -> Any:
        raise MemoryError

    monkeypatch.setattr(copy, "deepcopy", out_of_memory)
    sink = LoaderSink(model := Fused())
    assert "MemoryError" in (sink.reason or "")
    push(sink, weights(1))
    assert holds(model, weights(1))


def test_a_view_held_elsewhere_is_copied_into_and_commit_copy_keeps_addresses() -> None:
    model = Fused()
    sink = LoaderSink(model)
    view = model.qk.detach()
    report = push(sink, weights(1))
    assert report.copied_because == {"views held elsewhere": 1}
    assert same_bits(view, model.qk)
    assert holds(model, weights(1))
    push(sink, weights(2))
    assert holds(model, weights(2))
    other = Fused()
    place, fixed = other.qk.data_ptr(), LoaderSink(other, commit="copy")
    assert push(fixed, weights(1)).copied == 3
    assert holds(other, weights(1))
    assert other.qk.data_ptr() == place


def test_a_loader_that_rebuilds_the_model_is_told_so() -> None:
    class Rebuilding(Fused):
        def load_weights(self, pairs: Pairs) -> set[str]:
            loaded = super().load_weights(pairs)
            self.qk = nn.Parameter(self.qk.detach().t().contiguous())
            return loaded

    model = Rebuilding()
    sink = LoaderSink(model)
    for _ in range(2):
        sink.begin(spec_of(weights(1)))
        sink.load(weights(1).items())
        with pytest.raises(UpdateRefused, match="in_place"):
            sink.prepare()
        sink.abort()
        assert model.qk.shape == (4, 3)


def test_checksums_and_reset() -> None:
    model = Fused()
    sink = LoaderSink(model)
    push(sink, weights(1))
    assert list(sink.checksums()) == ["qk", "never_loaded", "embed.weight"]
    sink.reset()
    assert not bool(model.qk.any())
    push(sink, weights(1))
    assert holds(model, weights(1))
