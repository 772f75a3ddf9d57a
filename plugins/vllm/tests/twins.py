"""vLLM's own models on the meta device and in memory, recorded and loaded; module-level, so that a rank can run it."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from plugins.vllm.tests.scene import ENVIRONMENT, State
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.recorded_install import feed, from_full, from_pieces, install, tensors_of
from weightwire.recording import record_loads

_SPECIAL: Final = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
_COMMON: Final = {"vocab_size": 500, "max_position_embeddings": 256, **_SPECIAL}  # 500 rows are padded to 512
_LLAMA: Final = {
    **_COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_EXPERTS: Final = {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "Llama": _LLAMA,
    "Qwen2": {**_LLAMA, "tie_word_embeddings": True},
    "Qwen3": _LLAMA,
    "Mixtral": {**_LLAMA, "num_local_experts": 4},
    "Qwen3Moe": _EXPERTS,
    "GPT2": {**_COMMON, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


def compare(state: State, folder: Path, family: str, ranks: int) -> list[dict[str, Any]]:
    """Record each rank's loader, and hold both ways to install against `load_weights`; what is said of each rank."""
    os.environ.update(ENVIRONMENT)
    tensors = make_checkpoint(folder, family)
    return [_one_rank(vllm_config, tensors) for vllm_config in each_rank(folder, ranks)]


def make_checkpoint(folder: Path, family: str, *, seed: int = 7) -> dict[str, Tensor]:
    """Random weights of a tiny model, in bf16, none of them as another seed's; they are in the folder too."""
    import transformers
    from safetensors.torch import load_file

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    made = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    made.to(torch.bfloat16).save_pretrained(folder)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def each_rank(folder: Path, ranks: int) -> Iterator[Any]:
    """vLLM's configuration for a checkpoint, once for each tensor-parallel rank that this process then counts as."""
    from vllm.engine.arg_utils import EngineArgs

    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True}
    arguments = EngineArgs(str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26, **options)
    vllm_config = arguments.create_engine_config()
    with _group(vllm_config) as group:
        for rank in range(ranks):
            group.world_size, group.rank_in_group = ranks, rank
            try:
                yield vllm_config
            finally:
                group.world_size, group.rank_in_group = 1, 0


@contextmanager
def _group(vllm_config: Any) -> Iterator[Any]:
    """vLLM's tensor-parallel group, of this process alone; its size and rank may then be changed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
    with set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield parallel_state.get_tp_group()
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _model(vllm_config: Any, device: str) -> nn.Module:
    """One of vLLM's models, zeros everywhere."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype, torch.device(device):
        model: nn.Module = initialize_model(vllm_config=config)
    with torch.no_grad():
        for tensor in tensors_of(model).values():
            tensor.zero_()
    return model


def loaded(vllm_config: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """One of vLLM's models with these weights, ready to compute with."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = _model(vllm_config, "cpu")
    with set_current_vllm_config(vllm_config):
        model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return model


def _one_rank(vllm_config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    # In this order, as in a server: vLLM keeps rotary embeddings by their configuration, on whatever device came first.
    plain, straight, fed, twin = (_model(vllm_config, device) for device in ("cpu", "cpu", "cpu", "meta"))
    plan = record_loads(twin, metadata)
    plain.load_weights(iter(tensors.items()))  # type: ignore[operator]
    take = from_full(tensors)
    pieces = {key: take(*key).clone(memory_format=torch.contiguous_format) for key in plan.pieces}
    if not plan.opaque:
        install(plan, tensors_of(straight), from_pieces(pieces))
    full = {name: tensors[name] for name in plan.full_sources}
    feed(plan, fed.load_weights, from_pieces(pieces), full)  # type: ignore[arg-type]
    return {
        **plan.describe(),
        "again": LoadPlan.from_json(plan.to_json()) == plan,
        "fills": len(plan.fills),
        "share": plan.piece_bytes / sum(tensor.nbytes for tensor in tensors.values()),
        "straight differs": differing(plain, straight),
        "fed differs": differing(plain, fed),
    }


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The parameters and buffers that are not bit for bit the same."""
    second = _with_packed(other)
    pairs = ((name, tensor.detach(), second[name].detach()) for name, tensor in _with_packed(one).items())
    return [name for name, a, b in pairs if not torch.equal(_bits(a), _bits(b))]


def _with_packed(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; of a weight that a kernel of this processor has packed away, what it does to ones."""
    found = dict(tensors_of(model))
    for name, module in model.named_modules():
        weight, linear = getattr(module, "weight", None), getattr(module, "cpu_linear", None)
        if isinstance(weight, Tensor) and linear is not None and not weight.numel():
            width = getattr(module, "input_size_per_partition", None) or module.input_size
            found[f"{name}.weight"] = linear(torch.eye(int(width), dtype=weight.dtype), weight, None)
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
