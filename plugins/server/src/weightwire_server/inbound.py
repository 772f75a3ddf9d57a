"""What a request carries: a body, three headers and a query, each checked and named when it is wrong."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from weightwire.clients.http import SEQUENCE_HEADER, TIMEOUT_HEADER, UPDATE_HEADER
from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, MessageError, PayloadTooLarge

Choice = TypeVar("Choice", bound=str)
Presence = Literal["required", "optional"]

BODY_SECONDS = 30.0
"""Longest that a body may take to arrive, whatever time its call has."""

_LONGEST_ID = 128
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


class Inbound:
    """One request, read once.

    Args:
        request: The request.
        seconds: How long its call may take here; a shorter time in `Weightwire-Timeout` wins.
        body_limit: Largest body taken, in bytes.

    Raises:
        MessageError: A header that cannot be read.
    """

    def __init__(self, request: Request, *, seconds: float, body_limit: int) -> None:
        self.request = request
        self.what = request.url.path.rpartition("/")[2]
        self.deadline = Deadline(min(seconds, self._timeout(seconds)), what=self.what)
        self._body_limit = body_limit

    def _timeout(self, default: float) -> float:
        text = self.request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return default
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds >= 0:
            raise MessageError(f"{TIMEOUT_HEADER} must be seconds, got {text!r}", parameter=TIMEOUT_HEADER)
        return seconds

    @property
    def update_id(self) -> str | None:
        """Id of the update this call belongs to, if the client gave it one.

        Raises:
            MessageError: It is empty or longer than 128 characters.
        """
        text = self.request.headers.get(UPDATE_HEADER)
        if text is not None and not 0 < len(text) <= _LONGEST_ID:
            raise MessageError(
                f"{UPDATE_HEADER} must have 1 to {_LONGEST_ID} characters, got {len(text)}", parameter=UPDATE_HEADER
            )
        return text

    @property
    def sequence(self) -> int | None:
        """Number of this message within its update, if the client gave it one.

        Raises:
            MessageError: It is no natural number.
        """
        text = self.request.headers.get(SEQUENCE_HEADER)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise MessageError(f"{SEQUENCE_HEADER} must be a number, got {text!r}", parameter=SEQUENCE_HEADER)
        return int(text)

    def choice(self, key: str, choices: tuple[Choice, ...], *, default: Choice) -> Choice:
        """A query parameter that is one of some words.

        Raises:
            MessageError: It is none of them.
        """
        text = self.request.query_params.get(key, default)
        for choice in choices:
            if text == choice:
                return choice
        raise MessageError(f"{key} must be one of {', '.join(choices)}, got {text!r}", parameter=key)

    def flag(self, key: str, default: bool) -> bool:
        """A query parameter that is yes or no.

        Raises:
            MessageError: It is neither.
        """
        text = self.request.query_params.get(key)
        if text is None:
            return default
        if text.lower() not in _TRUE | _FALSE:
            raise MessageError(f"{key} must be true or false, got {text!r}", parameter=key)
        return text.lower() in _TRUE

    async def fields(
        self, **expected: tuple[type | tuple[type, ...], Literal["required", "optional"]]
    ) -> dict[str, Any]:
        """The body: a JSON object with these keys and no others; an absent or null optional one is None.

        Args:
            **expected: JSON type(s) of each key, and whether it must be there.

        Raises:
            MessageError: No JSON, no object, or an unknown, missing or mistyped key.
            PayloadTooLarge: The body is over the limit.
            DeadlineExceeded: The client did not send all of it in time.
        """
        raw = await self._body()
        record = self._parsed(raw) if raw.strip() else {}
        if unknown := sorted(set(record) - set(expected)):
            raise MessageError(f"Invalid body for /{self.what}: unknown key {unknown[0]!r}", parameter=unknown[0])
        for key, (kind, presence) in expected.items():
            value = record.setdefault(key, None)
            if value is None and presence == "required":
                raise MessageError(f"Invalid body for /{self.what}: missing key {key!r}", parameter=key)
            if value is not None and not isinstance(value, kind):
                raise MessageError(f"Invalid body for /{self.what}: {key} is a {_json_type(value)}", parameter=key)
        return record

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"Invalid body for /{self.what}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise MessageError(f"Invalid body for /{self.what}: expected an object, got a {_json_type(record)}")
        return record

    async def _body(self) -> bytes:
        declared = self.request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._body_limit:
            raise self._too_large()
        chunks, size = [], 0
        try:
            async with asyncio.timeout(min(self.deadline.remaining(), BODY_SECONDS)):
                async for chunk in self.request.stream():
                    size += len(chunk)
                    if size > self._body_limit:
                        raise self._too_large()
                    chunks.append(chunk)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the body of /{self.what} did not arrive in time") from error
        return b"".join(chunks)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body of /{self.what} is larger than {self._body_limit} bytes")


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
