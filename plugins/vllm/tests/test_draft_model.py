"""A server that decodes speculatively: its draft model is updated for itself, and never the answers."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Lineup, Models
from plugins.vllm.tests.scene import Server

pytestmark = pytest.mark.vllm


def accepted_share(server: Server, models: Models) -> float:
    """Which share of the draft's tokens the model takes; its answers are those of the model in any case."""

    def count(what: str) -> float:
        return float(re.findall(rf"^vllm:spec_decode_num_{what}_tokens_total\S* (\S+)", server.metrics(), re.M)[0])

    accepted, drafted = count("accepted"), count("draft")
    assert server.greedy() in (models.old.greedy(), models.new.greedy())
    return (count("accepted") - accepted) / (count("draft") - drafted)


def test_each_model_gets_its_own_weights(lineup: Lineup, models: Models, connect: Connect) -> None:
    speculative = {"method": "draft_model", "model": str(models.new.folder), "num_speculative_tokens": 3}
    server = lineup.get(models.old.folder, "--speculative-config", json.dumps(speculative))
    assert accepted_share(server, models) < 0.5
    served = server.workers()[0]["revision"]

    connect(server.client, models.old.module, draft=True).send_weights()
    assert server.greedy() == models.old.greedy()
    assert accepted_share(server, models) > 0.9
    assert server.workers()[0]["revision"] == served

    connect(server.client, models.new.module, takeover=True).send_weights(weight_version="new")
    assert server.greedy() == models.new.greedy()
    assert accepted_share(server, models) < 0.5

    connect(server.client, models.new.module, "ipc", draft=True, takeover=True).send_weights(pause="wait")
    assert accepted_share(server, models) > 0.9
    assert server.label() == "new"
