"""What a plan cannot express is opaque, by module and with the reason, and still loads bit for bit."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from core.tests.recording_models import Pairs, check, checkpoint, each, module, record, with_numbers
from core.tests.sink_models import metadata
from weightwire.load_plan import LoadPlan
from weightwire.recording import record_loads

Act = Callable[[Any, Tensor], object]

TENSORS = with_numbers(checkpoint(**{"odd.w": (4, 4), "plain.w": (4, 4)}))


def model() -> Any:
    made: Any = nn.Module()
    made.odd, made.plain = module(w=torch.zeros(4, 4)), module(w=torch.zeros(4, 4))
    return made


def loader(act: Act) -> Callable[[Any, Pairs], object]:
    """Does `act` with one tensor, and copies the other."""

    def load(made: Any, name: str, tensor: Tensor) -> None:
        if name == "odd.w":
            act(made.odd, tensor)
        else:
            made.plain.w.data.copy_(tensor)

    return each(load)


def only_odd(plan: LoadPlan, reason: str) -> None:
    assert [one.module for one in plan.opaque] == ["odd"], plan.opaque
    assert reason in plan.opaque[0].reason, plan.opaque
    assert plan.full_sources == ("odd.w",)
    assert plan.opaque_bytes == 64
    assert [copy.source for copy in plan.copies] == ["plain.w"]


def _branch(odd: Any, tensor: Tensor) -> None:
    odd.w.data.copy_(tensor)
    if tensor.max().item() > 8:
        odd.w.data.mul_(2)


def _stacked(odd: Any, tensor: Tensor) -> None:
    odd.w.data.copy_(torch.stack([tensor[index] for index in range(4)]))


def _through_a_buffer(odd: Any, tensor: Tensor) -> None:
    buffer = torch.zeros(4, 4)
    buffer[1:] = tensor[1:]
    odd.w.data.copy_(buffer * 2)


def _changed_in_place(odd: Any, tensor: Tensor) -> None:
    one = tensor.clone()
    one.mul_(2)
    odd.w.data.copy_(one)


def _masked_target(odd: Any, tensor: Tensor) -> None:
    odd.w.data[torch.eye(4, dtype=torch.bool)] = tensor[0]


def _in_a_thread(odd: Any, tensor: Tensor) -> None:
    thread = threading.Thread(target=lambda: odd.w.data.copy_(tensor))
    thread.start()
    thread.join()


def _by_numpy(odd: Any, tensor: Tensor) -> None:
    odd.w.data.copy_(torch.from_numpy(numpy.ascontiguousarray(tensor.numpy().T)))


def _overlapping(odd: Any, tensor: Tensor) -> None:
    odd.w.data[:3].copy_(tensor[:3])
    odd.w.data[1:].copy_(tensor[1:])


def _padded_late(odd: Any, tensor: Tensor) -> None:
    odd.w.data.copy_(tensor)
    odd.w.data[3].zero_()


CAUSES: dict[str, tuple[Act, str]] = {
    "cast": (lambda odd, x: odd.w.data.copy_(x.to(torch.bfloat16)), "gives no view"),
    "arithmetic": (lambda odd, x: odd.w.data.copy_(x + 1), "gives no view"),
    "branch on a value": (_branch, "is read by item"),
    "float": (lambda odd, x: odd.w.data.fill_(float(x[0, 0])), "is read by __float__"),
    "bool": (lambda odd, x: odd.w.data.copy_(x) if x.any() else None, "is read by __bool__"),
    "tolist": (lambda odd, x: odd.w.data.copy_(torch.tensor(x.tolist())), "is read by tolist"),
    "numpy": (_by_numpy, "is read by numpy"),
    "boolean index": (lambda odd, x: odd.w.data.copy_(x[torch.ones(4, dtype=torch.bool)]), "__getitem__"),
    "index of a list": (lambda odd, x: odd.w.data.copy_(x[[3, 2, 1, 0]]), "__getitem__ gives no view"),
    "masked target": (_masked_target, "__setitem__ writes it"),
    "reshape that copies": (lambda odd, x: odd.w.data.copy_(x.t().reshape(2, 8).view(4, 4)), "reshape gives no view"),
    "view of what was made contiguous": (lambda odd, x: odd.w.data.copy_(x.t().contiguous().view(2, 8).view(4, 4)), ""),
    "cat": (lambda odd, x: odd.w.data.copy_(torch.cat([x[2:], x[:2]])), "cat gives no view"),
    "stack": (_stacked, "stack gives no view"),
    "through a buffer": (_through_a_buffer, "no parameter"),
    "changed in place": (_changed_in_place, "changed in place"),
    "new data": (lambda odd, x: setattr(odd.w, "data", x), "replaces 'odd.w'"),
    "new parameter": (lambda odd, x: setattr(odd, "w", nn.Parameter(x, requires_grad=False)), "replaces 'odd.w'"),
    "as_tensor": (lambda odd, x: odd.w.data.copy_(torch.as_tensor(x) * 2), "gives no view"),
    "torch.tensor": (lambda odd, x: odd.w.data.copy_(x.detach().clone() @ torch.eye(4)), "matmul"),
    "address": (lambda odd, x: odd.w.data.copy_(x) if x.data_ptr() else None, "is read by data_ptr"),
    "storage": (lambda odd, x: odd.w.data.copy_(x) if len(x.untyped_storage()) else None, "is read by untyped_storage"),
    "equal": (lambda odd, x: odd.w.data.copy_(x) if not torch.equal(x, torch.zeros(4, 4)) else None, "equal"),
    "an update of its own": (lambda odd, x: odd.w.data.copy_(x).mul_(3), "mul_ writes it"),
    "out=": (lambda odd, x: torch.add(x, 1, out=odd.w.data), "add writes it"),
    "overlapping copies": (_overlapping, "overlap in part"),
    "padded late": (_padded_late, "overlap in part"),
    "pickle": (lambda odd, x: odd.w.data.copy_(pickle.loads(pickle.dumps(x))), "__reduce_ex__"),
    "text": (lambda odd, x: odd.w.data.fill_(json.loads(f"{x[1, 1]}")), "__format__"),
    "another thread": (_in_a_thread, "on another thread"),
    "linear algebra": (lambda odd, x: odd.w.data.copy_(torch.linalg.inv(x + torch.eye(4))), "gives no view"),
    "iteration": (lambda odd, x: [row.copy_(y + 0) for row, y in zip(odd.w.data, x, strict=True)], "gives no view"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_one_module_is_opaque(cause: str) -> None:
    act, reason = CAUSES[cause]
    only_odd(check(model(), loader(act), TENSORS), reason)


def test_a_cast_by_the_copy_itself() -> None:
    made = model()
    made.odd.w = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    only_odd(check(made, loader(lambda odd, x: odd.w.data.copy_(x)), TENSORS), "float32 is cast to bfloat16")


def test_a_conjugate() -> None:
    tensors = {"w": torch.arange(4) + 1j * torch.arange(4)}
    tensors["w"] = tensors["w"].to(torch.complex64)
    made = module(w=torch.zeros(4, dtype=torch.complex64))
    plan = check(made, each(lambda made, name, x: made.w.data.copy_(x.conj())), tensors)
    assert plan.full_sources == ("w",)


def test_one_target_filled_from_another() -> None:
    """No checkpoint tensor is needed for it, but its loader has to run."""

    def load(made: Any, name: str, tensor: Tensor) -> None:
        if name == "odd.w":
            made.odd.w.data.copy_(made.plain.w.data)
        else:
            made.plain.w.data.copy_(tensor)

    tensors = {name: TENSORS[name] for name in ("plain.w", "odd.w")}
    plan = check(model(), each(load), tensors)
    assert [(one.module, one.sources) for one in plan.opaque] == [("odd", ())]
    assert plan.opaque_bytes == 0


def test_what_a_loader_keeps() -> None:
    """An attribute, and parts that wait for each other."""

    def load(made: Any, name: str, tensor: Tensor) -> None:
        if name == "odd.w":
            made.odd.kept = tensor[1:]
        else:
            made.plain.w.data.copy_(tensor)

    plan = record(model(), each(load), TENSORS)
    only_odd(plan, "the loader keeps 'odd.w'")


def test_parts_that_wait_for_each_other_are_not_opaque() -> None:
    def load(made: Any, pairs: Pairs) -> None:
        waiting: dict[str, Tensor] = {}
        for name, tensor in pairs:
            waiting[name] = tensor
            if len(waiting) == 2:
                made.odd.w.data[:2].copy_(waiting["odd.w"][2:])
                made.odd.w.data[2:].copy_(waiting["plain.w"][:2])

    assert not check(model(), load, TENSORS).opaque


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_loader_that_chokes_on_a_stand_in(as_dict: bool) -> None:
    """It wants true tensors, one after the other or all at once: only that module pays."""

    def put(made: Any, name: str, tensor: Tensor) -> None:
        if name == "odd.w" and type(tensor) is not Tensor:
            tensor.abs()
            raise TypeError("a tensor and nothing else")
        made.get_parameter(name).data.copy_(tensor)

    def load(made: Any, pairs: Pairs) -> None:
        for name, tensor in dict(pairs).items() if as_dict else pairs:
            put(made, name, tensor)

    only_odd(check(model(), load, TENSORS), "TypeError: a tensor and nothing else")


def test_many_tensors_that_a_loader_chokes_on() -> None:
    made: Any = nn.Module()
    made.parts = nn.ModuleList(module(w=torch.zeros(2)) for _ in range(40))
    tensors = with_numbers(checkpoint(**{f"parts.{index}.w": (2,) for index in range(40)}))

    def load(made: Any, name: str, tensor: Tensor) -> None:
        if int(name.split(".")[1]) % 2 and type(tensor) is not Tensor:
            raise TypeError("no")
        made.get_parameter(name).data.copy_(tensor)

    plan = check(made, each(load), tensors)
    assert len(plan.opaque) == 20
    assert len(plan.copies) == 20


def test_a_loader_that_refuses_a_name() -> None:
    """Plain loading raises too: the plan leaves that to whoever installs it, in the loader's own words."""

    def load(made: Any, name: str, tensor: Tensor) -> None:
        made.get_parameter(name).data.copy_(tensor)

    plan = record(model(), each(load), {**TENSORS, "plain.more": torch.zeros(2)})
    assert [(one.module, one.sources) for one in plan.opaque] == [("plain", ("plain.w", "plain.more"))] or [
        (one.module, one.sources) for one in plan.opaque
    ] == [("plain", ("plain.more", "plain.w"))]
    assert "plain.more" in plan.opaque[0].reason or "more" in plan.opaque[0].reason


def test_a_loader_that_always_raises() -> None:
    def load(made: Any, pairs: Pairs) -> Any:
        raise OSError("no such file")

    plan = record(model(), load, TENSORS)
    assert [(one.module, one.reason) for one in plan.opaque] == [("", "the loader raised OSError: no such file")]
    assert plan.opaque_bytes == 128


def test_a_loader_that_swallows_errors() -> None:
    def act(odd: Any, x: Tensor) -> None:
        try:
            odd.w.data.copy_(torch.from_numpy(numpy.asarray(x)))
        except TypeError:
            odd.w.data.fill_(3)

    only_odd(check(model(), loader(act), TENSORS), "is read by __array__")


def test_the_twin_is_restored_and_can_be_recorded_again() -> None:
    twin = model().to("meta")
    act: Act = lambda odd, x: setattr(odd, "w", nn.Parameter(x, requires_grad=False))  # noqa: E731
    first = record_loads(twin, metadata(TENSORS), lambda pairs: loader(act)(twin, pairs))
    assert first == record_loads(twin, metadata(TENSORS), lambda pairs: loader(act)(twin, pairs))
    assert type(twin.odd.w) is nn.Parameter
