"""The hub's side of the stores that gloo and NCCL bootstrap on: a table, and who waits for which keys."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightwire.errors import MessageError
from weightwire.frames import Frame


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for keys to exist."""

    rank: int
    request: Frame


def encode_value(value: bytes) -> str:
    """Bytes as JSON text."""
    return base64.b64encode(value).decode()


def decode_value(text: str) -> bytes:
    """What `encode_value` wrote."""
    return base64.b64decode(text)


class KeyValues:
    """Bytes by key. Every request names a `prefix`, and `keys` under it; two prefixes share nothing.

    `set`, `add`, `check`, `delete` and `count` are answered at once, `get` and `wait` once all their keys exist.
    """

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self._values: dict[tuple[str, str], bytes] = {}
        self._writers: dict[str, set[int]] = {}

    def serve(self, rank: int, request: Frame) -> list[tuple[Waiter, Frame]]:
        """Take a request of `rank`; returns the requests that are answered by it, each with its reply."""
        if request["operation"] in ("set", "add"):
            self._writers.setdefault(request["prefix"], set()).add(rank)
        answered, parked = [], []
        for waiter in (Waiter(rank, request), *self.waiters):
            if self._is_ready(waiter.request):
                answered.append((waiter, self._reply(waiter.request)))
            else:
                parked.append(waiter)
        self.waiters = parked
        return answered

    def forget(self, rank: int, number: int | None = None) -> None:
        """Drop what `rank` waits for, or one request of it."""
        self.waiters = [
            waiter for waiter in self.waiters if waiter.rank != rank or number not in (None, waiter.request["id"])
        ]

    def silent(self, prefix: str, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have written nothing under `prefix`."""
        return [rank for rank in ranks if rank not in self._writers.get(prefix, ())]

    def _is_ready(self, request: Frame) -> bool:
        if request["operation"] not in ("get", "wait"):
            return True
        return all((request["prefix"], key) in self._values for key in request["keys"])

    def _reply(self, request: Frame) -> Frame:
        try:
            return {"result": self._act(request)}
        except MessageError as error:
            return {"error": error.to_json()}

    def _act(self, request: Frame) -> Any:
        keys = [(request["prefix"], key) for key in request["keys"]]
        values = [decode_value(text) for text in request["values"]]
        match request["operation"]:
            case "set":
                self._values.update(zip(keys, values, strict=True))
            case "add":
                return self._add(keys[0], int(values[0]))
            case "get":
                return [encode_value(self._values[key]) for key in keys]
            case "check":
                return all(key in self._values for key in keys)
            case "delete":
                return self._values.pop(keys[0], None) is not None
            case "count":
                return sum(prefix == request["prefix"] for prefix, _ in self._values)
        return None

    def _add(self, key: tuple[str, str], amount: int) -> int:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise MessageError(f"add: the value of {key[1]!r} is not a number") from None
        self._values[key] = str(total).encode()
        return total
