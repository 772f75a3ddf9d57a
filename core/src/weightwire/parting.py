"""Members that an epoch goes on without: the workers of a server that died, in the middle of a round or between two.

Trainer rank 0 says which workers form a group and how many groups have to stay. Whatever would end the epoch because
of one worker then only ends it for its group: its members hear that the epoch is dead, all others that these have
parted, and every exchange, also one under way, is answered without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from weightwire.errors import MessageError, WeightwireError, error_from_json
from weightwire.frames import Frame

if TYPE_CHECKING:
    from weightwire.hub import Hub
    from weightwire.loop import Loop

_SECONDS = 1.0


class Parting:
    """One member's view of who has parted; at trainer rank 0 also the say in it.

    Args:
        loop: The rendezvous's own.

    Attributes:
        hub: At trainer rank 0.
        on_parted: Called on the loop's thread with member ranks and the reason; must not block.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._parted: Mapping[int, WeightwireError] = {}
        self._groups: tuple[frozenset[int], ...] = ()
        self.hub: Hub | None = None
        self.on_parted: Callable[[Iterable[int], WeightwireError], object] | None = None

    @property
    def parted(self) -> Mapping[int, WeightwireError]:
        """Why, by member rank."""
        return self._parted

    def allow(self, groups: Iterable[Iterable[int]], *, least: int) -> None:
        """Let the epoch go on without some of these groups of member ranks, as long as `least` of them stay."""
        hub = self._host()
        self._groups = tuple(map(frozenset, groups))
        self._loop.call(lambda: hub.allow_parting(self._groups, least))

    def part(self, rank: int, error: WeightwireError) -> bool:
        """Go on without the group of member `rank`; whether that is so now.

        Args:
            rank: Of a worker.
            error: Why; its group is told so.
        """
        hub = self._host()
        done = threading.Event()

        def ask() -> None:
            hub.part(rank, error)
            done.set()

        self._loop.call(ask)
        done.wait(_SECONDS)
        return rank in self._parted

    def part_from_others(self, chosen: Collection[int], error: WeightwireError) -> None:
        """Go on with the groups of `chosen` members only.

        Raises:
            MessageError: Somebody chosen shares a group with somebody who is not, or the others may not be left out.
        """
        if not self._groups:
            raise MessageError(
                "this link cannot go on without some workers: that takes a FanoutClient whose policy is not 'all', "
                "and a transport that serves the others"
            )
        divided = [group for group in self._groups if group & set(chosen) and not group <= set(chosen)]
        if divided:
            raise MessageError(f"one server has the member ranks {sorted(divided[0])}: choose all of them, or none")
        for group in self._groups:
            if group.isdisjoint(chosen) and group.isdisjoint(self._parted) and not self.part(min(group), error):
                raise MessageError(f"member ranks {sorted(group)} cannot be left out: too few servers would be left")

    def hear(self, frame: Frame) -> None:
        """Members have parted. Runs on the loop's thread."""
        error = error_from_json(frame["error"])
        self._parted = {**self._parted, **dict.fromkeys(frame["ranks"], error)}
        if self.on_parted is not None:
            self.on_parted(frame["ranks"], error)

    def _host(self) -> Hub:
        assert self.hub is not None, "trainer rank 0 decides who may part"
        return self.hub
