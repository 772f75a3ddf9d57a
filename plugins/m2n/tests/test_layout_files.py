from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.m2n.tests.plan_scenes import load_plans, write
from plugins.m2n.tests.random_scenes import random_scene
from weightwire.errors import MessageError, MetadataError
from weightwire.layout import ParamMeta, Shard
from weightwire.load_plan import Copy, LoadPlan, Opaque, Target, View
from weightwire.region import Region
from weightwire_m2n.layout_files import (
    SOURCE_FILE,
    WORKERS_FILE,
    check_layouts,
    read_source_layout,
    read_worker_layouts,
    write_source_layout,
    write_worker_layouts,
)

META = ParamMeta("w", torch.bfloat16, (4,), owners=(0, 1), placements=(Shard(0),))
WHOLE = Region(0, (4,), (1,))
PLAN = LoadPlan(
    (ParamMeta("w", torch.bfloat16, (4,)),),
    (Target("x", torch.bfloat16, 4, (View("x", 0, (4,), (1,)),)),),
    (Copy("w", WHOLE, "x", WHOLE),),
)


@given(st.randoms(use_true_random=False))
def test_what_is_written_is_read(random: Random) -> None:
    scene = random_scene(random)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, scene)
        assert sorted(path.name for path in folder.iterdir()) == [SOURCE_FILE, WORKERS_FILE]
        assert read_source_layout(folder / SOURCE_FILE) == (tuple(scene.metadata), scene.trainers)
        plans = read_worker_layouts(str(folder / WORKERS_FILE))
    assert plans == load_plans(scene)
    assert len(set(map(id, plans))) == len({plan.digest() for plan in plans})
    check_layouts(scene.metadata, plans)


def test_a_file_is_replaced_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "source.json"
    write_source_layout(path, [META], 2)
    write_source_layout(path, [META], 3)
    assert read_source_layout(path) == ((META,), 3)
    with pytest.raises(FileNotFoundError):
        write_source_layout(tmp_path / "no" / "source.json", [META], 3)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_worker_layouts(tmp_path / "folder", [PLAN])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "source.json"]


def test_equal_plans_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    write_worker_layouts(path, [PLAN, LoadPlan(PLAN.sources), LoadPlan.from_json(PLAN.to_json())])
    record = json.loads(path.read_text())
    assert (len(record["plans"]), record["plan_of"]) == (2, [0, 1, 0])
    record |= {"plans": [*record["plans"], record["plans"][0]], "plan_of": [0, 1, 2]}
    path.write_text(json.dumps(record))
    first, _, last = read_worker_layouts(path)
    assert first is last


PARAMETER = META.to_json()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weightwire": "worker layouts"}, "is no source layout, but worker layouts"),
        ({"weightwire": None}, "is no source layout"),
        ({"version": 2}, "version 2 is not 1: upgrade weightwire"),
        ({"version": None}, "version None is not 1"),
        ({"more": 1}, "its keys must be"),
        ({"trainers": 0}, "trainers must be an integer"),
        ({"trainers": True}, "trainers must be an integer"),
        ({"trainers": 1 << 40}, "trainers must be an integer"),
        ({"trainers": 1}, "'w' is owned by trainer rank 1, and there are 1"),
        ({"parameters": {}}, "parameters must be a list"),
        ({"parameters": ["w"]}, "must be an object"),
        ({"parameters": [PARAMETER, PARAMETER]}, "'w' is declared twice"),
        ({"parameters": [PARAMETER | {"dtype": "float"}]}, "no dtype 'float'"),
        ({"parameters": [PARAMETER | {"shape": [-1]}]}, "shape"),
        ({"parameters": [PARAMETER | {"placements": ["x"]}]}, "'x'"),
        ({"parameters": [PARAMETER | {"owners": [0, 0]}]}, "owners"),
        ({"parameters": [{"name": "w"}]}, "missing keys"),
    ],
)
def test_source_layouts_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "layout.json"
    write_source_layout(path, [META], 2)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(MessageError, match=f"^{re.escape(str(path))}.*{re.escape(words)}"):
        read_source_layout(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weightwire": "source layout"}, "is no worker layouts, but source layout"),
        ({"plans": 1}, "plans must be a list"),
        ({"plans": [None]}, "plan 0: Invalid load plan"),
        ({"plans": [json.loads(PLAN.to_json()), {"version": 1}]}, "plan 1: Invalid load plan"),
        ({"plans": [json.loads(PLAN.to_json()) | {"copies": [[0, 1, 0, 0, 0]]}]}, "reaches element 4 of 'w'"),
        ({"plan_of": []}, "it has no worker rank"),
        ({"plan_of": [0, 1]}, "worker rank 1 has plan 1 of 1"),
        ({"plan_of": [-1]}, "worker rank 0 has plan -1 of 1"),
        ({"plan_of": [False]}, "worker rank 0 has plan False of 1"),
        ({"plan_of": None}, "plan_of must be a list"),
    ],
)
def test_worker_layouts_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "layouts.json"
    write_worker_layouts(path, [PLAN])
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(MessageError, match=f"^{re.escape(str(path))}.*{re.escape(words)}"):
        read_worker_layouts(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"1", b'{"weightwire": {}}', None])
def test_files_that_are_no_json(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    for read in (read_source_layout, read_worker_layouts):
        with pytest.raises(MessageError, match=re.escape(str(path))):
            read(path)
        with pytest.raises(MessageError, match="cannot be read"):
            read(tmp_path)


def test_two_sides_of_one_model() -> None:
    check_layouts([META, ParamMeta("more", torch.int8, ())], [PLAN, PLAN])
    check_layouts([], [LoadPlan(PLAN.sources, unmoved=("w",))])
    with pytest.raises(MetadataError, match="worker rank 1 reads parameter 'w', .* and the trainers do not have it"):
        check_layouts([], [LoadPlan(()), PLAN])
    for other in (ParamMeta("w", torch.float16, (4,)), ParamMeta("w", torch.bfloat16, (2, 2))):
        with pytest.raises(MetadataError, match=re.escape(f"the trainers have {other.dtype} {other.shape}")):
            check_layouts([other], [PLAN])
    opaque = LoadPlan(PLAN.sources, opaque=(Opaque("m", "arithmetic", ("w",)),))
    with pytest.raises(MetadataError, match="'w'"):
        check_layouts([], [opaque])
