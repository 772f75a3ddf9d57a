"""vLLM's executor on Ray, where its workers have no GPU: its CPU platform names no resource of Ray's to place them by.

vllm serve ... --distributed-executor-backend plugins.vllm.tests.ray_on_cpu.RayExecutorOnCPU
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2


class RayWorkerOnCPU(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]
    """One of its worker actors, which asks Ray for no GPUs."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class RayExecutorOnCPU(ray_executor_v2.RayExecutorV2):  # type: ignore[misc]
    """Places a worker by one of Ray's CPUs."""

    def _init_executor(self) -> None:
        platform = mock.patch.object(type(current_platform), "ray_device_key", "CPU")
        worker = mock.patch.object(ray_executor_v2, "RayWorkerProc", RayWorkerOnCPU)
        with platform, worker:
            super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {"num_gpus": 0}
