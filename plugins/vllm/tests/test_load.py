"""Updates while requests keep coming."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

from plugins.vllm.tests.conftest import Connect, Models
from plugins.vllm.tests.scene import TOKENS, Server

pytestmark = pytest.mark.vllm

CALLERS = 3
Answers = list[tuple[int, ...]]


@contextmanager
def under_load(server: Server) -> Iterator[Answers]:
    """Ask all the time; the list holds every answer once the block ends. A request that fails is raised there."""
    over = threading.Event()
    answers: Answers = []

    def ask() -> None:
        while not over.is_set():
            answers.append(server.greedy())

    with ThreadPoolExecutor(CALLERS) as callers:
        asking: list[Future[None]] = [callers.submit(ask) for _ in range(CALLERS)]
        try:
            yield answers
        finally:
            over.set()
        for one in asking:
            one.result(60)


def test_each_answer_is_of_one_version(server: Server, models: Models, connect: Connect) -> None:
    trained = copy.deepcopy(models.old.module)
    trainer = connect(server.client, trained)
    versions = {models.old.greedy(), models.new.greedy()}
    with under_load(server) as answers:
        for number in range(30):
            trained.load_state_dict((models.new, models.old)[number % 2].module.state_dict())
            trainer.send_weights(weight_version=f"step-{number}", pause="wait")
    assert server.label() == "step-29"
    assert len(answers) > CALLERS
    assert set(answers) == versions
    assert server.greedy() == models.old.greedy()


@pytest.mark.parametrize("pause", [None, "keep"])
def test_every_request_completes(server: Server, models: Models, connect: Connect, pause: str | None) -> None:
    trainer = connect(server.client, models.new.module)
    with under_load(server) as answers:
        for number in range(8):
            trainer.send_weights(weight_version=f"step-{number}", pause=pause)
    assert {len(answer) for answer in answers} == {TOKENS}
    assert server.greedy() == models.new.greedy()
