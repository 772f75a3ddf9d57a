"""`examples/ray_pull.py` as it is run, and submitted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.rdt.tests.cluster import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_pull.py"
SECONDS = 300
LINE = re.compile(
    r"step (\d)  loss (\d\.\d+)  \d+ parameters, (\d+) bytes pulled over nixl in .* s  "
    r"workers on step-(\d), bit for bit"
)


def run(environment: dict[str, str], folder: Path, *options: str) -> list[tuple[str, ...]]:
    output = folder / "output"
    # By default what Ray starts yields to every other process: beside other tests it would hardly run.
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **environment}
    variables["PYTHONFAULTHANDLER"] = "1"
    with (
        output.open("w") as file,
        subprocess.Popen([sys.executable, str(EXAMPLE), *options], cwd=folder, env=variables, stdout=file) as process,
    ):
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where it is
    said = output.read_text()
    assert process.returncode == 0, said
    matches = [LINE.fullmatch(line) for line in said.splitlines()]
    assert all(matches), said
    return [match.groups() for match in matches if match is not None]


@pytest.mark.thorough
@pytest.mark.timeout(330)
def test_in_a_cluster_that_is_there(cluster: Cluster, tmp_path: Path) -> None:
    first, second = run(cluster.variables, tmp_path, "--trainers", "1", "--workers", "1", "--steps", "2")
    assert (first[0], first[3], second[0], second[3]) == ("1", "1", "2", "2")
    assert float(second[1]) < float(first[1])


@pytest.mark.thorough
@pytest.mark.timeout(330)
def test_in_a_cluster_of_its_own(tmp_path: Path) -> None:
    lines = run({"RAY_ADDRESS": ""}, tmp_path)
    assert [line[0] for line in lines] == ["1", "2", "3"]
