"""What every rank of a link tells the others before the first round, over the rendezvous, and how bytes will travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import torch

from weightwire.deadline import Deadline
from weightwire.errors import HandshakeError, UpdateRefused, WeightwireError
from weightwire.layout import ParamMeta
from weightwire_rdt import nixl_agent

PREFERRED: Final = ("nixl", "ray_nixl", "gloo", "object_store")
"""Ways for bytes, the fastest first."""
_PROOF_SECONDS: Final = 20.0

Wire_co = TypeVar("Wire_co", covariant=True)
Gather = Callable[[str, Any], Mapping[int, Any]]


def available(device: torch.device) -> dict[str, str]:
    """Of each way why this process cannot use it for tensors on `device`; `""` if it can."""
    missing = nixl_agent.missing() or ""
    gloo = "" if device.type == "cpu" else f"gloo moves what is in the processors' memory, not on {device}"
    return {"nixl": missing, "ray_nixl": missing, "gloo": gloo, "object_store": ""}


def mask_of(taken: Sequence[int]) -> str:
    """Places in the metadata as a number in hex, a bit for each."""
    return hex(sum(1 << place for place in taken))


class Way(Protocol[Wire_co]):
    """One way for bytes, as one rank tries it."""

    def introduce(self) -> dict[str, Any]:
        """What the other ranks have to know, as JSON."""

    def open(self, members: Mapping[int, Any], deadline: Deadline) -> Wire_co:
        """Build this rank's end from what all members said, and prove that it moves bytes.

        Raises:
            WeightwireError: It does not.
        """


class Meeting:
    """What all members said.

    Args:
        members: By member rank.
        trainers: How many of them are trainer ranks.
        label: A member in words.
    """

    def __init__(self, members: Mapping[int, Any], trainers: int, label: Callable[[int], str]) -> None:
        self._members = members
        self._trainers = trainers
        self._label = label

    @property
    def producers(self) -> dict[int, tuple[str, str]]:
        """Of each trainer rank its producer's name and namespace."""
        return {rank: tuple(self._members[rank]["producer"]) for rank in range(self._trainers)}

    def check_claimed(self, metadata: Sequence[ParamMeta], foreign: Sequence[str]) -> None:
        """Refuse parameters that no worker takes, unless a sink is not strict.

        Raises:
            UpdateRefused: Names the first.
        """
        workers = [said for rank, said in self._members.items() if rank >= self._trainers]
        if not all(said["strict"] for said in workers):
            return
        taken = 0
        for said in workers:
            taken |= int(said["takes"], 16)
        known = set(foreign)
        lost = [
            meta.name
            for place, meta in enumerate(metadata)
            if meta.nbytes and not taken >> place & 1 and meta.name not in known
        ]
        if lost:
            more = f", nor {len(lost) - 1} more" if len(lost) > 1 else ""
            raise UpdateRefused(
                f"no worker takes parameter {lost[0]!r}{more}: declare it foreign, or load with strict=False",
                parameter=lost[0],
            )

    def agree(
        self, asked: str, ways: Mapping[str, Callable[[], Way[Wire_co]]], gather: Gather, deadline: Deadline
    ) -> tuple[str, Wire_co]:
        """Try one way after the other until one moves bytes between all ranks.

        Args:
            asked: A way, or `"auto"`.
            ways: What makes each.
            gather: Exchanges a payload with all members.
            deadline: Of the public call.

        Returns:
            Its name, and this rank's end.

        Raises:
            HandshakeError: None does; says why.
        """
        wanted = PREFERRED if asked == "auto" else (asked,)
        reasons = []
        for name in wanted:
            lacking = [
                f"{self._label(rank)}: {said['ways'].get(name, 'it knows of no such way')}"
                for rank, said in sorted(self._members.items())
                if said["ways"].get(name, "unknown")
            ]
            wire, failed = (None, lacking) if lacking else self._try(name, ways[name](), gather, deadline)
            if wire is not None:
                return name, wire
            reasons.append(f"{name}: {', '.join(failed[:3])}")
        raise HandshakeError(f"no way for bytes works between all ranks ({'; '.join(reasons)})")

    def _try(
        self, name: str, way: Way[Wire_co], gather: Gather, deadline: Deadline
    ) -> tuple[Wire_co | None, list[str]]:
        wire, why, said = None, "", {}
        try:
            said = way.introduce()
        except WeightwireError as error:
            why = str(error)
        members = gather(f"rdt-{name}", {"said": said, "why": why})
        if not any(member["why"] for member in members.values()):
            try:
                part = deadline.part(min(1.0, _PROOF_SECONDS / max(deadline.remaining(), 0.001)), f"a proof of {name}")
                wire = way.open({rank: member["said"] for rank, member in members.items()}, part)
            except WeightwireError as error:
                if deadline.cancelled is not None:
                    raise
                why = str(error)
        members = gather(f"rdt-{name}-proof", {"why": why})
        failed = [f"{self._label(rank)}: {member['why']}" for rank, member in sorted(members.items()) if member["why"]]
        if failed and wire is not None:
            wire.close()  # type: ignore[attr-defined]
            wire = None
        return wire, failed
