"""All checks of the kit, in the order in which they are run: what is cheap and telling first."""

from __future__ import annotations

from typing import Final

from weightwire.testing.conformance import contract, failures, fleets, leaks, refusals, versions, weights
from weightwire.testing.conformance.check import Check, Group

CHECKS: Final[tuple[Check, ...]] = (
    *contract.CHECKS,
    *weights.CHECKS,
    *versions.CHECKS,
    *fleets.CHECKS,
    *failures.CHECKS,
    *refusals.CHECKS,
    *leaks.CHECKS,
)


def in_group(group: Group) -> tuple[Check, ...]:
    """The checks of one group."""
    return tuple(check for check in CHECKS if check.group == group)
