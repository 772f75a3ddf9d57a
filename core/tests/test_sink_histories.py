"""Random models, random sequences of updates: the model always equals the last state that was committed."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.tests.sink_models import DTYPES, KINDS, Zoo, bring, content, same_bits, spec_of, targets_of
from weightwire import staging
from weightwire.errors import UpdateRefused
from weightwire.module_sink import ModuleSink
from weightwire.patching import ReadyPatch
from weightwire.sink import Patch

Step = tuple[str, int, int]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with mock.patch.object(staging, "POISON", True):
        yield


class History:
    """A model, its sink, and what the model must hold."""

    def __init__(self, kinds: list[str], dtype: torch.dtype, *, in_place: bool, commit: str) -> None:
        self.model = Zoo(kinds, dtype)
        self.sink = ModuleSink(
            self.model,
            staging="in_place" if in_place else "staged",
            commit="copy" if commit == "copy" else "swap",
        )
        self.expected = {name: tensor.detach().clone() for name, tensor in targets_of(self.model).items()}
        self.everything = {name: tensor.detach().clone() for name, tensor in self.all_tensors().items()}
        self.layout = {name: self.place(tensor) for name, tensor in self.all_tensors().items()}
        self.objects = dict(self.all_tensors())
        self.known = True

    def all_tensors(self) -> dict[str, torch.Tensor]:
        model = self.model
        return {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def place(self, tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype

    def chosen(self, state: int, seed: int, *, partial: bool) -> dict[str, torch.Tensor]:
        names = [name for index, name in enumerate(self.expected) if not partial or (seed >> index % 16) & 1]
        return {name: content(name, self.expected[name], state) for name in names}

    def run(self, step: Step) -> None:
        action, state, seed = step
        tensors = self.chosen(state, seed, partial=action in ("partial", "patch", "missing"))
        getattr(self, action)(tensors, seed)

    def full(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        self.sink.begin(spec_of(tensors))
        self.finish(tensors, seed)
        assert not self.sink.torn
        self.known = True

    def partial(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        if not self.sink.torn:
            self.sink.begin(spec_of(tensors, "partial"))
            self.finish(tensors, seed)

    def finish(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        bring(self.sink, tensors, seed)
        self.sink.prepare()
        report = self.sink.commit()
        counted = report.swapped + report.copied + report.adopted + report.in_place
        assert counted == len(tensors)
        self.expected.update(tensors)

    def missing(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        if self.sink.torn or not tensors:
            return
        self.sink.begin(spec_of(tensors, "partial"))
        bring(self.sink, dict(list(tensors.items())[1:]), seed)
        with pytest.raises(UpdateRefused, match="never came"):
            self.sink.prepare()
        self.give_up(seed)

    def aborted(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        self.sink.begin(spec_of(tensors))
        bring(self.sink, tensors, seed)
        if seed & 1:
            self.sink.prepare()
        self.give_up(seed)

    def give_up(self, seed: int) -> None:
        late = [target for name in self.expected for target in self.late_target(name)] if seed & 2 else []
        self.sink.abort(retire=bool(late))
        self.known = self.known and not self.sink.torn
        for target in late:
            target.view(torch.uint8).fill_(0xEE) if target.dim() else target.reshape(1).view(torch.uint8).fill_(0xEE)

    def late_target(self, name: str) -> list[torch.Tensor]:
        """A target that bytes may still arrive in after the abort."""
        update = self.sink._update
        assert update is not None
        return [update.landing[name]] if name in update.landing else []

    def patch(self, tensors: dict[str, torch.Tensor], seed: int) -> None:
        if self.sink.torn:
            return
        generator = torch.Generator().manual_seed(seed)
        self.sink.begin(spec_of(tensors, "partial"))
        changed, brought = {}, {}
        for index, (name, tensor) in enumerate(tensors.items()):
            if (seed >> index % 7) & 1:
                brought[name] = tensor
                continue
            picked = torch.randperm(tensor.numel(), generator=generator)[: max(1, tensor.numel() // 2)]
            self.sink.patch([Patch(name, picked, tensor.reshape(-1)[picked])])
            changed[name] = self.expected[name].contiguous().clone()
            changed[name].view(-1)[picked] = tensor.reshape(-1)[picked]
        bring(self.sink, brought, seed)
        self.sink.prepare()
        if seed & 8:
            self.fail_in_commit()
            self.sink.abort()
            self.known = self.known and not self.sink.torn
            return
        assert self.sink.commit().patched == len(changed)
        self.expected.update(changed)
        self.expected.update(brought)

    def fail_in_commit(self) -> None:
        """The last patch raises after it has written; or there is none and the commit succeeds in vain."""
        update = self.sink._update
        assert update is not None
        assert update.plan is not None
        if not update.plan.patches:
            return
        apply, last = ReadyPatch.apply, update.plan.patches[-1]

        def breaking(patch: ReadyPatch) -> None:
            apply(patch)
            if patch is last:
                raise KeyboardInterrupt

        with mock.patch.object(ReadyPatch, "apply", breaking), pytest.raises(KeyboardInterrupt):
            self.sink.commit()

    def check(self) -> None:
        tensors = self.all_tensors()
        assert all(tensors[name] is self.objects[name] for name in tensors), "the same objects"
        assert {name: self.place(tensor) for name, tensor in tensors.items()} == self.layout
        self.check_sharing(tensors)
        if self.known:
            wrong = [name for name, value in self.expected.items() if not same_bits(tensors[name], value)]
            assert not wrong, wrong
            for name, value in self.everything.items():
                if name not in self.model.state_dict():
                    assert same_bits(tensors[name], value), "what is not persistent never changes"
        else:
            assert self.sink.torn

    def check_sharing(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            part, _, own = name.rpartition(".")
            other = {"first": "second", "second": "third", "third": "hidden", "one": "other"}.get(own)
            other = "same" if own == "one" and f"{part}.same" in tensors else other
            if other is not None:
                beside = tensors[f"{part}.{other}"]
                assert beside.untyped_storage()._cdata == tensor.untyped_storage()._cdata, "storage stays shared"


actions = st.sampled_from(["full", "full", "partial", "missing", "aborted", "patch"])
steps = st.lists(st.tuples(actions, st.integers(1, 3), st.integers(0, 2**16 - 1)), min_size=1, max_size=6)


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
    commit=st.sampled_from(["swap", "swap", "copy"]),
    history=steps,
)
def test_the_model_always_equals_the_last_committed_state(
    kinds: list[str], dtype: torch.dtype, in_place: bool, commit: str, history: list[Step]
) -> None:
    torch.set_num_threads(1)
    run = History(kinds, dtype, in_place=in_place, commit=commit)
    run.check()
    for step in history:
        run.run(step)
        run.check()
    run.run(("full", 1, 0))
    run.check()


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), dtype=st.sampled_from(DTYPES))
def test_a_steady_round_allocates_nothing_and_uses_two_sets_of_storage(kinds: list[str], dtype: torch.dtype) -> None:
    model = Zoo(kinds, dtype)
    sink = ModuleSink(model)
    names = targets_of(model)
    spec = spec_of(names)
    pointers: list[dict[str, int]] = []
    for state in range(1, 8):
        tensors = {name: content(name, tensor, state % 3) for name, tensor in names.items()}
        sink.begin(spec)
        for name, target in sink.targets(tensors).items():
            target.copy_(tensors[name])
        sink.received(tensors)
        sink.prepare()
        report = sink.commit()
        assert all(same_bits(names[name], value) for name, value in tensors.items())
        assert report.swapped == len(names)
        if state > 2:
            assert report.allocated_bytes == sink.allocated_bytes == 0
        pointers.append({name: tensor.data_ptr() for name, tensor in names.items()})
    assert pointers[2] == pointers[4] == pointers[6] == pointers[0]
    assert pointers[1] == pointers[3] == pointers[5]
