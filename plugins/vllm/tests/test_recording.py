"""vLLM's own loaders, recorded: nothing is opaque, and what is installed is what they load, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests import twins
from weightwire.testing.pool import Rank

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


@pytest.mark.parametrize("family", twins.FAMILIES)
def test_recorded_loading_is_plain_loading(family: str, process: Rank, tmp_path: Path) -> None:
    shares = {}
    for size in (1, 2):
        for told in process.call(twins.compare, tmp_path, family, size, timeout=120):
            assert told["opaque"] == []
            assert told["unmoved"] == []
            assert told["straight differs"] == told["fed differs"] == []
            assert told["again"]
            shares[size] = told["share"]
    assert shares[2] < 0.65 < shares[1]
