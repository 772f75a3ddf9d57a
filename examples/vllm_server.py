"""A vLLM server that takes weights from weightwire, for as long as an example needs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from demo import DemoFailed, wait_until_healthy

SERVER_OPTIONS = (
    "--enforce-eager --dtype bfloat16 --max-model-len 128 --max-num-seqs 32 --kv-cache-memory-bytes 268435456 "
    """--weight-transfer-config {"backend":"weightwire"}"""
)


class ServerFailed(Exception):
    """The vLLM server did not start."""


@contextmanager
def running_server(model: Any, tokenizer: Any) -> Iterator[str]:
    """Run `vllm serve` with the model and yield its URL; afterwards the server is gone, whatever happens.

    Raises:
        ServerFailed: It did not come up; with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="rl-loop-") as name, socket.socket() as held:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        # vLLM sets this too, and so can bind a port that nobody else is given meanwhile.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port, log = held.getsockname()[1], Path(name, "vllm.log")
        options = f"--host 127.0.0.1 --port {port} --served-model-name policy {SERVER_OPTIONS}".split()
        with log.open("wb") as output:
            # A session of its own: Ctrl-C comes to this process alone, which then ends the server.
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("vllm")), "serve", name, *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ},
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                wait_until_healthy(process, url)
            except DemoFailed as failure:
                raise ServerFailed(f"vLLM did not start ({failure}):\n{log.read_text()[-3000:]}") from failure
            yield url
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(20.0)
