"""How weights become live, and what the rest of the process sees of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from core.tests.sink_models import Zoo, content, push, same_bits, spec_of, targets_of
from core.tests.threads import started
from weightwire import staging
from weightwire.deadline import Deadline
from weightwire.errors import UpdateRefused
from weightwire.gate import Gate
from weightwire.layout import ParamMeta
from weightwire.module_sink import ModuleSink
from weightwire.patching import ReadyPatch
from weightwire.sink import CommitReport, Patch, UpdateSpec


def layers(count: int = 3, width: int = 4) -> Any:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def zoo(*kinds: str) -> Any:
    return Zoo(list(kinds))


def values(model: nn.Module, state: int) -> dict[str, torch.Tensor]:
    return {name: content(name, tensor, state) for name, tensor in targets_of(model).items()}


def finite(model: nn.Module, number: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, number) for name, tensor in targets_of(model).items()}


def holds(model: nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    live = {**dict(model.named_parameters()), **model.state_dict(keep_vars=True)}
    return all(same_bits(live[name], value) for name, value in tensors.items())


def pointers(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in targets_of(model).items()}


def adopt(sink: ModuleSink, tensors: dict[str, torch.Tensor]) -> CommitReport:
    sink.begin(spec_of(tensors, "partial"))
    sink.adopt(tensors)
    sink.prepare()
    return sink.commit()


def segment(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, all in one storage, as a transport that maps shared memory hands them over."""
    memory = torch.zeros(sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors.values()), dtype=torch.uint8)
    found, offset = {}, 0
    for name, tensor in tensors.items():
        found[name] = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += -(-tensor.nbytes // 64) * 64
    return found


# Swap and copy


def test_swap_rebinds_and_leaves_alone_what_did_not_come() -> None:
    model = layers()
    sink, before = ModuleSink(model), pointers(model)
    new = {"1.weight": values(model, 1)["1.weight"]}
    report = push(sink, new, "partial")
    assert (report.swapped, report.copied) == (1, 0)
    assert holds(model, new)
    assert {name for name, pointer in pointers(model).items() if pointer != before[name]} == {"1.weight"}


def test_copy_keeps_every_address() -> None:
    model = zoo("plain", "flat", "transposed", "tied", "buffers")
    sink, before = ModuleSink(model, commit="copy"), pointers(model)
    for state in (1, 2):
        report = push(sink, values(model, state))
        assert holds(model, values(model, state))
        assert pointers(model) == before
        assert report.copied_because == {"commit='copy'": report.copied}
        assert report.swapped == 0
    assert report.allocated_bytes == 0


def test_the_rest_of_a_shared_storage_stays() -> None:
    model = zoo("flat", "slice")
    sink = ModuleSink(model)
    push(sink, values(model, 1))
    flat, hidden = model.parts[0].first.untyped_storage(), model.parts[0].hidden.clone()
    gaps = staging.storage_bytes(flat)[24:32].fill_(7).clone()
    push(sink, {"parts.0.second": values(model, 2)["parts.0.second"]}, "partial")
    part = model.parts[0]
    assert same_bits(part.second, values(model, 2)["parts.0.second"])
    assert same_bits(part.first, values(model, 1)["parts.0.first"])
    assert same_bits(part.third, values(model, 1)["parts.0.third"])
    assert same_bits(part.hidden, hidden)
    assert same_bits(staging.storage_bytes(part.first.untyped_storage())[24:32], gaps)


def test_a_view_held_elsewhere_follows_by_a_copy_and_the_report_says_so() -> None:
    model = layers()
    sink = ModuleSink(model)
    push(sink, values(model, 1))
    view = model[1].weight.detach()[1:3]
    for state in (2, 3):
        report = push(sink, values(model, state))
        assert (report.swapped, report.copied) == (5, 1)
        assert report.copied_because == {"views held elsewhere": 1}
        assert holds(model, values(model, state))
        assert same_bits(view, model[1].weight[1:3])
    del view
    for state in (4, 5):
        assert push(sink, values(model, state)).copied == 0
        assert holds(model, values(model, state))


def test_a_view_taken_between_prepare_and_commit_counts() -> None:
    model = layers(1)
    sink, new = ModuleSink(model), values(layers(1), 1)
    sink.begin(spec_of(new))
    sink.load(new.items())
    sink.prepare()
    view = model[0].bias.detach()
    assert sink.commit().copied == 1
    assert same_bits(view, new["0.bias"])


def test_memory_shared_with_other_processes_is_copied_into() -> None:
    model = layers(1).share_memory()
    sink, before = ModuleSink(model), pointers(model)
    assert push(sink, values(model, 1)).copied == 2
    assert pointers(model) == before
    assert holds(model, values(model, 1))


def test_only_storage_of_our_own_is_received_into_again() -> None:
    model = layers(1)
    sink = ModuleSink(model)
    gone = weakref.ref(model[0].weight.untyped_storage())
    push(sink, values(model, 1))
    gc.collect()
    assert gone() is None, "the model's first storage is let go"
    push(sink, values(model, 2))
    assert push(sink, values(model, 3)).allocated_bytes == 0


def test_the_targets_a_transport_keeps_do_not_count_as_held() -> None:
    model = layers(1)
    sink, kept = ModuleSink(model), []
    for state in range(1, 5):
        new = values(model, state)
        sink.begin(spec_of(new))
        targets = sink.targets(new)
        kept.append(targets)
        for name, target in targets.items():
            target.copy_(new[name])
        sink.received(new)
        sink.prepare()
        assert sink.commit().copied == 0
        assert holds(model, new)


# Errors inside commit


@pytest.mark.parametrize("breaks_at", [1, 2])
def test_an_error_inside_commit_undoes_everything(breaks_at: int) -> None:
    model = layers()
    sink = ModuleSink(model)
    push(sink, values(model, 1))
    new, before, places = values(model, 2), values(model, 1), pointers(model)
    patched = ("0.weight", "1.weight")
    sink.begin(spec_of(new))
    sink.load((name, value) for name, value in new.items() if name not in patched)
    sink.patch([Patch(name, torch.tensor([3, 0]), torch.ones(2)) for name in patched])
    sink.prepare()
    calls, apply = iter(range(1, 9)), ReadyPatch.apply

    def breaking(patch: ReadyPatch) -> None:
        apply(patch)
        if next(calls) == breaks_at:
            raise KeyboardInterrupt

    with mock.patch.object(ReadyPatch, "apply", breaking), pytest.raises(KeyboardInterrupt):
        sink.commit()
    assert holds(model, before)
    assert pointers(model) == places
    assert not sink.torn
    sink.abort()
    push(sink, new)
    assert holds(model, new)


def test_an_error_among_rebinds_undoes_patches_and_rebinds() -> None:
    model = layers()
    sink = ModuleSink(model)
    push(sink, values(model, 1))
    before, places, new = values(model, 1), pointers(model), values(model, 2)
    sink.begin(spec_of(new))
    sink.load((name, value) for name, value in new.items() if name != "0.weight")
    sink.patch([Patch("0.weight", torch.tensor([3, 0]), torch.ones(2))])
    sink.prepare()
    plan = sink._update.plan if sink._update is not None else None
    assert plan is not None
    plan.after[-1] = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(RuntimeError):
        sink.commit()
    assert holds(model, before)
    assert pointers(model) == places
    assert not sink.torn


def test_an_error_among_copies_leaves_torn_weights() -> None:
    model = layers(2)
    sink = ModuleSink(model, commit="copy")
    new = values(model, 1)
    sink.begin(spec_of(new))
    sink.load(new.items())
    sink.prepare()
    assert sink._update is not None
    assert sink._update.plan is not None
    entry, _, reason = sink._update.plan.copies[-1]
    sink._update.plan.copies[-1] = (entry, torch.zeros(77), reason)
    with pytest.raises(RuntimeError):
        sink.commit()
    assert sink.torn
    sink.abort()
    with pytest.raises(UpdateRefused, match="torn"):
        sink.begin(spec_of({"0.bias": new["0.bias"]}, "partial"))
    push(sink, new)
    assert not sink.torn


# Adopt


def test_adopted_storage_becomes_the_parameters_memory() -> None:
    model = layers()
    sink = ModuleSink(model)
    for state in range(1, 4):
        handed = segment(values(model, state))
        places = {name: tensor.data_ptr() for name, tensor in handed.items()}
        report = adopt(sink, handed)
        assert (report.adopted, report.copied, report.allocated_bytes) == (6, 0, 0)
        assert pointers(model) == places
        del handed
        assert holds(model, values(model, state))


def test_one_of_many_adopted_parameters_is_staged_alone() -> None:
    model = layers()
    sink = ModuleSink(model)
    adopt(sink, segment(values(model, 1)))
    new = {"1.weight": values(model, 2)["1.weight"]}
    report = push(sink, new, "partial")
    assert (report.swapped, report.copied, report.allocated_bytes) == (1, 0, new["1.weight"].nbytes)
    assert holds(model, {**values(model, 1), **new})
    push(sink, values(model, 3))
    assert holds(model, values(model, 3))


def test_a_view_of_adopted_memory_is_noticed() -> None:
    model = layers()
    sink = ModuleSink(model)
    adopt(sink, segment(values(model, 1)))
    view = model[0].bias.detach()
    assert push(sink, values(model, 2)).copied == 6
    assert same_bits(view, values(model, 2)["0.bias"])


def test_what_cannot_be_adopted_is_copied() -> None:
    model = zoo("flat", "transposed", "plain")
    sink, new = ModuleSink(model), values(zoo("flat", "transposed", "plain"), 1)
    handed = {name: tensor.clone() for name, tensor in new.items()}
    report = adopt(sink, handed)
    assert (report.adopted, report.swapped) == (1, 4)
    assert model.parts[2].weight.data_ptr() == handed["parts.2.weight"].data_ptr()
    assert holds(model, new)
    with pytest.raises(UpdateRefused, match="not contiguous"):
        adopt(sink, {"parts.2.weight": torch.zeros(4, 3).t()})


# In place


def test_in_place_writes_where_the_weights_are_and_needs_no_memory() -> None:
    model = layers(2)
    sink, places = ModuleSink(model, staging="in_place"), pointers(model)
    new = values(model, 1)
    sink.begin(spec_of(new))
    assert not sink.dirty
    targets = sink.targets(["0.weight"])
    assert sink.dirty
    assert targets["0.weight"].data_ptr() == places["0.weight"]
    targets["0.weight"].copy_(new["0.weight"])
    sink.received(["0.weight"])
    sink.load((name, value) for name, value in new.items() if name != "0.weight")
    sink.prepare()
    report = sink.commit()
    assert (report.in_place, report.swapped, report.allocated_bytes) == (4, 0, 0)
    assert not sink.dirty
    assert not sink.torn
    assert holds(model, new)
    assert pointers(model) == places


def test_an_aborted_in_place_update_leaves_torn_weights_until_a_full_one() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    sink, new = ModuleSink(model, staging="in_place"), finite(model, 2.0)
    sink.begin(spec_of(new))
    sink.abort()
    assert not sink.torn
    sink.begin(spec_of(new))
    sink.load([("0.weight", new["0.weight"])])
    sink.abort()
    assert sink.torn
    parameters = {name: new[name] for name, _ in model.named_parameters()}
    with pytest.raises(UpdateRefused, match=r"lacks 3 names, such as '0.running_mean'"):
        sink.begin(spec_of(parameters))
    push(sink, new)
    assert not sink.torn
    assert holds(model, new)


def test_late_bytes_after_retiring_in_place_land_elsewhere() -> None:
    model = zoo("flat", "plain", "tied")
    sink, new = ModuleSink(model, staging="in_place"), values(zoo("flat", "plain", "tied"), 1)
    sink.begin(spec_of(new))
    targets = sink.targets(new)
    sink.abort(retire=True)
    push(sink, new)
    for target in targets.values():
        target.fill_(9.0)
    assert holds(model, new)
    assert model.parts[0].first.untyped_storage()._cdata == model.parts[0].hidden.untyped_storage()._cdata


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_late_bytes_after_retiring_staged_memory_land_elsewhere(rounds: int) -> None:
    model = zoo("plain", "transposed", "flat")
    sink = ModuleSink(model)
    for state in range(rounds):
        push(sink, values(model, 1 + state % 2))
    new = values(model, 3)
    sink.begin(spec_of(new))
    targets = sink.targets(new)
    sink.abort(retire=True)
    for _ in range(3):
        sink.begin(spec_of(new))
        assert not {t.data_ptr() for t in sink.targets(new).values()} & {t.data_ptr() for t in targets.values()}
        sink.load(new.items())
        sink.prepare()
        sink.commit()
        for target in targets.values():
            target.fill_(9.0)
        assert holds(model, new)


# What the rest of the process sees


def test_an_optimizer_goes_on() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sink = ModuleSink(model)
    for number in (1.0, 2.0, 3.0):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert push(sink, finite(model, number)).copied == 0
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert all(bool((parameter != number).any()) for parameter in model.parameters())


def test_a_graph_recorded_before_keeps_its_weights() -> None:
    model = layers(1)
    loss = (model[0].weight ** 2).sum()
    push(ModuleSink(model), finite(model, 5.0))
    loss.backward()
    assert model[0].weight.grad is not None


def test_a_compiled_model_sees_new_weights_without_compiling_again() -> None:
    torch._dynamo.reset()
    model = layers()
    compiled: Any = torch.compile(model, backend="eager")
    sink, x = ModuleSink(model), torch.ones(2, 4)
    for number in (1.0, 2.0, 3.0):
        push(sink, finite(model, number))
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_recurrent_layers_keep_their_flat_weights() -> None:
    model = nn.LSTM(3, 3)
    sink = ModuleSink(model)
    for number in (0.0, 0.5):
        push(sink, finite(model, number))
    again = nn.LSTM(3, 3)
    again.load_state_dict(finite(model, 0.5))
    x = torch.ones(2, 1, 3)
    assert torch.equal(model(x)[0], again(x)[0])


@pytest.mark.parametrize("options", [{}, {"commit": "copy"}, {"staging": "in_place"}])
def test_inference_mode_on_either_side(options: dict[str, Any]) -> None:
    with torch.inference_mode():
        frozen = layers(1)
    ordinary = layers(1)
    for model in (frozen, ordinary):
        sink = ModuleSink(model, **options)
        push(sink, finite(model, 1.0))
        with torch.inference_mode():
            push(sink, finite(model, 2.0))
            push(sink, finite(model, 3.0))
        sink.begin(spec_of(finite(model, 4.0), "partial"))
        sink.patch([Patch(name, torch.tensor([0]), torch.zeros(1)) for name in finite(model, 0.0)])
        sink.prepare()
        sink.commit()
        assert all(float(value.detach().sum()) == 3.0 * (value.numel() - 1) for value in model.parameters())
        sink.reset()
    ordinary(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("change", ["to", "data", "object", "module", "untied"])
def test_changes_made_to_the_model_between_updates_are_noticed(change: str) -> None:
    model = layers(2)
    model[1].weight = model[0].weight
    sink = ModuleSink(model)
    for state in (1, 2, 3):
        push(sink, values(model, state))
    if change == "to":
        model.to(torch.float64)
    elif change == "data":
        model[0].bias.data = torch.zeros(2, 4)[1]
    elif change == "object":
        model[1].bias = nn.Parameter(torch.zeros(7))
    elif change == "module":
        model[1] = nn.Linear(4, 2)
    else:
        model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    names = len(targets_of(model))
    assert names == (4 if change in ("module", "untied") else 3)
    for state in (4, 5, 6):
        assert push(sink, values(model, state)).copied == 0
        assert holds(model, values(model, state))


def test_readers_under_the_gate_always_see_one_of_two_states() -> None:
    model = layers(20, 8)
    sink, gate = ModuleSink(model), Gate()
    states = [finite(model, number) for number in (1.0, 2.0)]
    push(sink, states[0])
    known = {sum(float(value.sum()) for value in state.values()) for state in states}
    seen: list[float] = []
    done = False

    def read() -> None:
        while not done:
            with gate.reading(), torch.no_grad():
                seen.append(sum(float(parameter.sum()) for parameter in model.parameters()))

    reader = started(read)
    for number in range(1, 51):
        new = states[number % 2]
        sink.begin(spec_of(new))
        sink.load(new.items())
        sink.prepare()
        with gate.exclusive(Deadline(20)):
            report = sink.commit()
        assert report.copied == 0
    done = True
    reader.result(20)
    assert set(seen) <= known
    assert len(set(seen)) == 2


# Memory


def test_large_staging_lies_on_huge_pages_and_goes_back_to_the_system() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * 4096

    gc.collect()
    size, before = 64 << 20, mapped()
    storage = staging.allocate(size, torch.device("cpu"))
    assert storage.nbytes() == size
    assert storage.data_ptr() % staging.HUGE_PAGE == 0
    view = staging.storage_bytes(storage)
    view[-1] = 7
    del storage
    gc.collect()
    assert int(view[-1]) == 7
    assert mapped() >= before + size
    del view
    gc.collect()
    assert mapped() < before + size // 2


def test_large_parameters_are_swapped_like_small_ones() -> None:
    model = layers(1, 1024)
    sink = ModuleSink(model)
    for state in range(1, 5):
        report = push(sink, values(model, state))
        assert holds(model, values(model, state))
        assert report.copied == 0
    assert report.allocated_bytes == 0
    assert model[0].weight.data_ptr() % staging.HUGE_PAGE == 0


def test_patches_fit_every_layout() -> None:
    model = zoo("transposed", "gapped", "scalar", "slice")
    sink = ModuleSink(model)
    start = values(model, 1)
    push(sink, start)
    sink.begin(UpdateSpec(tuple(ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in start.items()), "partial"))
    positions = {name: torch.arange(tensor.numel(), dtype=torch.int32).flip(0)[::2] for name, tensor in start.items()}
    new = values(model, 2)
    sink.patch([Patch(name, positions[name], new[name].reshape(-1)[positions[name]]) for name in new])
    sink.prepare()
    assert sink.commit().patched == 4
    for name, tensor in start.items():
        tensor.view(-1)[positions[name]] = new[name].reshape(-1)[positions[name]]
    assert holds(model, start)


def test_without_the_private_count_everything_is_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    model = layers(1)
    view = model[0].bias.detach()
    assert push(ModuleSink(model), values(model, 1)).swapped == 2
    assert holds(model, values(model, 1))
    assert not bool(same_bits(view, model[0].bias))
