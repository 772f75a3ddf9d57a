"""A server with vLLM's own backend, in which weightwire takes no part: it answers our client and our trainer.

Its wires need GPUs, so no weights come here: what is seen is the control plane, and that a failed round leaves it so
that the next one can begin.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Lineup, Models
from weightwire.errors import TransportUnavailable, Unsupported

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


def test_a_stock_server_answers(lineup: Lineup, models: Models, connect: Connect) -> None:
    server = lineup.get(models.old.folder, "--weight-transfer-config", json.dumps({"backend": "ipc"}))
    assert server.client.get_world_size() == 1
    server.client.pause("keep")
    assert server.paused()
    server.client.resume()

    trainer = connect(server.client, models.new.module, "ipc", wire="vllm")
    for _ in range(2):  # the second one first ends the update that the first one left open
        with pytest.raises(Unsupported, match="this tensor is on cpu"):
            trainer.send_weights(weight_version="failed", pause="keep")
        assert not server.paused()
    server.client.finish_weight_update()
    assert server.greedy() == models.old.greedy()
    assert server.label() != "failed"

    with pytest.raises(TransportUnavailable, match="needs nccl4py|has no GPU"):
        connect(server.client, models.new.module, "nccl", wire="vllm")
    assert server.greedy() == models.old.greedy()
