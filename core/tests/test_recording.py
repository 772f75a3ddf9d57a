"""Recording the loaders that serving code has, held against plain loading bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import weightwire.recording
from core.tests.recording_models import (
    Pairs,
    check,
    checkpoint,
    each,
    metas,
    module,
    pieces_of,
    record,
    twin_of,
    with_contents,
)
from core.tests.sink_models import same_bits
from weightwire.errors import MetadataError, UpdateRefused
from weightwire.load_plan import LoadPlan
from weightwire.recorded_install import feed, from_full, from_pieces, install
from weightwire.recording import record_loads
from weightwire.region import Region

HEADS, GROUPS, WIDTH, HIDDEN = 8, 4, 4, 16


def shard(tensor: Tensor, dim: int, rank: int, ranks: int = 2) -> Tensor:
    size = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * size, size)


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_qkv_with_grouped_heads(rank: int) -> None:
    """Query heads are sharded; four key and value heads over two ranks."""
    query, key = HEADS // 2 * WIDTH, GROUPS // 2 * WIDTH

    def load(model: Any, name: str, tensor: Tensor) -> None:
        start, size = {"q": (0, query), "k": (query, key), "v": (query + key, key)}[name]
        model.qkv.data.narrow(0, start, size).copy_(shard(tensor, 0, rank))

    model = module(qkv=torch.zeros(query + 2 * key, HIDDEN))
    tensors = checkpoint(q=(HEADS * WIDTH, HIDDEN), k=(GROUPS * WIDTH, HIDDEN), v=(GROUPS * WIDTH, HIDDEN))
    plan = check(model, each(load), tensors)
    assert not plan.opaque
    assert not plan.unfilled
    assert plan.piece_bytes * 2 == sum(tensor.nbytes for tensor in tensors.values())
    assert plan.copies[0].source_region == Region(rank * query * HIDDEN, (query * HIDDEN,), (1,))


def test_one_checkpoint_tensor_with_interleaved_heads() -> None:
    """Groups of (queries, key, value), as some checkpoints fuse them, taken apart by a reshaped view."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        grouped = tensor.view(GROUPS, 2 + 2, WIDTH, HIDDEN)
        q, k, v = grouped.split([2, 1, 1], dim=1)  # type: ignore[no-untyped-call]
        model.q.data.view(GROUPS, 2, WIDTH, HIDDEN).copy_(q)
        model.k.data.view(GROUPS, 1, WIDTH, HIDDEN).copy_(k)
        model.v.data.unflatten(0, (GROUPS, -1)).copy_(v.movedim(1, 0)[0])

    model = module(
        q=torch.zeros(GROUPS * 2 * WIDTH, HIDDEN), k=torch.zeros(GROUPS * WIDTH, HIDDEN), v=torch.zeros(16, HIDDEN)
    )
    plan = check(model, each(load), checkpoint(w=(GROUPS * 4 * WIDTH, HIDDEN)))
    assert not plan.opaque
    assert not plan.unfilled
    assert plan.copies[0].source_region == Region(0, (GROUPS, 2 * WIDTH * HIDDEN), (4 * WIDTH * HIDDEN, 1))


def test_merged_columns_and_a_row_shard() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "down":
            model.down.data.copy_(shard(tensor, 1, 1))
        else:
            model.up.data[{"a": slice(0, 6), "b": slice(6, 12)}[name]] = shard(tensor, 0, 1)

    model = module(up=torch.zeros(12, 5), down=torch.zeros(5, 6))
    plan = check(model, each(load), checkpoint(a=(12, 5), b=(12, 5), down=(5, 12)))
    assert not plan.opaque
    assert plan.copies[2].source_region == Region(6, (5, 6), (12, 1))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_of_experts(transposed: bool) -> None:
    """Each expert's matrices into one stacked parameter, and a checkpoint that stacks them itself."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "all":
            for index, one in enumerate(tensor.unbind(0)):
                model.w2.data[index].copy_(one.t() if transposed else one)
            return
        which, expert = name.split("_")
        rows = model.w13.data[int(expert)]
        rows = rows.t() if transposed else rows
        half = rows.shape[0] // 2
        rows.narrow(0, half if which == "up" else 0, half).copy_(tensor)

    model = module(
        w13=torch.zeros((3, 7, 10) if transposed else (3, 10, 7)),
        w2=torch.zeros((3, 5, 7) if transposed else (3, 7, 5)),
    )
    names = {f"{which}_{expert}": (5, 7) for which in ("gate", "up") for expert in range(3)}
    plan = check(model, each(load), checkpoint(**names, all=(3, 7, 5)))
    assert not plan.opaque
    assert not plan.unfilled
    assert len(plan.copies) == 9


def test_vocabulary_padding_by_a_constant() -> None:
    """Rows that the checkpoint lacks are zeros, written before or after, in the last shard."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        rows = tensor.narrow(0, 8, 3)
        model.after.data[:3].copy_(rows)
        model.after.data[3:].fill_(0)
        model.before.data.fill_(-1.5)
        model.before.data[:3] = rows
        model.exact[8:].data.zero_()

    model = module(after=torch.ones(8, 4), before=torch.ones(8, 4), exact=torch.ones(8, 4))
    plan = check(model, each(load), checkpoint(embed=(11, 4)))
    assert not plan.opaque
    assert len(plan.fills) == 2
    assert dict(plan.unfilled) == {"exact": 32}
    assert plan.piece_bytes == 3 * 4 * 4  # one piece for two places


