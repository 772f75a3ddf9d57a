"""Everything weightwire raises.

Each error is a `WeightwireError` and also the builtin a caller would expect, says which transport, rank and
parameter it is about, and what to do. `status` is the HTTP status a host answers with.

    WeightwireError                                     500
    |-- PluginError
    |   |-- TransportNotFound        (ValueError)       400   nobody provides that backend
    |   |-- TransportConflict        (ValueError)       400   two distributions provide it
    |   |-- TransportBroken          (ImportError)      500   its plugin cannot be loaded
    |   |-- TransportIncompatible    (RuntimeError)     501   it was made for another weightwire
    |   |-- TransportDisabled        (RuntimeError)     501   switched off by the environment
    |   `-- TransportUnavailable     (RuntimeError)     501   it cannot work on this machine
    |-- MetadataError                (ValueError)       400   a ParamMeta that cannot be
    |   `-- SourceMismatch                              400   a source disagrees with its metadata
    |-- MessageError                 (ValueError)       400   unknown, missing or mistyped keys
    |-- UpdateRefused                (ValueError)       400   the model does not take these weights
    |   |-- PlanOutdated                                400   the link was planned from what is no longer so
    |   `-- ResultDiffers                               400   a change would not lead to the weights meant
    |-- HandshakeError               (ValueError)       400   ranks disagree about what will be sent
    |-- Unauthorized                 (PermissionError)  401
    |-- PayloadTooLarge              (ValueError)       413
    |-- OrderError                   (RuntimeError)     409   a call that does not fit the state
    |   |-- NotInitialised                              409   the worker has no trainer
    |   `-- Superseded                                  409   another trainer took over
    |-- Unsupported         (NotImplementedError)       501
    |-- TransferError                (RuntimeError)     500
    |   |-- TransferAborted                             409   somebody called abort
    |   |-- PeerFailed                                  502   another rank raised; its own words
    |   `-- PeerLost             (ConnectionError)      502   another rank died or left
    |       `-- PeerStalled          (TimeoutError)     502   another rank stopped moving
    |-- DeadlineExceeded             (TimeoutError)     504
    |-- Busy                         (RuntimeError)     503   somebody else holds what is needed
    |   `-- Paused                                      503   the gate takes no new readers
    `-- WeightsTorn                  (RuntimeError)     503   weights are half old, half new
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self


class WeightwireError(Exception):
    """Base of every error raised by weightwire.

    Args:
        message: What happened and what to do about it, in one sentence or two.
        transport: Backend name it concerns.
        rank: The rank it happened on, in words (`"worker rank 1"`).
        parameter: Parameter name it concerns.
    """

    status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        transport: str | None = None,
        rank: str | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.transport = transport
        self.rank = rank
        self.parameter = parameter

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.transport, self.rank) if part)
        return f"[{where}] {self.message}" if where else self.message

    def to_json(self) -> dict[str, Any]:
        """This error as JSON types; `error_from_json` is the inverse."""
        fields = {
            "type": type(self).__name__,
            "message": self.message,
            "transport": self.transport,
            "rank": self.rank,
            "param": self.parameter,
        }
        return {key: value for key, value in fields.items() if value is not None}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild an error of this class from what `to_json` wrote."""

        def text(key: str) -> str | None:
            value = record.get(key)
            return value if isinstance(value, str) else None

        return cls(
            text("message") or "(no message)",
            transport=text("transport"),
            rank=text("rank"),
            parameter=text("param"),
        )


class PluginError(WeightwireError):
    """A transport could not be had."""


class TransportNotFound(PluginError, ValueError):
    """No installed distribution provides the backend."""

    status = 400


class TransportConflict(PluginError, ValueError):
    """Two distributions provide one backend; choose with `"<distribution>:<backend>"`."""

    status = 400


class TransportBroken(PluginError, ImportError):
    """The transport's plugin raised while it was loaded; the cause is chained."""


class TransportIncompatible(PluginError, RuntimeError):
    """The transport needs another weightwire."""

    status = 501


class TransportDisabled(PluginError, RuntimeError):
    """`WEIGHTWIRE_PLUGINS` or `WEIGHTWIRE_DISABLE` switched the transport off."""

    status = 501


class TransportUnavailable(PluginError, RuntimeError):
    """The transport is installed and cannot work on this machine."""

    status = 501


class MetadataError(WeightwireError, ValueError):
    """A parameter description that contradicts itself."""

    status = 400


class SourceMismatch(MetadataError):
    """A weight source yielded something other than its metadata declares."""


class MessageError(WeightwireError, ValueError):
    """A message with an unknown, missing or mistyped key."""

    status = 400


class UpdateRefused(WeightwireError, ValueError):
    """The model does not take these names, shapes or dtypes."""

    status = 400


class PlanOutdated(UpdateRefused):
    """What the plan of a link was made from has changed since: the link has to be opened again."""


class ResultDiffers(UpdateRefused):
    """Applied to what this rank holds, the changes would not give the weights that the trainer has."""


class HandshakeError(WeightwireError, ValueError):
    """Ranks disagree about what will be sent, found before any byte moved."""

    status = 400


class Unauthorized(WeightwireError, PermissionError):
    """The caller did not prove that it may call."""

    status = 401


class PayloadTooLarge(WeightwireError, ValueError):
    """A request body over the limit."""

    status = 413


class OrderError(WeightwireError, RuntimeError):
    """A call that does not fit the state the worker is in."""

    status = 409


class NotInitialised(OrderError):
    """The worker is not connected to a trainer."""


class Superseded(OrderError):
    """Another trainer has taken this worker over."""


class Unsupported(WeightwireError, NotImplementedError):
    """This combination is not offered."""

    status = 501


class TransferError(WeightwireError, RuntimeError):
    """The transfer of this round failed; the old weights are still in place."""


class TransferAborted(TransferError):
    """The update was aborted by a call to abort."""

    status = 409


class PeerFailed(TransferError):
    """Another rank raised; the message is in its own words."""

    status = 502


class PeerLost(TransferError, ConnectionError):
    """Another rank died, left or was replaced."""

    status = 502


class PeerStalled(PeerLost, TimeoutError):
    """Another rank is still there and has stopped moving."""


class DeadlineExceeded(WeightwireError, TimeoutError):
    """The deadline of the public call passed."""

    status = 504


class Busy(WeightwireError, RuntimeError):
    """Somebody else holds what this call needs; try again later."""

    status = 503


class Paused(Busy):
    """The gate takes no new readers until it is resumed."""


class WeightsTorn(WeightwireError, RuntimeError):
    """An in-place update failed half-way: only a full update makes the weights whole again."""

    status = 503


def _classes(base: type[WeightwireError]) -> dict[str, type[WeightwireError]]:
    found = {base.__name__: base}
    for subclass in base.__subclasses__():
        found.update(_classes(subclass))
    return found


def error_from_json(record: Mapping[str, Any]) -> WeightwireError:
    """Rebuild an error another process described with `WeightwireError.to_json`.

    A type this process does not know becomes `PeerFailed`; the words are kept either way.
    """
    known = _classes(WeightwireError)
    return known.get(str(record.get("type")), PeerFailed).from_json(record)


def describe(error: BaseException, *, transport: str | None = None, rank: str | None = None) -> WeightwireError:
    """`error` as a `WeightwireError` fit to travel: foreign exceptions keep their type's name in the message."""
    if isinstance(error, WeightwireError):
        return error
    words = f"{type(error).__name__}: {error}"
    wrapped = TransferError(words, transport=transport, rank=rank)
    wrapped.__cause__ = error
    return wrapped
