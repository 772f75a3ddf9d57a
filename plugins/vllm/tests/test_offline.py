"""The offline `LLM`, driven from its own process; and an installation that fails half-way, which needs its insides."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests import offline
from plugins.vllm.tests.conftest import Lineup, Models
from weightwire.testing.fixtures import BorrowRanks

pytestmark = pytest.mark.vllm


@pytest.mark.thorough
def test_an_llm_is_updated_from_its_own_process(lineup: Lineup, ranks: BorrowRanks, models: Models) -> None:
    lineup.stop()
    (process,) = ranks(1)
    process.call(offline.make_llm, models.old.folder, own_process=True, timeout=150)
    assert process.call(offline.greedy) == models.old.greedy()
    for backend, model in (("nccl", models.new), ("ipc", models.old)):
        told = process.call(offline.push, model.weights, backend, f"by {backend}")
        assert process.call(offline.greedy) == model.greedy()
        assert told["weight_version"] == told["label"] == f"by {backend}"
        assert told["world_size"] == 1
    process.call(offline.end)
    process.kill()


def test_an_install_that_fails_refuses_readers_until_a_full_update(
    lineup: Lineup, ranks: BorrowRanks, models: Models
) -> None:
    lineup.stop()
    (process,) = ranks(1)
    files = (models.old.folder, models.old.weights, models.new.weights)
    seen = process.call(offline.push_into_a_failing_install, *files, timeout=150)
    assert "no memory for this layer" in seen["failure"]
    assert "torn: push a full update" in seen["refusal"]
    assert (seen["old"], seen["new"]) == (models.old.greedy(), models.new.greedy())
    assert (seen["label with old"], seen["label with new"]) == ("old", "new")
    process.kill()
