"""Train a sharded model, and have a tensor-parallel server pull its weights after every step, all of it on Ray.

    python examples/ray_pull.py --trainers 2 --workers 2 --steps 3
    ray job submit --working-dir examples -- python ray_pull.py --gpus 1 --strategy STRICT_SPREAD

The trainer ranks shard a small language model by FSDP2 and train it; the worker ranks each hold the part of it that a
tensor-parallel server holds. After every step each worker asks each trainer rank for the regions that it loads, and
reads them out of that rank's memory. Then the trainer puts its model together and loads it as a worker would: if the
checksums differ, the exit status is 1.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from weightwire import ModuleSource, ParallelConfig, WeightTransferTrainerFactory, Worker
from weightwire.errors import WeightwireError
from weightwire_rdt import RayWorkerGroup, Room, ShardedRDTTrainerInitInfo
from weightwire_rdt.actor_calls import everywhere
from weightwire_rdt.cluster import join_cluster
from weightwire_rdt.placement import Strategy

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS, LAYERS = 512, 128, 384, 8, 4
BATCH, LENGTH = 8, 32
LEARNING_RATE = 3e-3
CALL_SECONDS = 300.0
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
"""What the server keeps together, in this order."""


class Block(nn.Module):
    """One layer, as it is trained: each projection by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, hidden) to the same."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            one(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.o_proj(attended.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(hidden)
        mixed: Tensor = hidden + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return mixed


class Policy(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to logits (batch, length, vocabulary)."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class Served(nn.Module):
    """What one rank of a tensor-parallel server holds: its part of each matrix, projections fused.

    Its `load_weights` is a plain loader: it gets full tensors by name and slices them. Run once on stand-ins it tells
    which regions of which tensors the rank needs, and those alone are pulled.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.embed = self._room(VOCABULARY // ranks, HIDDEN)
        self.lm_head = self._room(VOCABULARY // ranks, HIDDEN)
        self.norm = self._room(HIDDEN)
        for number in range(LAYERS):
            layer = nn.Module()
            layer.qkv = self._room(3 * HIDDEN // ranks, HIDDEN)
            layer.o_proj = self._room(HIDDEN, HIDDEN // ranks)
            layer.gate_up = self._room(2 * INTERMEDIATE // ranks, HIDDEN)
            layer.down_proj = self._room(HIDDEN, INTERMEDIATE // ranks)
            layer.attention_norm, layer.mlp_norm = self._room(HIDDEN), self._room(HIDDEN)
            self.add_module(f"layer{number}", layer)

    @staticmethod
    def _room(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape), requires_grad=False)

    def _mine(self, tensor: Tensor, dim: int) -> Tensor:
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full tensors under the names that `Policy` has for them."""
        for name, tensor in weights:
            if name.startswith("layers."):
                _, number, part, _ = name.split(".")
                self._load_part(self.get_submodule(f"layer{number}"), part, tensor)
            elif name == "norm.weight":
                self.norm.data.copy_(tensor)
            else:
                getattr(self, name.removesuffix(".weight")).data.copy_(self._mine(tensor, 0))

    def _load_part(self, layer: Any, part: str, tensor: Tensor) -> None:
        fused = next((name for name, parts in FUSED.items() if part in parts), None)
        if fused is not None:
            mine, place = self._mine(tensor, 0), FUSED[fused].index(part)
            getattr(layer, fused).data.narrow(0, place * len(mine), len(mine)).copy_(mine)
        else:
            getattr(layer, part).data.copy_(tensor if "norm" in part else self._mine(tensor, 1))


def served(parallel: ParallelConfig, device: torch.device) -> nn.Module:
    """What a worker actor calls for its model."""
    return Served(parallel.rank, parallel.tensor_parallel_size).to(device)


class Trainer:
    """One trainer rank, in an actor: any code that trains, and an engine beside it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def listen(self) -> dict[str, Any]:
        """Rank 0: where the other ranks, and the workers, find this one. Both ports are held from now on."""
        import ray

        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server((address, 0))
        port = self._listener.getsockname()[1]
        return {"address": address, "store": self._store.port, "port": port, "secret": secrets.token_hex(16)}

    def open(self, where: dict[str, Any], workers: list[Any], transport: str) -> None:
        """Join the other ranks, shard the model, and link with the workers."""
        import ray

        kind = "cuda" if ray.get_gpu_ids() else "cpu"
        store = self._store if self._rank == 0 else TCPStore(where["address"], where["store"])
        backend, patience = "nccl" if kind == "cuda" else "gloo", timedelta(seconds=60)
        distributed.init_process_group(backend, store=store, rank=self._rank, world_size=self._ranks, timeout=patience)
        torch.manual_seed(0)
        self._policy = Policy().to(kind)
        mesh = init_device_mesh(kind, (self._ranks,))
        for layer in self._policy.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._policy, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=LEARNING_RATE)
        self._batches = torch.Generator().manual_seed(1 + self._rank)
        info = ShardedRDTTrainerInitInfo(
            rank=self._rank,
            num_trainer_ranks=self._ranks,
            master_address=where["address"],
            master_port=where["port"],
            listen_socket=self._listener if self._rank == 0 else None,
            secret=where["secret"],
            tensor_transport=transport,  # type: ignore[arg-type]
        )
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=RayWorkerGroup(workers), source=ModuleSource(self._policy)
        )

    def step(self) -> float:
        """One step of training: to count on, from wherever a sequence begins. Returns the loss."""
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=self._batches)
        tokens = ((starts + torch.arange(LENGTH + 1)) % VOCABULARY).to(next(self._policy.parameters()).device)
        logits = self._policy(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return float(loss.detach())

    def send(self, label: str) -> dict[str, Any]:
        """Let the workers pull; every rank has to call it. Returns the report."""
        return self._engine.send_weights(weight_version=label).to_json()

    def expected(self, workers: int) -> list[dict[str, str]]:
        """Checksums that the workers must have; every rank has to call it, since it puts each parameter together."""
        models = [Served(rank, workers) for rank in range(workers)]
        for name, parameter in self._policy.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor().detach().cpu()
            for model in models:
                model.load_weights([(name, whole)])
        return [Worker(model).checksums() for model in models]

    def close(self) -> None:
        """Leave the workers, and the other ranks."""
        self._engine.shutdown()
        distributed.destroy_process_group()


def own_module() -> str:
    """This file as a module, as actors import it: from the directory that the job was started in, or from its own."""
    here = Path(__file__).resolve().with_suffix("")
    start = Path.cwd()
    return ".".join(here.relative_to(start).parts) if here.is_relative_to(start) else here.name


def enter_cluster(stack: ExitStack, ranks: int) -> Any:
    """Join the cluster of `RAY_ADDRESS`, which `ray job submit` sets; else start one that ends with this script."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_ADDRESS"):
        ray.init("local", num_cpus=ranks, include_dashboard=False, object_store_memory=1 << 28, logging_level="warning")
    stack.callback(ray.shutdown)
    return join_cluster()


