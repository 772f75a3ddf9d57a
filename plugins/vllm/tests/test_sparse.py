"""Deltas into a real vLLM server: a language model learns for ten steps, and each sends what it changed."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Lineup, Models
from plugins.vllm.tests.learning import Learner, told_by
from plugins.vllm.tests.scene import START_SECONDS, Server
from plugins.vllm.tests.test_language_model import RANDOM_WEIGHTS, folder, real

__all__ = ["folder", "real"]

pytestmark = pytest.mark.vllm

STEPS: Final = 10
NOT_OURS: Final = "worker rank 0 holds weights that this trainer did not send"


def details(report: Any) -> dict[str, Any]:
    """What the trainer says of a round."""
    told: dict[str, Any] = report.ranks[0].details
    return told


def checksums(server: Server) -> dict[str, str]:
    """Of what the server's kernels use."""
    answer = server.post("/weight_checker", {"action": "checksum"})
    answer.raise_for_status()
    sums: dict[str, str] = answer.json()["checksums"]
    return sums


def check_same_as_dense(server: Server, connect: Connect, weights: nn.Module) -> None:
    """Push everything over nccl: nothing may change by it."""
    patched = checksums(server)
    connect(server.client, weights, "nccl", takeover=True).send_weights(weight_version="dense")
    assert checksums(server) == patched
    assert server.label() == "dense"


def describe(step: int, report: Any, gaps: list[float]) -> str:
    told, worker = details(report), report.ranks[-1]
    seconds = {**report.seconds, "find": told["find_seconds"], "commit": worker.seconds["commit"]}
    return (
        f"step {step:2}  {told['way']}  {told['changed'] / told['elements']:.3%} of {told['elements']} changed, "
        f"{worker.bytes} of {report.bytes} bytes ({worker.bytes / report.bytes:.3%}, {told['whole_pieces']} whole), "
        f"{report.total_seconds:.2f} s ({', '.join(f'{name} {one:.3f}' for name, one in seconds.items())}), "
        f"gap {gaps[-1]:.4f}, to earlier steps {' '.join(f'{gap:.4f}' for gap in gaps[-2:-5:-1])}"
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """OpenMP's threads wait for each other ten times as long where they share cores with a server."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(START_SECONDS + 150)
def test_a_model_that_learns(
    lineup: Lineup, folder: Path, real: Any, connect: Connect, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    loop = importlib.import_module("rl_loop")
    from transformers import AutoTokenizer

    server = lineup.get(folder, *RANDOM_WEIGHTS)
    learner = Learner(copy.deepcopy(real), AutoTokenizer.from_pretrained(folder))
    trainer = connect(server.client, learner.served, "sparse_nccl", takeover=True, verify_every=4)
    report = trainer.send_weights(weight_version="step-0", pause="keep")
    assert (details(report)["way"], details(report)["reason"]) == ("dense", "the first round of this trainer")
    dense = f"step  0  dense  {report.bytes} bytes, {report.total_seconds:.2f} s"
    print(f"\n{dense}")  # noqa: T201  for `pytest -s`

    ours = [learner.logprobs()]
    for step in range(1, STEPS + 1):
        learner.step()
        ours.append(learner.logprobs())
        report = trainer.send_weights(weight_version=f"step-{step}", pause="keep")
        theirs = told_by(server, learner.texts)
        gaps = [float((one - theirs).abs().mean()) for one in ours]
        print(describe(step, report, gaps))  # noqa: T201
        loop.check(step, (ours[-1] - theirs).abs())
        # With the weights of three steps ago it would not have passed.
        assert all(gap > loop.TOLERANCE for gap in gaps[:-3])
        told, worker = details(report), report.ranks[-1]
        assert (told["way"], told["reason"]) == ("delta", "")
        assert 0 < told["changed"] / told["elements"] < 0.2
        assert worker.bytes < 0.2 * report.bytes
        assert worker.details["patched"] > 0
        assert report.verified == (report.revision["number"] % 4 == 0)
        assert server.workers()[0]["revision"] == report.revision

    check_same_as_dense(server, connect, learner.served)
    for way, reason in (("dense", NOT_OURS), ("delta", "")):
        learner.step()
        report = trainer.send_weights(weight_version="again", pause="keep")
        assert (details(report)["way"], details(report)["reason"]) == (way, reason)
        gap = (learner.logprobs() - told_by(server, learner.texts)).abs()
        print(f"{way}: {reason!r}, {report.total_seconds:.2f} s, gap {gap.mean():.4f}")  # noqa: T201
        loop.check(STEPS, gap)
    check_same_as_dense(server, connect, learner.served)


def test_two_ranks(two_ranks: Server, models: Models, connect: Connect) -> None:
    model = copy.deepcopy(models.old)
    trainer = connect(two_ranks.client, model.module, "sparse_nccl", takeover=True, checksum=True)
    trainer.send_weights(weight_version="step-0")
    random, answers = torch.Generator().manual_seed(0), {model.greedy()}
    for step in range(1, 4):
        with torch.no_grad():
            for one, new in zip(model.module.parameters(), models.new.module.parameters(), strict=True):
                one.copy_(torch.where(torch.rand(one.shape, generator=random) < 0.02, new, one))
        report = trainer.send_weights(weight_version=f"step-{step}")
        assert details(report)["way"] == "delta"
        assert report.verified
        assert [rank.details["patched"] > 0 for rank in report.ranks[1:]] == [True, True]
        assert [worker["revision"] for worker in two_ranks.workers()] == [report.revision] * 2
        assert two_ranks.greedy() == model.greedy()
        answers.add(model.greedy())
    assert len(answers) == 4
    # vLLM's own reset tells nobody; a delta installs all that is kept here anew.
    before = checksums(two_ranks)
    two_ranks.post("/weight_checker", {"action": "reset"}).raise_for_status()
    assert checksums(two_ranks) != before
    told = details(trainer.send_weights(weight_version="unchanged"))
    assert (told["way"], told["changed"]) == ("delta", 0)
    assert checksums(two_ranks) == before
    check_same_as_dense(two_ranks, connect, model.module)