def test_tied_heads() -> None:
    model: Any = nn.Module()
    model.embed, model.head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
    model.head.weight = model.embed.weight

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.get_parameter(name).data.copy_(tensor)

    tensors = with_contents({"embed.weight": torch.empty(6, 3), "head.weight": torch.empty(6, 3)})
    plan = check(model, each(load), tensors)
    assert [(copy.source, copy.target) for copy in plan.copies] == [("head.weight", "embed.weight")]
    assert [name for name, _ in plan.shadowed] == ["embed.weight"]
    assert not plan.unmoved
    assert len(plan.targets) == 1


def test_parameters_that_are_views_of_one_buffer() -> None:
    flat = torch.zeros(20)
    model = module(first=flat[:6].view(2, 3), second=flat[8:12], turned=flat[12:18].view(3, 2).t())
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.get_parameter(name).data.copy_(tensor) if name != "count" else model.count.copy_(tensor)

    tensors = with_contents({**checkpoint(first=(2, 3), second=(4,), turned=(2, 3)), "count": model.count})
    plan = check(model, each(load), tensors)
    assert len(plan.targets) == 2
    assert not plan.opaque
    assert not plan.unfilled


def test_convolutions_and_scalars() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "conv":
            model.patches.data.copy_(tensor.flatten(1))
        elif name == "scale":
            model.scales.data[1] = tensor
            model.scalar.data.copy_(tensor.view(()))
            model.everywhere.data.fill_(tensor[0])
        else:
            model.rows.data.copy_(tensor)

    model = module(
        patches=torch.zeros(4, 3 * 2 * 2),
        scales=torch.zeros(3, 1),
        scalar=torch.zeros(()),
        everywhere=torch.zeros(5),
        rows=torch.zeros(4, 3),
    )
    plan = check(model, each(load), checkpoint(conv=(4, 3, 2, 2), scale=(1,), bias=(3,)))
    assert not plan.opaque
    assert dict(plan.unfilled) == {"scales": 2}
    assert plan.piece_bytes == 4 * (48 + 1 + 3)  # a broadcast is read once


def test_odd_dtypes_and_bytes_seen_as_others() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "bytes":
            model.eight.data.copy_(tensor.view(torch.float8_e4m3fn)[1:])
        elif name == "wide":
            model.wide.data.view(torch.uint8)[:, :8].copy_(tensor.view(torch.uint8)[:, 8:])
        else:
            model.get_parameter(name).data.copy_(tensor.to("cpu").contiguous())

    model = module(
        eight=torch.zeros(3, 4, dtype=torch.float8_e4m3fn),
        wide=torch.zeros(3, 4, dtype=torch.bfloat16),
        nothing=torch.zeros(0, 3),
        truth=torch.zeros(3, dtype=torch.bool),
        wave=torch.zeros(3, dtype=torch.complex64),
    )
    tensors = with_contents(
        {
            "bytes": torch.empty(4, 4, dtype=torch.uint8),
            "wide": torch.empty(3, 8, dtype=torch.bfloat16),
            "nothing": torch.empty(0, 3),
            "truth": torch.empty(3, dtype=torch.bool),
            "wave": torch.empty(3, dtype=torch.complex64),
        }
    )
    plan = check(model, each(load), tensors)
    assert not plan.opaque
    assert not plan.unmoved
    assert not plan.unfilled


