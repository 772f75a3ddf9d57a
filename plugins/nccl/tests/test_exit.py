"""A process that ends in the middle of things ends with its own status, at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from weightwire import LocalClient, ModuleSource, WeightTransferTrainerFactory, Worker
from weightwire_nccl import NCCLTrainerInitInfo

worker = Worker(torch.nn.Linear(4, 4))
trainer = WeightTransferTrainerFactory.trainer_init(
    NCCLTrainerInitInfo(), client=LocalClient(worker), source=ModuleSource(torch.nn.Linear(4, 4))
)
trainer.send_weights()
{end}
sys.exit(7)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        *(
            pytest.param(end, marks=pytest.mark.thorough)
            for end in ("trainer.shutdown()", "trainer.shutdown(); worker.shutdown()")
        ),
    ],
)
def test_the_exit_status_is_the_process_own(end: str) -> None:
    script = SCRIPT.format(end=end)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=False)
    assert run.returncode == 7, run.stderr
