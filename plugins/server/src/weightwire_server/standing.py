"""Whether the weights of a server's ranks may be read: all ranks there, each whole, and all of one update."""

from __future__ import annotations

from weightwire.errors import Busy, OrderError, WeightsTorn
from weightwire.gate import Gate
from weightwire_server.fanout import Outcomes
from weightwire_server.roster import Roster


class Standing:
    """Opens and blocks the front's gate.

    Args:
        gate: The front's.
        roster: Knows who is there.
    """

    def __init__(self, gate: Gate, roster: Roster) -> None:
        self._gate = gate
        self._roster = roster
        self._been_ready: set[int] = set()
        self._touched = False
        self.torn: str | None = None
        """Why the ranks' weights do not belong together, if they do not."""
        self.refresh()

    def joined(self, rank: int) -> None:
        """A rank is ready: as its factory made it, which is what the others are only before the first commit."""
        if rank in self._been_ready and self._touched:
            self.torn = f"rank {rank} was replaced and holds its first weights"
        self._been_ready.add(rank)
        self.refresh()

    def finished(self, found: Outcomes, *, granted: bool, draft: bool) -> None:
        """Ranks have answered a finish.

        Args:
            found: What they answered.
            granted: Whether they had leave to commit, so that one that is silent may have done it.
            draft: Whether it was the draft model's, which says nothing of the main one.
        """
        if not found.errors:
            self._touched = True
            self.torn = self.torn if draft else None
        elif found.answers or (granted and found.silent):
            self._touched = True
            error = next(iter(found.errors.values()))
            self.torn = f"some ranks have committed and some have not: {error}"
        self.refresh()

    def reset(self) -> None:
        """Ranks are being filled with zeros."""
        self._touched = True
        self.torn = "the weights were reset"
        self.refresh()

    def refuse_torn(self, what: str) -> None:
        """Refuse a call that needs whole weights.

        Raises:
            OrderError: They are not.
        """
        if (reason := self._why_torn()) is not None:
            raise OrderError(f"{what} while the weights are torn: push a full update first ({reason})")

    def _why_torn(self) -> str | None:
        blocked = [member.blocked for member in self._roster.members.values() if member.blocked is not None]
        return self.torn or next(iter(blocked), None)

    def refresh(self) -> None:
        """Let readers in or keep them out, by what is known now."""
        absent, torn = self._roster.absent(), self._why_torn()
        if absent:
            self._gate.block(lambda: Busy("; ".join(self._roster.absent().values())))
        elif torn is not None:
            self._gate.block(lambda: WeightsTorn(f"only a full update makes the weights whole again: {torn}"))
        else:
            self._gate.block(None)
