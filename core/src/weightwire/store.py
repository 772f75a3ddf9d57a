"""A torch store over a Rendezvous: what gloo and NCCL need to find each other.

torch's own TCPStore blocks past any timeout when its host is stopped; here every wait ends with the deadline, its
cancellation, or the failure of a member, and says who has not come. gloo (torch 2.13) calls `set`, `wait` and `get`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from weightwire.deadline import Deadline
from weightwire.keyvalues import decode_value, encode_value


class Ask(Protocol):
    """Sends a request to the hub and waits for its result."""

    def __call__(self, request: dict[str, Any], deadline: Deadline, what: str, limit: float | None) -> Any:
        """`limit` in seconds may end the wait before the deadline does."""


class RendezvousStore(Store):
    """Made by `Rendezvous.store`, which keeps it for as long as itself.

    Values are bytes; text is taken as UTF-8. A method raises what `Rendezvous.exchange` raises, except that a wait
    which is not over in time does not end the epoch.

    Args:
        ask: Sends a request, waits for its result.
        prefix: Stores of one prefix share their keys.
        deadline: Ends every wait.
        ranks: Member ranks that use this prefix; all if None.
    """

    def __init__(self, ask: Ask, *, prefix: str, deadline: Deadline, ranks: Sequence[int] | None) -> None:
        super().__init__()
        self._ask_hub = ask
        self._prefix = prefix
        self._deadline = deadline
        self._ranks = None if ranks is None else list(ranks)

    def _ask(
        self,
        operation: str,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        timeout: timedelta | None = None,
    ) -> Any:
        coded = [encode_value(value if isinstance(value, bytes) else value.encode()) for value in values]
        request = {"operation": operation, "prefix": self._prefix, "keys": list(keys), "values": coded}
        what = f"{operation} of {', '.join(keys)} in the store {self._prefix!r}"
        limit = timeout.total_seconds() if timeout is not None else None
        return self._ask_hub({**request, "ranks": self._ranks}, self._deadline, what, limit)

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key`, and wake who waits for it."""
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys in one step."""
        self._ask("set", keys, values)

    def get(self, key: str) -> bytes:
        """The value of `key`, once it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys`, once all exist."""
        return [decode_value(text) for text in self._ask("get", keys)]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` exist, for `timeout` at most."""
        self._ask("wait", keys, timeout=timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` exist now."""
        return bool(self._ask("check", keys))

    def add(self, key: str, value: int) -> int:
        """Add to a counter that starts at 0; returns its new value."""
        return int(self._ask("add", [key], [str(value)]))

    def delete_key(self, key: str) -> bool:
        """Delete `key`; whether it existed."""
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        """How many keys the prefix has."""
        return int(self._ask("count"))

    # The names by which torch's C++ looks these up in a store written in Python.
    deleteKey = delete_key
    getNumKeys = num_keys
