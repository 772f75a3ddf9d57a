"""Updates that bring each rank the regions that its loader takes: what the sink makes of them, without a transport."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests import by_regions, twins
from weightwire.testing.pool import Rank

pytestmark = pytest.mark.vllm

LONG = [family for family in twins.FAMILIES if family != "Qwen2"]


@pytest.mark.parametrize("family", ["Qwen2", *(pytest.param(one, marks=pytest.mark.thorough) for one in LONG)])
def test_pieces_install_what_a_full_update_does(family: str, process: Rank, tmp_path: Path) -> None:
    for size in (1, 2):
        for told in process.call(by_regions.rounds, tmp_path, family, size, timeout=120):
            assert told["differs"] == told["as before"] == told["unmoved"] == []
            pieces, in_full = told["pieces"], told["in full"]
            # After two rounds a failure with late bytes under way, and in the end a full update.
            assert told["allocated"] == [pieces, 0, pieces, 0, in_full]
            assert size == 1 or pieces < 0.65 * in_full


def test_what_only_the_loader_can_do_comes_in_full(process: Rank, tmp_path: Path) -> None:
    told = process.call(by_regions.in_full_after_all, tmp_path, timeout=120)
    assert told == {kind: {"more": 0, "differs": []} for kind in ("cast", "no twin")}


def test_experts_that_nothing_came_for_stay_usable(process: Rank, tmp_path: Path) -> None:
    told = process.call(by_regions.without_experts, tmp_path, timeout=120)
    changed = ["model.layers.0.input_layernorm.weight", "model.norm.weight"]
    assert told == {kind: {"differs": changed, "without a kernel": 0} for kind in ("committed", "dropped")}


def test_refused_before_anything_is_planned(process: Rank, tmp_path: Path) -> None:
    said = process.call(by_regions.refusals, tmp_path, timeout=120)
    named = {
        "shape": "UpdateRefused: .*'model.norm.weight'",
        "name": "UpdateRefused: .*'model.nothing.weight'",
        "part of a layer": "UpdateRefused: an update must bring whole layers.*layers.1.self_attn.qkv_proj.weight",
        "dtype": "UpdateRefused: .*is float32 in the update.*bfloat16",
        "none": 'Unsupported: staging "none".*"staging": "host"',
        "another plan": "the model is no longer as it was",
    }
    assert said.keys() == named.keys()
    for kind, words in named.items():
        assert re.match(words, said[kind]), said[kind]
