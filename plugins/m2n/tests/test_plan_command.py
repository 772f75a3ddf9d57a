from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.m2n.tests.plan_scenes import load_plans, run, split, write
from plugins.m2n.tests.random_scenes import random_scene
from weightwire import command
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan, Opaque
from weightwire.resharding.planner import Plan
from weightwire_m2n.bench_planning import Fleet, layouts, workers
from weightwire_m2n.layout_files import write_source_layout, write_worker_layouts
from weightwire_m2n.messages import M2NTrainerInitInfo
from weightwire_m2n.plan_report import report, shown_bytes, shown_ranks, shown_seconds
from weightwire_m2n.plan_text import text
from weightwire_m2n.planning import make_plan


def asked(folder: Path, *arguments: object) -> dict[str, Any]:
    status, out, err = run(folder, "--json", *arguments)
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@given(st.randoms(use_true_random=False), st.sampled_from((64, 1000)))
@settings(max_examples=30)
def test_the_numbers_are_those_of_every_move(random: Random, buffer: int) -> None:
    scene = random_scene(random)
    with TemporaryDirectory() as name:
        write(Path(name), scene)
        found = asked(Path(name), "--no-strict", "--buffer", buffer, "--speed", 2)
    sizes = M2NTrainerInitInfo(buffer_bytes=buffer)
    every = make_plan(scene.metadata, scene.trainers, load_plans(scene), sizes).everything()
    between: Counter[tuple[int, int]] = Counter()
    messages: dict[tuple[int, int], set[int]] = {}
    rows = zip(
        *(column.tolist() for column in (every.sender, every.receiver, every.nbytes, every.message)), strict=True
    )
    for sender, receiver, nbytes, message in rows:
        between[sender, receiver] += nbytes
        messages.setdefault((sender, receiver), set()).add(message)
    sent = [sum(n for (one, _), n in between.items() if one == rank) for rank in range(scene.trainers)]
    received = [sum(n for (_, other), n in between.items() if other == rank) for rank in range(len(scene.demands))]
    assert (found["sent"], found["received"]) == (sent, received)
    assert found["wire"] == found["lower_bound"] == sum(between.values())
    assert found["ratio"] == 1
    assert found["links"] == len(between)
    assert found["estimated_seconds"] == pytest.approx(max(*sent, *received) / 2**31)
    assert found["parameter_bytes"] == sum(meta.nbytes for meta in scene.metadata)
    assert len(found["loads"]) == len({plan.digest() for plan in load_plans(scene)})
    assert sorted(rank for each in found["loads"] for rank in each["workers"]) == list(range(len(received)))
    taken = {scene.metadata[each.parameter].name for of in scene.demands for each in of if each.source.numel}
    assert found["unclaimed"] == [meta.name for meta in scene.metadata if meta.numel and meta.name not in taken]
    busiest = found["busiest"]
    assert (busiest is None) == (not between)
    if busiest is not None:
        pair = busiest["trainer"], busiest["worker"]
        assert busiest["nbytes"] == between[pair] == max(between.values())
        assert busiest["messages"] == len(messages[pair])


def test_as_text(tmp_path: Path) -> None:
    write(tmp_path, split(4, 1024, 1024, 2))
    status, out, err = run(tmp_path / "source.json", tmp_path / "workers.json", "--speed", 4)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert re.fullmatch(r"4 trainer ranks to 2 worker ranks: 1 parameter, 4 MiB; 1 class, planned in .*s", lines[0])
    assert "on the wire       4 MiB, 1.0000 times the lower bound" in lines
    assert "estimated         488.3 µs at 4 GiB/s a rank" in lines
    assert "busiest link      0 to 0, 512 KiB in 1 message; 8 links in use" in lines
    assert [line.split() for line in lines[lines.index("TRAINER RANK  SENDS  SHARE") :]] == [
        ["TRAINER", "RANK", "SENDS", "SHARE"],
        *[[str(rank), "1", "MiB", "25.0%"] for rank in range(4)],
        [],
        ["WORKER", "RANK", "RECEIVES", "SHARE"],
        *[[str(rank), "2", "MiB", "50.0%"] for rank in range(2)],
    ]
    assert run(tmp_path)[1].splitlines()[1:3] == lines[1:3]


def test_long_tables_are_cut(tmp_path: Path) -> None:
    write(tmp_path, split(20, 40, 40, 20))
    status, out, _ = run(tmp_path)
    assert (status, out.count("... 4 more"), out.count("5.0%")) == (0, 2, 32)


