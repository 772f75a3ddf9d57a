"""Modules moved into shared memory: nobody who uses them sees a difference, and nothing stays behind."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from core.tests.distributed_ranks import process_group
from plugins.ipc.tests.fleet import Zoo, digests
from weightwire.errors import Unsupported
from weightwire.testing.fixtures import BorrowRanks
from weightwire_ipc.sharing import segments, share

State = dict[str, Any]


class Net(nn.Module):
    """Tied weights, two parameters over one storage, buffers, a transposed, an empty and a single number."""

    mask: Tensor
    lost: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.randn(80)
        self.left = nn.Parameter(flat[:64].view(8, 8))
        self.right = nn.Parameter(flat[64:72])
        self.turned = nn.Parameter(torch.randn(8, 4).t().contiguous().t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.hollow = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
        self.register_buffer("lost", torch.arange(8.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens)) @ self.left + self.right * self.lost * self.mask
        out: Tensor = self.head((hidden @ self.turned) @ self.turned.t() * self.scale)
        return out


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def is_shared(tensor: Tensor) -> bool:
    return any(one.start <= tensor.data_ptr() < one.start + one.nbytes for one in segments())


def mapped() -> int:
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("/memfd:weightwire" in line for line in file)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", ["sgd", "adamw", pytest.param("fused", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("before", [True, False], ids=["optimizer first", "shared first"])
def test_it_trains_bit_by_bit_as_an_unshared_twin(kind: str, before: bool) -> None:
    mine = Net()
    twin = copy.deepcopy(mine)
    optimizers = [OPTIMIZERS[kind](mine.parameters())] if before else []
    step(twin_optimizer := OPTIMIZERS[kind](twin.parameters()), twin)
    if before:
        step(optimizers[0], mine)
    objects = {name: id(tensor) for name, tensor in everything(mine).items()}
    share(mine)
    assert objects == {name: id(tensor) for name, tensor in everything(mine).items()}
    if not before:
        optimizers = [OPTIMIZERS[kind](mine.parameters())]
        step(optimizers[0], mine)
    for _ in range(5):
        assert step(optimizers[0], mine) == step(twin_optimizer, twin)
    for name, tensor in everything(twin).items():
        assert torch.equal(everything(mine)[name], tensor), name
        assert is_shared(everything(mine)[name]) or not tensor.numel()


def step(optimizer: torch.optim.Optimizer, module: nn.Module) -> float:
    optimizer.zero_grad()
    loss = module(torch.arange(20)).tanh().square().mean()
    loss.backward()
    optimizer.step()
    value: float = loss.item()
    return value


def test_what_shares_storage_goes_on_sharing_it_and_layouts_stay() -> None:
    net = Net()
    before = {
        name: (tensor.shape, tensor.stride(), tensor.storage_offset()) for name, tensor in everything(net).items()
    }
    storages = {name: tensor.untyped_storage().nbytes() for name, tensor in everything(net).items()}
    values = {name: tensor.clone() for name, tensor in everything(net).items()}
    held = net.left.detach()
    assert share(net) == sum(nbytes for name, nbytes in storages.items() if name not in ("head.weight", "right"))
    after = everything(net)
    assert before == {name: (one.shape, one.stride(), one.storage_offset()) for name, one in after.items()}
    assert storages == {name: one.untyped_storage().nbytes() for name, one in after.items()}
    assert all(torch.equal(one, values[name]) for name, one in after.items())
    assert net.head.weight is net.embed.weight
    assert net.left.untyped_storage()._cdata == net.right.untyped_storage()._cdata
    # A view of the old storage keeps the old memory.
    with torch.no_grad():
        net.left.zero_()
    assert torch.equal(held, values["left"])


def test_all_dtypes() -> None:
    zoo = Zoo(5, width=20)
    before = digests(zoo)
    share(zoo)
    assert digests(zoo) == before
    assert all(map(is_shared, zoo.parameters()))


def test_twice_moves_nothing_and_a_new_layer_moves_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    assert share(net) == 80
    places = [parameter.data_ptr() for parameter in net.parameters()]
    assert share(net) == 0
    net.append(nn.Linear(2, 2))
    assert share(net) == 24
    assert [parameter.data_ptr() for parameter in net[0].parameters()] == places
    assert share(nn.Module()) == 0


def test_a_copy_is_a_copy() -> None:
    net = Net()
    share(net)
    twin = copy.deepcopy(net)
    assert not any(is_shared(tensor) for tensor in everything(twin).values() if tensor.numel())
    with torch.no_grad():
        net.scale.fill_(9)
    assert twin.scale.item() == 1.5
    assert share(twin) > 0


def test_state_dicts_go_in_and_out() -> None:
    net, other = Net(), Net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    share(net)
    net.load_state_dict(other.state_dict())
    assert all(map(is_shared, filter(torch.Tensor.numel, net.parameters())))
    assert digests(net) == digests(other)
    saved = io.BytesIO()
    torch.save(net.state_dict(), saved)
    saved.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    assert digests(fresh) == digests(net)


def test_one_parameter_is_saved_without_the_others() -> None:
    net = nn.ModuleDict({"large": nn.Linear(300, 300), "small": nn.Linear(3, 3)})
    share(net)
    saved = io.BytesIO()
    torch.save(net["small"].weight, saved)
    assert len(saved.getvalue()) < 4096


def test_weights_from_a_mapped_checkpoint(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    net = Net()
    net.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True), assign=True)
    before = digests(net)
    share(net)
    assert digests(net) == before
    with torch.no_grad():
        net.scale.fill_(2)
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["scale"].item() == 1.5


def test_weights_made_under_inference_mode() -> None:
    with torch.inference_mode():
        net = nn.Linear(4, 4)
        weight = net.weight.clone()
    share(net)
    with torch.inference_mode():
        assert torch.equal(net.weight, weight)
    assert all(map(is_shared, net.parameters()))


def test_what_is_no_plain_memory_of_this_process_alone_is_refused_and_nothing_moves() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.get_parameter("1.weight").share_memory_()  # type: ignore[no-untyped-call]
    with pytest.raises(Unsupported, match=r"'1.weight' is shared .* share_memory_\(\)"):
        share(net)
    assert not is_shared(net.get_parameter("0.weight"))
    with pytest.raises(Unsupported, match="'weight' is a .* on meta"):
        share(nn.Linear(4, 4, device="meta"))
    sparse = nn.Module()
    sparse.register_buffer("map", torch.eye(3).to_sparse())
    with pytest.raises(Unsupported, match="'map' is a torch.sparse_coo tensor"):
        share(sparse)


def sharded(state: State) -> str:
    net = nn.Linear(4, 4)
    distribute_module(net, init_device_mesh("cpu", (1,)))
    try:
        share(net)
    except Unsupported as error:
        return str(error)
    return "it was moved"


def test_a_dtensor_is_refused(ranks: BorrowRanks, tmp_path: Path) -> None:
    with process_group(ranks, 1, tmp_path) as group:
        assert "'weight' is a DTensor" in group.run(sharded)[0]


def test_memory_goes_back_with_the_last_tensor() -> None:
    before = mapped()
    net, other = Net(), Net()
    share(net)
    share(other)
    assert mapped() == before + 2
    known = len(segments())
    last = net.right.detach()[2:]
    del net
    assert mapped() == before + 2
    del last
    assert mapped() == before + 1
    assert len(segments()) == known - 1
    del other
    assert mapped() == before
