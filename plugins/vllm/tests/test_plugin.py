"""What vLLM's plugin loader finds, and what is refused when a server starts."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: ./dev test --vllm")

import weightwire_vllm.modelexpress
from weightwire.errors import MessageError, PluginError
from weightwire_vllm import register
from weightwire_vllm.options import parse_options
from weightwire_vllm.plugin import check_version, installed

pytestmark = pytest.mark.vllm


def test_it_is_vllms_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="weightwire")
    assert entry.load() is register


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, when vLLM imports inductor
def test_registers_every_transport_and_any_number_of_times() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore

    register()
    wrapped, registered = EngineCore.collective_rpc, dict(WeightTransferEngineFactory._registry)
    register()
    assert EngineCore.collective_rpc is wrapped
    assert WeightTransferEngineFactory._registry == registered
    assert {"weightwire", "weightwire_nccl", "weightwire_ipc"} <= registered.keys()
    assert {f"weightwire_{name}" for name in installed()} < registered.keys()


def test_importing_it_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, weightwire_vllm, weightwire_vllm.plugin; "
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.0.0.dev1", "0.40.0.dev3+gabc", "dev"])
def test_versions_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0"])
def test_versions_refused(version: str) -> None:
    with pytest.raises(PluginError, match=rf"supports vLLM 0\.32 to 0\.33, and this is vLLM {version}: install"):
        check_version(version)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stagging": "host"}, "takes an object with staging, strict, cast, got .*stagging"),
        ({"staging": "disk"}, "staging must be one of 'host', 'device', 'none', not 'disk'"),
        ({"cast": "yes"}, "cast must be one of True, False, not 'yes'"),
        ("none", "takes an object"),
    ],
)
def test_options_refused(given: object, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        parse_options(SimpleNamespace(additional_config={"weightwire": given}))


def test_modelexpress_says_how_to_get_it() -> None:
    with pytest.raises(ImportError, match="comes with ModelExpress: pip install"):
        _ = weightwire_vllm.modelexpress.ModelExpressWeightTransferEngine
    with pytest.raises(AttributeError):
        _ = weightwire_vllm.modelexpress.Other


def test_nothing_else_imports_modelexpress() -> None:
    code = (
        "import sys, weightwire_vllm.engine, weightwire_vllm.engine_core, weightwire_vllm.local; "
        "sys.exit(any('modelexpress' in name for name in sys.modules if name.startswith('weightwire')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