def everyone(actors: list[Any], method: str, *arguments: Any) -> list[Any]:
    """Call all trainer ranks at once; the first that fails is raised in its words."""
    calls = {f"trainer rank {rank}": getattr(one, method).remote(*arguments) for rank, one in enumerate(actors)}
    return everywhere(calls, CALL_SECONDS, what=method)


def run(trainers: list[Any], group: RayWorkerGroup, steps: int) -> bool:
    """Train, pull and compare, `steps` times; returns whether all was equal."""
    equal = True
    for number in range(1, steps + 1):
        losses = everyone(trainers, "step")
        report = everyone(trainers, "send", f"step-{number}")[0]
        same = group.checksums() == everyone(trainers, "expected", len(group.actors))[0]
        equal &= same
        pulled = sum(one["bytes"] for one in report["ranks"] if one["rank"].startswith("worker"))
        print(
            f"step {number}  loss {sum(losses) / len(losses):.3f}  {report['parameters']} parameters, {pulled} bytes "
            f"{report['path']} in {sum(report['seconds'].values()):.2f} s  "
            f"workers on {group.weight_info()['weight_version']}, {'bit for bit' if same else 'DIFFERENT'}",
            flush=True,
        )
    return equal


def main(
    trainers: Annotated[int, typer.Option(min=1, help="Trainer ranks.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Worker ranks; a power of two up to 8.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 3,
    transport: Annotated[
        Literal["auto", "nixl", "ray_nixl", "gloo", "object_store"], typer.Option(help="How the weights travel.")
    ] = "auto",
    cpus: Annotated[float, typer.Option(help="CPUs of each rank.")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of each rank.")] = 0,
    strategy: Annotated[Strategy, typer.Option(help="How ranks are placed over the nodes.")] = "PACK",
) -> None:
    """Train, and have the workers pull after each step; the exit status is 1 if anything went wrong."""
    resources = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    try:
        with ExitStack() as stack:
            ray = enter_cluster(stack, trainers + workers)
            room = Room(trainers + workers, resources=resources, strategy=strategy)
            stack.callback(room.release)
            cls = ray.remote(Trainer)
            ranks = [cls.options(**room.options(rank)).remote(rank, trainers) for rank in range(trainers)]
            builder = f"{own_module()}:served"
            group = RayWorkerGroup.start(builder, workers, place=lambda rank: room.options(trainers + rank))
            stack.callback(group.stop)
            (where,) = everyone(ranks[:1], "listen")
            everyone(ranks, "open", where, group.actors, transport)
            equal = run(ranks, group, steps)
            everyone(ranks, "close")
    except WeightwireError as failure:
        print(f"The example failed: {failure}", file=sys.stderr)
        raise typer.Exit(1) from failure
    raise typer.Exit(0 if equal else 1)


if __name__ == "__main__":
    typer.run(main)