def test_what_a_plan_says_of_names_that_go_nowhere() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "known":
            model.known.data[1:].copy_(tensor[1:])

    model = module(known=torch.zeros(3, 2), other=torch.zeros(4))
    plan = check(model, each(load), checkpoint(known=(3, 2), inv_freq=(7,)))
    assert plan.unmoved == ("inv_freq",)
    assert dict(plan.unfilled) == {"known": 2, "other": 4}
    assert plan.describe()["unmoved"] == ["inv_freq"]


def test_load_state_dict_and_a_dict_of_all_weights() -> None:
    def load(model: Any, pairs: Pairs) -> None:
        model.load_state_dict(dict(pairs))

    plan = check(nn.Linear(4, 3), load, checkpoint(weight=(3, 4), bias=(3,)))
    assert not plan.opaque
    assert len(plan.copies) == 2


def test_foreach_copy() -> None:
    def load(model: Any, pairs: Pairs) -> None:
        torch._foreach_copy_([model.a.data, model.b.data], [tensor for _, tensor in pairs])

    plan = check(module(a=torch.zeros(3), b=torch.zeros(2, 2)), load, checkpoint(a=(3,), b=(2, 2)))
    assert not plan.opaque


class CopyCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is copied, as hosts do that rebuild a layer once everything for it has come."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[0].numel() == args[1].numel()
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_host_that_counts_on_meta_first_and_loads_what_it_kept_later() -> None:
    kept: list[tuple[str, Tensor]] = []

    def put(model: Any, name: str, tensor: Tensor) -> None:
        model.w.data.narrow(1, 4 if name == "b" else 0, 4).copy_(tensor[1:].t())

    def load(model: Any, pairs: Pairs) -> None:
        for name, tensor in pairs:
            with CopyCounter() as counter:  # type: ignore[no-untyped-call]
                put(twin, name, tensor)
            assert counter.count == 12
            kept.append((name, tensor))

    model, tensors = module(w=torch.zeros(3, 8)), checkpoint(a=(5, 3), b=(5, 3))
    plan = check(model, each(put), tensors)
    twin = twin_of(model)
    feed(plan, lambda pairs: load(model, pairs), from_pieces(pieces_of(plan, tensors)), {})
    with torch.no_grad():
        for name, tensor in kept:
            put(model, name, tensor)
    assert same_bits(model.w.data, torch.cat([tensors["a"][1:].t(), tensors["b"][1:].t()], 1))


def test_a_feed_refuses_what_was_not_recorded() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.w.data.copy_(tensor.narrow(0, model.start, 2))

    model = module(w=torch.zeros(2, 2))
    model.start = 0
    tensors = checkpoint(w=(4, 2))
    plan = record(model, each(load), tensors)
    model.start = 1
    with pytest.raises(UpdateRefused, match="did not use when it was recorded"):
        feed(plan, lambda pairs: each(load)(model, pairs), from_pieces(pieces_of(plan, tensors)), {})


def test_an_install_refuses_another_layout() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.w.data.copy_(tensor)

    tensors = checkpoint(w=(4, 2))
    plan = record(module(w=torch.zeros(4, 2)), each(load), tensors)
    for other in (torch.zeros(2, 4).t(), torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 3)):
        with pytest.raises(UpdateRefused):
            install(plan, {"w": other}, from_full(tensors))
    with pytest.raises(UpdateRefused):
        install(plan, {}, from_full(tensors))
    moved = torch.zeros(20)[5:13].view(4, 2)
    install(plan, {"w": moved}, from_full(tensors))
    assert torch.equal(moved.view(torch.int32), tensors["w"].view(torch.int32))


def test_what_record_loads_refuses() -> None:
    with pytest.raises(ValueError, match="meta device"):
        record_loads(module(w=torch.zeros(2)), metas(w=(2,)), list)
    with pytest.raises(TypeError, match="load_weights"):
        record_loads(twin_of(module(w=torch.zeros(2))), metas(w=(2,)))
    with pytest.raises(MetadataError):
        record_loads(twin_of(module(w=torch.zeros(2))), [*metas(w=(2,)), *metas(w=(2,))], list)


def test_it_knows_nothing_of_models() -> None:
    folder = Path(weightwire.recording.__file__).parent
    for name in ("recording", "recorder", "stand_in", "plan_assembly", "shadowing", "twin_slots", "recorded_install"):
        assert not re.search("qkv|gate|expert|vocab", (folder / f"{name}.py").read_text())


def test_an_empty_checkpoint() -> None:
    plan = record(module(w=torch.zeros(2)), lambda model, pairs: list(pairs), {})
    assert plan.copies == ()
    assert isinstance(plan, LoadPlan)
