from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightwire.source import as_bytes
from weightwire.testing import measure_rank
from weightwire.testing.floors import floors
from weightwire.testing.measure import (
    Case,
    Options,
    Run,
    Seat,
    Way,
    equal_tensors,
    measure,
    model_like,
    ratios_of,
    run_bench,
)
from weightwire.testing.payload import Payload, build_module, digest, huge_buffer
from weightwire.testing.pool import RankPool

MIB = 1 << 20
TINY = model_like(MIB, tensors=26)


class FileWay(Way):
    """Through a file; `damage` bytes of it are lost."""

    def __init__(self, name: str = "file", damage: int = 0) -> None:
        self.name = name
        self.damage = damage

    def offer(self, seat: Seat) -> str:
        return f"{seat.directory}/{self.name}-{seat.rank}"

    def connect(self, seat: Seat, offers: list[str]) -> None:
        self.path = offers[seat.rank - 1]
        self.paths = offers

    def step(self, seat: Seat) -> Mapping[str, Any] | None:
        if not seat.sends:
            return None
        data = bytearray(torch.cat([as_bytes(tensor) for tensor in seat.tensors()]).numpy().tobytes())
        data[: self.damage] = bytes(self.damage)
        for path in self.paths:
            Path(path).write_bytes(data)
        return {"paths": len(self.paths), "words": "by file"}

    def held(self, seat: Seat) -> list[torch.Tensor]:
        if seat.sends:
            return seat.tensors()
        return [torch.frombuffer(bytearray(Path(self.path).read_bytes()), dtype=torch.uint8)]


class Hungry(FileWay):
    """Keeps 64 MiB on the receivers from the first step on."""

    def step(self, seat: Seat) -> Mapping[str, Any] | None:
        if not seat.sends and not hasattr(self, "kept"):
            self.kept = torch.ones(64 * MIB, dtype=torch.uint8)
        return super().step(seat)


class Failing(Way):
    name = "failing"

    def step(self, seat: Seat) -> None:
        raise OSError(f"rank {seat.rank} cannot")


@given(nbytes=st.integers(MIB, 1 << 32), tensors=st.integers(14, 400))
def test_a_model_like_payload_has_the_size_asked_for(nbytes: int, tensors: int) -> None:
    payload = model_like(nbytes, tensors=tensors)
    assert len(payload.names) == len(set(payload.names)) == len(payload.shapes) == tensors
    rows, hidden = payload.shapes[0]
    assert rows > 1
    assert nbytes - 2 * hidden < payload.nbytes <= nbytes
    assert payload.nbytes == sum(2 * math.prod(shape) for shape in payload.shapes)


def test_the_payload_of_qwen2_is_found_again() -> None:
    payload = model_like(988_065_536)
    shapes = dict(zip(payload.names, payload.shapes, strict=True))
    assert shapes["model.embed_tokens.weight"] == (151_936, 896)
    assert shapes["model.layers.23.mlp.up_proj.weight"] == (4864, 896)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (128, 896)


def test_a_model_needs_a_layer() -> None:
    with pytest.raises(ValueError, match="at least 14"):
        model_like(MIB, tensors=13)


def test_modules_have_the_parameters_and_the_seed_decides_their_bytes() -> None:
    one, same, other = (build_module(TINY, seed=seed) for seed in (1, 1, 2))
    assert tuple(name for name, _ in one.named_parameters()) == TINY.names
    digests = [digest([parameter.data for parameter in module.parameters()]) for module in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert not any(parameter.any() for parameter in build_module(TINY).parameters())


def test_a_digest_is_over_the_bytes_as_if_they_were_one() -> None:
    tensors = [torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0), torch.arange(5, dtype=torch.int16)]
    assert digest(tensors) == digest([torch.cat([as_bytes(tensor) for tensor in tensors])])
    assert huge_buffer(3 * MIB + 1).numel() == 3 * MIB + 1


def _run(name: str, seconds: list[float]) -> Run:
    return Run(case="1to1", name=name, nbytes=1 << 30, seconds=seconds, bit_equal=True)