def test_what_nobody_takes_is_refused(tmp_path: Path) -> None:
    scene = split(2, 4, 4, 2)
    scene.metadata += [ParamMeta(name, torch.int8, (3,)) for name in ("lost", "left")]
    write(tmp_path, scene)
    status, out, err = run(tmp_path)
    assert (status, len(err.splitlines())) == (1, 1)
    assert "no worker takes parameter 'lost', nor 1 more" in err
    assert re.search(r"NOBODY TAKES\nlost\nleft\n", out)
    status, out, err = run(tmp_path, "--json", "--foreign", "lost")
    assert status == 1
    assert json.loads(out)["refused"].startswith("no worker takes parameter 'left': ")
    assert asked(tmp_path, "--no-strict")["refused"] is None
    assert asked(tmp_path, "--foreign", "lost", "--foreign", "left")["unclaimed"] == ["lost", "left"]


def test_what_is_opaque_comes_in_full(tmp_path: Path) -> None:
    scene = split(2, 4, 4, 2)
    scene.metadata.append(ParamMeta("scale", torch.float32, (8,)))
    write_source_layout(tmp_path / "source.json", scene.metadata, 2)
    opaque = (Opaque("", "it doubles", ("layer.weight", "scale")), Opaque("inner", "it adds", ("scale",)))
    plain, other = load_plans(scene)
    plans = [plain, LoadPlan(other.sources, other.targets, other.copies, opaque=opaque, unfilled=(("t40", 3),)), plain]
    write_worker_layouts(tmp_path / "workers.json", plans)
    found = asked(tmp_path)
    assert (found["received"], found["lower_bound"], found["opaque_bytes"]) == ([32, 64 + 32, 32], 160, 96)
    assert found["unclaimed"] == []
    assert [each["workers"] for each in found["loads"]] == [[0, 2], [1]]
    assert found["loads"][1] == {
        "workers": [1],
        "opaque": [
            {"module": "", "reason": "it doubles", "nbytes": 96},
            {"module": "inner", "reason": "it adds", "nbytes": 32},
        ],
        "opaque_bytes": 96,
        "unfilled": [["t40", 3]],
    }
    out = run(tmp_path)[1]
    assert "in full           96 B of it" in out
    assert re.search(r"WORKER RANKS +TAKES TENSORS IN FULL +BYTES +BECAUSE\n1 +\(the model\) +96 B +it doubles\n", out)
    assert re.search(r"WORKER RANKS +NOTHING WRITES +ELEMENTS\n1 +t40 +3\n", out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "source.json cannot be read: No such file or directory"),
        (["{0}/source.json", "{0}/source.json"], "is no worker layouts, but source layout"),
        (["{0}", "--buffer", "1"], "buffer_bytes must be at least"),
        (["{0}", "--png", "{0}/no/x.png"], "x.png cannot be written: No such file or directory"),
        (["{0}", "--png", "{0}/x.png", "--parameter", "layr.weight"], "did you mean 'layer.weight'?"),
        (["{0}", "--png", "{0}/x.png", "--parameter", "none"], "parameter 'none' has no elements to draw"),
    ],
)
def test_files_and_names_that_are_wrong(tmp_path: Path, arguments: list[str], words: str) -> None:
    scene = split(2, 4, 4, 2)
    scene.metadata.append(ParamMeta("none", torch.int8, (0,)))
    write(tmp_path, scene)
    given = [each.format(tmp_path) for each in arguments]
    status, out, err = run(*given)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert words in err
    status, out, err = run(*given, "--json")
    assert (status, words in json.loads(out)["error"]["message"], words in err) == (2, True, True)


@pytest.mark.parametrize("arguments", [["--speed", "0"], ["--speed", "nan"], ["--buffer", "x"], ["--parameter", "w"]])
def test_calls_that_are_wrong(tmp_path: Path, arguments: list[str]) -> None:
    status, out, err = run(tmp_path, *arguments)
    assert (status, out) == (2, "")
    assert arguments[0] in err
    assert run()[0] == 2


def test_it_is_a_command_of_weightwire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, split(2, 4, 4, 2))
    assert command.main(["plan", str(tmp_path)]) == 0
    assert "2 trainer ranks to 2 worker ranks" in capsys.readouterr().out


def test_a_trillion_parameters_in_a_page() -> None:
    fleet = Fleet(layers=8, experts=64)
    parameters = list(layouts(fleet))
    plan = Plan(parameters, fleet.trainers, workers(fleet, parameters))
    out = text(report(plan, [LoadPlan(())] * 128, speed=10, planning_seconds=1))
    assert len(out.splitlines()) < 50
    assert max(map(len, out.splitlines())) < 110


def test_values_for_people() -> None:
    assert [shown_bytes(n) for n in (0, 1023, 1024, 1 << 20, 5 << 40, 1 << 60)] == [
        "0 B", "1023 B", "1 KiB", "1 MiB", "5 TiB", "1.049e+06 TiB",
    ]  # fmt: skip
    assert [shown_seconds(s) for s in (0, 2e-6, 0.25, 3)] == ["0 µs", "2 µs", "250 ms", "3 s"]
    assert shown_ranks([0, 1, 2, 5]) == "0-2, 5"
    assert shown_ranks(range(0, 128, 16)) == "0, 16, ... 112 (8 ranks)"
