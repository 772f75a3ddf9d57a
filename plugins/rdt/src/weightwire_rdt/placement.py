"""Room for ranks in a Ray cluster, taken for all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

from weightwire.errors import Busy, MessageError
from weightwire_rdt.cluster import join_cluster

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""On as few nodes as possible; on as many; all on one; each on another."""
ONE_CPU: Final[Mapping[str, float]] = MappingProxyType({"CPU": 1.0})


class Room:
    """A placement group of Ray's with one place for each rank, all of which are there or none.

    Args:
        ranks: How many.
        resources: What each rank takes, e.g. `{"CPU": 4, "GPU": 1}`.
        strategy: How ranks are spread over nodes.
        timeout: How long to wait for room, in seconds.

    Raises:
        MessageError: Ray refuses the resources.
        Busy: There was no room in time; says what the cluster has.
    """

    def __init__(
        self,
        ranks: int,
        *,
        resources: Mapping[str, float] = ONE_CPU,
        strategy: Strategy = "PACK",
        timeout: float = 60.0,
    ) -> None:
        ray = join_cluster()
        from ray.util.placement_group import placement_group

        self._resources = dict(resources)
        try:
            self._group = placement_group([self._resources] * ranks, strategy=strategy)
        except ValueError as error:
            raise MessageError(f"room for {ranks} ranks of {self._resources}, {strategy}: {error}") from error
        if not self._group.wait(timeout):
            self.release()
            raise Busy(
                f"the cluster had no room within {timeout:g} s for {ranks} ranks of {self._resources}, {strategy}: of "
                f"{_said(ray.cluster_resources())} in {len(ray.nodes())} nodes, {_said(ray.available_resources())} "
                "are free"
            )

    def options(self, rank: int) -> dict[str, Any]:
        """Ray's options for the actor of a rank, with which it gets its place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self._resources.get("CPU", 0),
            "num_gpus": self._resources.get("GPU", 0),
            "resources": own,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
            ),
        }

    def release(self) -> None:
        """Give the room back; what still runs in it ends."""
        join_cluster()
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
