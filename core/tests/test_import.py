from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weightwire

NAMES = sorted(weightwire._MODULES)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    heavy = "{'torch', 'importlib_metadata', 'pluggy', 'httpx'}"
    assert run(f"import sys, weightwire; print({heavy} & sys.modules.keys() or 'none')") == "none"


def test_import_asks_for_no_distribution() -> None:
    asked = """
import sys
class Watch:
    def find_spec(self, *_): return None
    def find_distributions(self, *_):
        print("asked")
        return ()
sys.meta_path.insert(0, Watch())
import weightwire
print("imported")
weightwire.WeightTransferEngineFactory.register_engine("mine", object)
"""
    assert run(asked).split()[:2] == ["imported", "asked"]


@pytest.mark.parametrize(
    "code",
    [
        "from weightwire import Deadline, hookimpl, WeightwireError, errors",
        "from weightwire import WeightTransferEngineFactory as f; f.register_engine('mine', object)",
        "from weightwire.loading import survey; assert 'nccl' in [one.backend for _, one in survey()]",
        "from weightwire.command import main; main(['plugins', '--json'])",
    ],
)
def test_what_needs_no_torch_imports_none(code: str) -> None:
    assert run(f"import sys; {code}; print('torch' in sys.modules)").splitlines()[-1] == "False"


@pytest.mark.parametrize("name", NAMES)
def test_public_name(name: str) -> None:
    assert getattr(weightwire, name) is not None
    assert name in dir(weightwire)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(weightwire.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module.removeprefix("weightwire.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "weightwire"
        for alias in node.names
    }
    assert seen == weightwire._MODULES


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'WeightTransferWorker'"):
        _ = weightwire.WeightTransferWorker


def test_name_of_a_distribution_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weightwire_rdt", None)
    with pytest.raises(ImportError, match="pip install weightwire-rdt"):
        _ = weightwire.RayVLLMWeightSyncClient
