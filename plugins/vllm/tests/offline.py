"""An offline `vllm.LLM` in a process of its own, which is also its trainer; module-level, so that a rank can run it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from plugins.vllm.tests.scene import ENVIRONMENT, PROMPT, TOKENS, State, trainer_for
from weightwire import StateDictSource
from weightwire.errors import WeightwireError


def make_llm(state: State, folder: Path, *, own_process: bool) -> None:
    """Make the `LLM`; its engine core runs in a process of its own, or in this one, where its model can be reached."""
    # A rank is a daemon, which vLLM could not start its engine core from.
    multiprocessing.current_process().daemon = False
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(own_process)))
    from vllm import LLM

    state["llm"] = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
        weight_transfer_config={"backend": "weightwire"},
    )


def end(state: State) -> None:
    """End the `LLM` and its process."""
    state.pop("llm").llm_engine.engine_core.shutdown()


def push(state: State, weights: Path, backend: str, label: str) -> dict[str, Any]:
    """Send a file's weights from this process; returns the report, the label and what a worker says."""
    from weightwire_vllm import LocalLLMClient

    client = LocalLLMClient(state["llm"])
    trainer = trainer_for(client, StateDictSource(load_file(weights)), backend, takeover=True)
    try:
        report = trainer.send_weights(weight_version=label, pause="wait").to_json()
    finally:
        trainer.shutdown()
    return {**report, **client.weight_info()}


def greedy(state: State) -> tuple[int, ...]:
    """The tokens of a greedy completion."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (output,) = state["llm"].generate({"prompt_token_ids": list(PROMPT)}, parameters, use_tqdm=False)
    return tuple(output.outputs[0].token_ids)


def push_into_a_failing_install(state: State, folder: Path, old: Path, new: Path) -> dict[str, Any]:
    """What happens when the live model's loader fails once, after most layers. OpenMP wants it all on one thread."""
    make_llm(state, folder, own_process=False)
    push(state, new, "nccl", "first")
    _fail_next_install(state)
    seen: dict[str, Any] = {}
    for what, act in (("failure", lambda: push(state, old, "nccl", "failed")), ("refusal", lambda: greedy(state))):
        try:
            act()
        except (WeightwireError, RuntimeError) as error:
            seen[what] = str(error)
    for which, weights in (("old", old), ("new", new)):
        seen[f"label with {which}"] = push(state, weights, "nccl", which)["weight_version"]
        seen[which] = greedy(state)
    return seen


def _fail_next_install(state: State) -> None:
    core = state["llm"].llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.model
    plain = model.load_weights

    def fail(pairs: Any) -> Any:
        model.load_weights = plain
        plain(list(pairs)[:20])
        raise MemoryError("no memory for this layer")

    model.load_weights = fail
