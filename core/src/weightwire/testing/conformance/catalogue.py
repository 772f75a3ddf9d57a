"""All checks of the kit, in the order in which they are run: what is cheap and telling first."""

from __future__ import annotations

from typing import Final

from weightwire.testing.conformance import weights
from weightwire.testing.conformance.check import Check, Group

CHECKS: Final[tuple[Check, ...]] = (*weights.CHECKS,)


def in_group(group: Group) -> tuple[Check, ...]:
    """The checks of one group."""
    return tuple(check for check in CHECKS if check.group == group)
