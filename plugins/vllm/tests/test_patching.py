"""Patches of vLLM's own models: what they hold then is what they load, and there has to be something to patch."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests import patching, twins
from weightwire.testing.pool import Rank

pytestmark = pytest.mark.vllm

LONG = [family for family in twins.FAMILIES if family != "Qwen2"]
NO_PIECES = "no update by regions has left here what they are made of"


@pytest.mark.parametrize("family", ["Qwen2", *(pytest.param(one, marks=pytest.mark.thorough) for one in LONG)])
def test_a_patched_model_is_a_loaded_one(family: str, process: Rank, tmp_path: Path) -> None:
    for size in (1, 2):
        check(process.call(patching.rounds, tmp_path, family, size, timeout=120))


def test_what_the_loader_gets_in_full_is_patched_too(process: Rank, tmp_path: Path) -> None:
    check(process.call(patching.cast, tmp_path, timeout=120))


def check(told_by_ranks: list[dict[str, object]]) -> None:
    assert told_by_ranks
    for told in told_by_ranks:
        assert NO_PIECES in str(told.pop("at first"))
        assert told == {"then": None, "differs": [], "patched": [True] * 3, "in the end": None}


def test_when_there_is_nothing_to_patch(process: Rank, tmp_path: Path) -> None:
    told = process.call(patching.no_base, tmp_path, timeout=120)
    assert "no patch" in told.pop("nothing is staged")
    assert "no 'model.norm.weight' of this shape" in told.pop("other tensors")
    for kind in ("an aborted update", "an update in full", "a reset"):
        assert NO_PIECES in told.pop(kind)
        assert NO_PIECES in told.pop(f"{kind}, patched")
    assert "torn" in told.pop("a failed reload")
    assert "torn" in told.pop("a failed reload, patched")
    assert told == {}


def test_a_part_of_a_layer_can_be_patched_but_not_brought(process: Rank, tmp_path: Path) -> None:
    told = process.call(patching.part_of_a_layer, tmp_path, timeout=120)
    assert "position 1099511627776" in told.pop("out of range")
    assert "an update must bring whole layers" in told.pop("brought")
    assert told == {"patched": None, "differs": [], "still": None}
