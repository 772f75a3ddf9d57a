"""What vLLM's plugin loader calls in every process of a server: API server, engine core and workers."""

from __future__ import annotations

import os
import re
from typing import Final

from weightwire.discovery import transports
from weightwire.errors import PluginError

BACKEND: Final = "weightwire"
"""vLLM's name of the backend that takes any transport; `weightwire_<transport>` takes that one alone."""

BENCH: Final = "WEIGHTWIRE_VLLM_BENCH"
"""Environment variable with which the benchmark has the backend registered that it compares with."""

SUPPORTED: Final = ((0, 32), (0, 33))
"""First and last release line of vLLM that this is written for."""


class UnsupportedVLLM(PluginError):
    """This vLLM has another contract than those that weightwire-vllm knows."""


def register() -> None:
    """Register the backends with vLLM, and the engine core's part of an update; any number of times.

    Raises:
        UnsupportedVLLM: vLLM is too old, too new, or not as expected.
    """
    check_version()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from weightwire_vllm.engine_core import install

    for name in (BACKEND, *(f"{BACKEND}_{backend}" for backend in installed())):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "weightwire_vllm.engine", "HostedEngine")
    if os.environ.get(BENCH) and "per_tensor" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("per_tensor", "weightwire_vllm.bench_per_tensor", "PerTensorEngine")
    install()


def installed() -> list[str]:
    """The backend names of the transports that are installed; none of them is imported."""
    return sorted({name for transport in transports() if transport.state == "found" for name in transport.names})


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM that is not supported; one built from source, without a release number, is taken at its word.

    Args:
        version: Its version; None looks.

    Raises:
        UnsupportedVLLM: It is not.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or release[0] == "0.0" or "dev" in version:
        return
    line = (int(release[1]), int(release[2]))
    if not SUPPORTED[0] <= line <= SUPPORTED[1]:
        first, last = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise UnsupportedVLLM(
            f"weightwire-vllm supports vLLM {first} to {last}, and this is vLLM {version}: install another release of "
            "either, or set VLLM_PLUGINS to leave this plugin out"
        )
