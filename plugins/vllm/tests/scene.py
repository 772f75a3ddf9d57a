"""Real vLLM servers, the trainer's models, and what is asked of both; module-level, so that ranks can run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from safetensors.torch import load_file
from torch import nn

from weightwire import HTTPVLLMWeightSyncClient, StateDictSource, WeightTransferTrainerFactory
from weightwire.registry import engine_class
from weightwire.source import ModuleSource, WeightSource

TOKENS: Final = 16
PROMPT: Final = (5, 6, 7, 8)
START_SECONDS: Final = 240.0
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_OPTIONS: Final = (
    *("--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32", "--max-model-len", "256"),
    *("--kv-cache-memory-bytes", str(1 << 26), "--max-num-seqs", "8"),
    *("--weight-transfer-config", json.dumps({"backend": "weightwire"})),
)

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A checkpoint, and the same weights in the trainer.

    Attributes:
        module: transformers' own model, float32.
        folder: Its checkpoint.
    """

    module: Any
    folder: Path

    @property
    def weights(self) -> Path:
        """The file with its parameters."""
        return self.folder / "model.safetensors"

    def greedy(self, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
        """The tokens that transformers itself generates."""
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = self.module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
        return tuple(out[0, len(prompt) :].tolist())


def tiny_model(folder: Path, seed: int, family: str = "Qwen2", **config: Any) -> TinyModel:
    """Make a model of two layers with random weights: 4 heads, 2 key/value heads; a Qwen2 has 27 parameters, 1 MB."""
    import transformers
    from tokenizers import Tokenizer, models

    options: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",  # in bf16 random weights often have no clear winner
    }
    vocabulary = {f"<{place}>": place for place in range(512)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<0>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>").save_pretrained(folder)
    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}Config")(**{**options, **config})
    module = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    module.save_pretrained(folder)
    return TinyModel(module, folder)


class Server:
    """`vllm serve` on a port of the loopback interface that is held for it, in a process group of its own.

    Args:
        folder: The checkpoint.
        log: Where its output goes.
        arguments: Added to its command line.
        environment: Added to its environment.
    """

    def __init__(self, folder: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        # vLLM binds with the same option, and connections only come to a socket that listens.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        port = int(self._held.getsockname()[1])
        self.log = log
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder)),
            *("--host", "127.0.0.1", "--port", str(port), *_OPTIONS, *arguments),
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{port}"
        # A connection for each call: vLLM closes one after an unexpected error.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, timeout=60.0, limits=limits, trust_env=False)
        self.client = HTTPVLLMWeightSyncClient(self.url, timeout=60.0)

    def healthy(self) -> bool:
        """Whether it says that it takes requests."""
        try:
            return self._process.poll() is None and self.http.get("/health", timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def wait_until_healthy(self, seconds: float = START_SECONDS) -> None:
        """Wait for it to come up; its log is shown if it does not."""
        until = time.monotonic() + seconds
        while not self.healthy():
            over = self._process.poll() is not None or time.monotonic() > until
            assert not over, f"the vLLM server did not come up:\n{self.log.read_text(errors='replace')[-6000:]}"
            time.sleep(0.25)

    def post(self, path: str, body: object = None, **params: str) -> httpx.Response:
        """One request, whatever its answer."""
        return self.http.post(path, json=body, params=params)

    def complete(self, prompt: Sequence[int] = PROMPT) -> httpx.Response:
        """One greedy completion, whatever its answer."""
        request = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.post("/v1/completions", request)

    def greedy(self, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
        """The tokens of a greedy completion."""
        return token_ids(self.complete(prompt))

    def chat(self, question: str) -> str:
        """A greedy answer, by the model's chat template."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 24}
        answer = self.post("/v1/chat/completions", {**body, "temperature": 0})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"]).strip()

    def workers(self) -> list[dict[str, Any]]:
        """What weightwire in each worker process says of itself."""
        answer = self.post("/collective_rpc", {"method": "weight_transfer_engine", "args": ["info"]})
        answer.raise_for_status()
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def metrics(self) -> str:
        """Its counters, in Prometheus' format."""
        return self.http.get("/metrics").text

    def label(self) -> str:
        """The `weight_version` that it tells."""
        return str(self.client.weight_info()["weight_version"])

    def paused(self) -> bool:
        """Whether it says that it is paused."""
        return self.client.is_paused()

    def stop(self) -> None:
        """End it and all of its processes."""
        self.client.close()
        self.http.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20.0)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._held.close()


def token_ids(answer: httpx.Response) -> tuple[int, ...]:
    """The tokens of a completion; raises if there are none."""
    answer.raise_for_status()
    return tuple(answer.json()["choices"][0]["token_ids"])


def trainer_for(client: Any, weights: nn.Module | WeightSource, backend: str, **info: Any) -> Any:
    """A trainer engine."""
    source = ModuleSource(weights) if isinstance(weights, nn.Module) else weights
    init_info = engine_class("trainer", backend).init_info_cls(**{"timeout": 60.0, **info})
    return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)


def open_trainer(state: State, url: str, weights: Path, backend: str, **info: Any) -> None:
    """Make a trainer engine in a rank, of a file with weights."""
    client = HTTPVLLMWeightSyncClient(url, timeout=60.0)
    state["trainer"] = trainer_for(client, StateDictSource(load_file(weights)), backend, **info)


def send(state: State, label: str, pause: Any = None) -> dict[str, Any]:
    """Send once, from a rank."""
    report: dict[str, Any] = state["trainer"].send_weights(weight_version=label, pause=pause).to_json()
    return report
