"""A vLLM server of the benchmark, and the memory of its worker process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from weightwire.clients.http import HTTPVLLMWeightSyncClient
from weightwire.errors import PeerLost

_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_OPTIONS: Final = (
    *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "128"),
    *("--kv-cache-memory-bytes", str(1 << 26), "--max-num-seqs", "4"),
)


class ProcessMemory:
    """Resident memory of a process, in bytes.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        self._idle = 0

    def begin(self) -> None:
        """Measure the peak from now on."""
        (self._process / "clear_refs").write_text("5")
        self._idle = self._read("VmRSS")

    def end(self) -> dict[str, int]:
        """What it had at `begin`, and the most that it has had since."""
        return {"idle": self._idle, "peak": self._read("VmHWM")}

    def _read(self, key: str) -> int:
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


class Server:
    """`vllm serve` on a free port of the loopback interface, in a process group of its own.

    Args:
        folder: The checkpoint; the log is written into it.
        backend: Its weight transfer backend.
        environment: Added to this process's.

    Attributes:
        memory: The worker process's, once it is healthy.
    """

    memory: ProcessMemory

    def __init__(self, folder: Path, backend: str, *, environment: Mapping[str, str] = {}) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._log = folder / f"{backend}.log"
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--served-model-name", "bench"),
            *("--host", "127.0.0.1", "--port", str(port), *_OPTIONS),
            *("--weight-transfer-config", json.dumps({"backend": backend})),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{port}"
        self.client = HTTPVLLMWeightSyncClient(self.url)

    def wait_until_healthy(self, seconds: float) -> None:
        """Wait for the server to take requests.

        Raises:
            PeerLost: It ended, or did not come up in time; with the end of its log.
        """
        until = time.monotonic() + seconds
        while True:
            if self._process.poll() is not None or time.monotonic() > until:
                raise PeerLost(f"the vLLM server did not come up: {self._log.read_text()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        answer = self._post("collective_rpc", {"method": "weight_transfer_engine", "args": ["info"]})
        self.memory = ProcessMemory(int(answer["results"][0]["pid"]))

    def greedy_tokens(self) -> tuple[int, ...]:
        """Sixteen tokens of the answer to a fixed prompt."""
        request = {
            "model": "bench",
            "prompt": [5, 6, 7, 8],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return tuple(self._post("v1/completions", request)["choices"][0]["token_ids"])

    def _post(self, path: str, body: object) -> Any:
        answer = httpx.post(f"{self.url}/{path}", json=body, timeout=120.0, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def stop(self) -> None:
        """End it and all of its processes."""
        self.client.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20.0)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