def test_ratios_are_speeds_over_the_fastest_reference() -> None:
    ways = [FileWay("mine"), FileWay("slow"), FileWay("fast")]
    case = Case(
        name="1to1",
        payload=TINY,
        receivers=1,
        ways=ways,
        subject="mine",
        references={"raw": ("slow", "fast"), "slow": ("slow",)},
        derive=lambda runs: {"share_of_seconds": runs["mine"].median / runs["slow"].median},
    )
    runs = [_run("mine", [2.0, 9.0, 1.0]), _run("slow", [4.0]), _run("fast", [1.0])]
    assert ratios_of("acme", case, runs) == {
        "acme.1to1.raw": 0.5,
        "acme.1to1.slow": 2.0,
        "acme.1to1.share_of_seconds": 0.5,
    }
    assert runs[0].gib_per_second == 0.5
    with pytest.raises(ValueError, match="no way fast"):
        ratios_of("acme", case, runs[:2])


def test_names_of_ways_are_unique(pool: RankPool) -> None:
    case = Case(name="1to1", payload=TINY, receivers=1, ways=[FileWay(), FileWay()], subject="file")
    with pytest.raises(ValueError, match="two ways called file"):
        measure(case, Options(), pool=pool)


def test_every_floor_moves_every_byte_to_every_receiver(pool: RankPool) -> None:
    case = Case(
        name="1to2",
        payload=TINY,
        receivers=2,
        ways=[FileWay(), *floors()],
        subject="file",
        references={"raw": ("raw_broadcast", "raw_send")},
        rounds=2,
    )
    words: list[str] = []
    report = run_bench("acme", [case], Options(memory=False), pool=pool, progress=words.append)
    assert [run.name for run in report.runs] == ["file", *(way.name for way in floors())]
    assert report.bit_equal
    assert all(len(run.seconds) == 2 and min(run.seconds) > 0 for run in report.runs)
    assert report.runs[0].extras == {"paths": 2, "words": "by file"}
    assert report.ratios.keys() == {"acme.1to2.raw"}
    assert words[-1] == "1to2: round 3 of 3"
    record = report.to_json()
    assert record["payload"]["1to2"] == {
        "name": "26 tensors of a Qwen2-like model",
        "tensors": 26,
        "bytes": TINY.nbytes,
        "dtype": "bfloat16",
    }
    assert record["machine"]["cores"] >= 1


def test_a_way_that_loses_one_byte_is_told(pool: RankPool) -> None:
    # A single zero byte is right by chance in one of 256 rounds; a hundred never are.
    ways = [FileWay("whole"), FileWay("damaged", damage=100)]
    case = Case(name="1to1", payload=TINY, receivers=1, ways=ways, subject="whole", rounds=1)
    whole, damaged = measure(case, Options(memory=False), pool=pool)
    assert whole.bit_equal
    assert not damaged.bit_equal


def test_peak_memory_is_by_process(pool: RankPool) -> None:
    ways = [FileWay(), Hungry("hungry")]
    case = Case(name="1to1", payload=TINY, receivers=1, ways=ways, subject="file", rounds=1)
    file, hungry = measure(case, Options(), pool=pool)
    assert file.peak_memory.keys() == {"sender", "receiver 1"}
    more = hungry.peak_memory["receiver 1"]["peak"] - file.peak_memory["receiver 1"]["peak"]
    assert 60 * MIB < more < 80 * MIB
    assert hungry.peak_memory["sender"]["peak"] < hungry.peak_memory["receiver 1"]["peak"]


def test_sampling_finds_a_peak_too() -> None:
    with measure_rank._sampled() as samples:
        before = samples[0]
        kept = torch.ones(64 * MIB, dtype=torch.uint8)
    assert max(samples) - before > 60 * MIB
    assert kept.numel() == 64 * MIB


def test_what_a_way_raises_comes_out(pool: RankPool) -> None:
    case = Case(name="1to1", payload=TINY, receivers=1, ways=[Failing()], subject="failing")
    with pytest.raises(OSError, match="rank 0 cannot"):
        measure(case, Options(), pool=pool)


def test_equal_tensors() -> None:
    payload: Payload = equal_tensors(7, 1024)
    assert (len(payload.names), payload.nbytes) == (7, 7 * 1024)
