"""How long planning a model of a trillion parameters takes: `python -m weightwire_m2n.bench_planning`.

61 layers with 384 experts each, about 71,000 tensors, from a pipeline of 8 stages of trainer ranks, over which the
experts of a stage are spread and everything else is replicated or sharded, to replicas of an expert-parallel fleet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weightwire.region import Region
from weightwire.region_boxes import whole
from weightwire.resharding.demands import Demand, Workers
from weightwire.resharding.planner import Plan
from weightwire.resharding.source_layout import SourceLayout

HIDDEN: Final = 7168
EXPERT: Final = 2048
DENSE: Final = {  # what each layer has beside its experts
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_a_proj": (1536, HIDDEN),
    "self_attn.q_a_layernorm": (1536,),
    "self_attn.q_b_proj": (64 * 192, 1536),
    "self_attn.kv_a_proj": (576, HIDDEN),
    "self_attn.kv_a_layernorm": (512,),
    "self_attn.kv_b_proj": (64 * 256, 512),
    "self_attn.o_proj": (HIDDEN, 64 * 128),
    "mlp.gate": (384, HIDDEN),
    "mlp.gate.bias": (384,),
    "mlp.shared_experts.gate_proj": (EXPERT, HIDDEN),
    "mlp.shared_experts.up_proj": (EXPERT, HIDDEN),
    "mlp.shared_experts.down_proj": (HIDDEN, EXPERT),
}
PROJECTIONS: Final = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN), "down_proj": (HIDDEN, EXPERT)}
ITEMSIZE: Final = 2


@dataclass(frozen=True, slots=True)
class Fleet:
    """A model and the ranks on both sides.

    Attributes:
        trainers: Trainer ranks, in 8 pipeline stages; a stage's experts are spread over its ranks.
        expert_ranks: Worker ranks over which a replica spreads the experts.
        replicas: Replicas of the model on the worker side.
        layers: Of the model.
        experts: In each layer.
        sharded: Everything else is sharded over a stage's ranks on the first dimension, instead of replicated.
    """

    trainers: int = 256
    expert_ranks: int = 32
    replicas: int = 4
    layers: int = 61
    experts: int = 384
    sharded: bool = False


def layouts(fleet: Fleet) -> Iterator[SourceLayout]:
    """The parameters, layer after layer, experts innermost."""
    width = fleet.trainers // 8

    def dense(name: str, shape: tuple[int, ...], stage: int) -> SourceLayout:
        owners = tuple(range(stage * width, (stage + 1) * width))
        return SourceLayout(name, shape, ITEMSIZE, owners, (width,), (0,) if fleet.sharded else None)

    yield dense("model.embed_tokens.weight", (163840, HIDDEN), 0)
    for layer in range(fleet.layers):
        stage = layer * 8 // fleet.layers
        for name, shape in DENSE.items():
            yield dense(f"model.layers.{layer}.{name}.weight", shape, stage)
        for expert in range(fleet.experts):
            owner = (stage * width + expert * width // fleet.experts,)
            for name, shape in PROJECTIONS.items():
                yield SourceLayout(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", shape, ITEMSIZE, owner)
    yield dense("model.norm.weight", (HIDDEN,), 7)
    yield dense("lm_head.weight", (163840, HIDDEN), 7)


def workers(fleet: Fleet, parameters: Sequence[SourceLayout]) -> Workers:
    """Everything but the experts whole on each rank; a rank's experts stacked, gate and up projection fused."""
    plans: list[list[Demand]] = [[] for _ in range(fleet.expert_ranks)]
    local = -(-fleet.experts // fleet.expert_ranks)
    rows = EXPERT * HIDDEN
    for index, layout in enumerate(parameters):
        everything = whole(layout.shape)
        *_, kind, _ = layout.name.split(".")
        if ".experts." not in layout.name:
            for plan in plans:
                plan.append(Demand(index, everything, index, everything))
            continue
        rank, slot = divmod(int(layout.name.split(".experts.")[1].split(".")[0]), local)
        layer = len(parameters) + 2 * int(layout.name.split(".")[2])
        fused = kind != "down_proj"
        base = slot * 2 * rows + (rows if kind == "up_proj" else 0) if fused else slot * rows
        target = Region(base, everything.sizes, everything.strides)
        plans[rank].append(Demand(index, everything, layer + (not fused), target))
    plan_of = tuple(rank for _ in range(fleet.replicas) for rank in range(fleet.expert_ranks))
    return Workers(tuple(map(tuple, plans)), plan_of)


def measure(fleet: Fleet) -> dict[str, Any]:
    """Plan once, and take the parts of one trainer rank and of one worker rank, as a rank of each kind would."""
    parameters = list(layouts(fleet))
    wanted = workers(fleet, parameters)
    before = _peak_kib()
    begin = time.perf_counter()
    plan = Plan(parameters, fleet.trainers, wanted, buffer=64 << 20)
    planned = time.perf_counter()
    sends = plan.for_trainer(fleet.trainers // 2)
    of_trainer = time.perf_counter()
    receives = plan.for_worker(len(wanted.plan_of) // 2)
    of_worker = time.perf_counter()
    digest = plan.digest
    done = time.perf_counter()
    mean = sum(plan.sent) / fleet.trainers
    return {
        "trainers": fleet.trainers,
        "workers": len(wanted.plan_of),
        "tensors": len(parameters),
        "sharded": fleet.sharded,
        "classes": len(plan.classes),
        "seconds": round(max(of_trainer - begin, of_worker - of_trainer + planned - begin) + done - of_worker, 3),
        "plan_seconds": round(planned - begin, 3),
        "trainer_part_seconds": round(of_trainer - planned, 3),
        "worker_part_seconds": round(of_worker - of_trainer, 3),
        "digest_seconds": round(done - of_worker, 3),
        "sends": len(sends),
        "receives": len(receives),
        "peak_mib": _peak_kib() >> 10,
        "input_mib": before >> 10,
        "wire_over_bound": plan.coverage.wire / plan.coverage.lower_bound,
        "busiest_over_mean": round(max(plan.sent) / mean, 4),
        "digest": digest[:16],
    }


def _peak_kib() -> int:
    """This process's peak of resident memory: not `getrusage`, which begins with that of whoever started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def main() -> None:
    """Measure one fleet and print it as JSON; memory is that of the process, so one fleet a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("trainers", 256), ("expert-ranks", 32), ("replicas", 4), ("layers", 61), ("experts", 384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sharded", action="store_true", help="shard what is no expert over the ranks of a stage")
    print(json.dumps(measure(Fleet(**vars(parser.parse_args())))))  # noqa: T201


if __name__ == "__main__":
    main()
