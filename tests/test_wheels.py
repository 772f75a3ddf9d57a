"""Whoever installs core and one plugin has that one, is told how to have the others, and gets nothing else."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.environments import ROOT, Environment
from weightwire.command import COMMANDS
from weightwire.discovery import FIRST_PARTY

PLUGINS: Final = sorted(
    tomllib.loads(file.read_text())["project"]["name"] for file in ROOT.glob("plugins/*/pyproject.toml")
)

ROUND = """
import torch
from weightwire import LocalClient, ModuleSource, WeightTransferTrainerFactory, Worker
from {module} import {info}

trained, served = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
engine = WeightTransferTrainerFactory.trainer_init(
    {info}(), client=LocalClient(Worker(served)), source=ModuleSource(trained)
)
engine.send_weights()
assert torch.equal(trained.weight, served.weight)
engine.shutdown()
"""

CLUSTER = """
import contextlib, os
from weightwire_rdt.local_cluster import LocalCluster

stack = contextlib.ExitStack()
os.environ |= stack.enter_context(LocalCluster()).variables
"""

WORKS: Final = {
    "weightwire-nccl": ROUND.format(module="weightwire_nccl", info="NCCLTrainerInitInfo"),
    "weightwire-ipc": ROUND.format(module="weightwire_ipc", info="IPCTrainerInitInfo"),
    "weightwire-m2n": ROUND.format(module="weightwire_m2n", info="M2NTrainerInitInfo")
    + """
from weightwire.command import main

assert main(["plan", "--help"]) == 0
""",
    "weightwire-rdt": CLUSTER
    + ROUND.format(module="weightwire_rdt", info="ShardedRDTTrainerInitInfo")
    + """
import ray

ray.shutdown()
stack.close()
""",
    "weightwire-sparse": ROUND.format(module="weightwire_sparse", info="SparseNCCLTrainerInitInfo"),
    "weightwire-server": """
import torch
from weightwire import Worker
from weightwire_server import create_app

assert create_app(Worker(torch.nn.Linear(8, 8))).routes
""",
    "weightwire-cli": """
from weightwire.command import main

for name in ("push", "bench"):
    assert main([name, "--help"]) == 0
""",
    "weightwire-vllm": """
from weightwire_vllm.plugin import check_version, installed

check_version("0.32.0+cpu")
assert installed() == []
""",
}
"""What shows that a distribution works with core alone; every one has to be here."""

AFTERWARDS = """
import sys

own = {name.split(".")[0] for name in sys.modules if name.startswith("weightwire")}
print(*sorted(own))
"""


def test_every_plugin_is_here() -> None:
    assert sorted(WORKS) == PLUGINS


def test_a_wheel_holds_its_packages_typed_and_nothing_else(wheels: Path) -> None:
    built = sorted(wheels.glob("*.whl"))
    assert len(built) == len(PLUGINS) + 2, "core, the plugins and the template"
    for wheel in built:
        names = zipfile.ZipFile(wheel).namelist()
        tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        # One flat package of a name of its own: neither a namespace that others break, nor `tests` for everybody.
        assert all(top.startswith("weightwire") for top in tops), wheel.name
        assert f"{wheel.name.partition('-')[0]}/py.typed" in names
        assert all(f"{top}/__init__.py" in names for top in tops)


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("plugin", [None, *PLUGINS])
def test_core_and_one_plugin(wheels: Path, tmp_path: Path, plugin: str | None) -> None:
    environment = Environment(tmp_path / "environment")
    wanted = {"weightwire"} | ({plugin} if plugin else set())
    environment.install(wheels, f"weightwire[{plugin.removeprefix('weightwire-')}]" if plugin else "weightwire")
    assert environment.installed() == wanted
    own = {backend for backend, home in FIRST_PARTY.items() if home == plugin}
    assert environment.transports() == dict.fromkeys(own, "ready")
    if plugin:
        used = environment.run("-c", WORKS[plugin] + AFTERWARDS, timeout=120).splitlines()[-1]
        assert used.split() == sorted(name.replace("-", "_") for name in wanted)
    others_are_named(environment, wanted)


def others_are_named(environment: Environment, installed: set[str]) -> None:
    """A missing backend and a missing command are answered with the command that installs them."""
    backends = {backend: home for backend, home in FIRST_PARTY.items() if home not in installed}
    ask = "\n".join(
        [
            "from weightwire.command import main",
            "from weightwire.errors import TransportNotFound",
            "from weightwire.registry import engine_class",
            f"for backend in {list(backends)!r}:",
            "    try:",
            "        engine_class('worker', backend)",
            "    except TransportNotFound as error:",
            "        print(error)",
            f"for name in {[name for name, home in COMMANDS.items() if home not in installed]!r}:",
            "    assert main([name]) == 2",
        ]
    )
    said = environment.run("-c", ask)
    for backend, home in backends.items():
        assert f"backend: {backend}. " in said
        assert f"To have it: pip install {home}." in said
    for name, home in COMMANDS.items():
        assert (f"{name!r} comes with another distribution: pip install {home}\n" in said) == (home not in installed)
