"""One call to several Ray actors at once, that ends in time and says in whose words it failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import monotonic
from typing import Any

from weightwire.errors import (
    DeadlineExceeded,
    PeerFailed,
    PeerLost,
    TransferError,
    WeightwireError,
    error_from_json,
)
from weightwire_rdt.cluster import join_cluster, unwrapped

_SETTLE_SECONDS = 0.5
"""How long the other actors may take to end once one has failed."""
_PASSED_ON = re.compile(r"Call to collective_rpc method failed: (\w+): (.*)", re.DOTALL)
"""How vLLM passes on what its workers raised."""


def everywhere(calls: Mapping[str, Any], seconds: float, *, what: str) -> list[Any]:
    """Wait for calls that have been made to several actors.

    Args:
        calls: What `.remote` returned, by the actor in words.
        seconds: How long to wait for all.
        what: The call in words.

    Returns:
        What they returned, in the order of `calls`.

    Raises:
        WeightwireError: The first that failed, in order of time; the others' words are notes of it.
        PeerLost: An actor is gone.
        PeerFailed: An actor's own exception, of a class that is not weightwire's.
        DeadlineExceeded: Some did not answer; names them.
    """
    ray = join_cluster()
    waiting = {reference: whom for whom, reference in calls.items()}
    results: dict[str, Any] = {}
    errors: list[WeightwireError] = []
    end = monotonic() + seconds
    while waiting:
        if errors:
            end = min(end, monotonic() + _SETTLE_SECONDS)
        ready, _ = ray.wait(list(waiting), timeout=max(0.0, end - monotonic()), fetch_local=False)
        if not ready:
            if not errors:
                slow = ", ".join(waiting.values())
                errors.append(DeadlineExceeded(f"{what} was not answered within {seconds:g} s by {slow}"))
            break
        whom = waiting.pop(ready[0])
        try:
            results[whom] = _answer(ray, ready[0], whom, end)
        except WeightwireError as error:
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"and: {other}")
    if errors:
        raise errors[0]
    return [results[whom] for whom in calls]


def _answer(ray: Any, reference: Any, whom: str, end: float) -> Any:
    raised = ray.exceptions
    try:
        return unwrapped(ray.get(reference, timeout=max(1.0, end - monotonic())))
    except raised.RayTaskError as error:
        raise _own_words(error.cause, whom) from error
    except raised.RayActorError as error:
        if error.actor_init_failed:
            words = str(error).strip().rpartition("\n")[2]
            raise PeerFailed(f"it could not be made: {words}", rank=whom) from error
        how = "cannot be reached" if isinstance(error, raised.ActorUnavailableError) else "is gone"
        raise PeerLost(f"{whom} {how}: {_reason(error)}", rank=whom) from error
    except raised.RayError as error:
        raise TransferError(_reason(error), rank=whom) from error
    except WeightwireError as error:
        error.rank = error.rank or whom
        raise


def _own_words(cause: BaseException, whom: str) -> WeightwireError:
    """What an actor's method raised, as an error of weightwire's."""
    if isinstance(cause, WeightwireError):
        error = type(cause).from_json(cause.to_json())
    elif passed_on := _PASSED_ON.fullmatch(str(cause)):
        error = error_from_json({"type": passed_on[1], "message": passed_on[2]})
    else:
        error = PeerFailed(f"{type(cause).__name__}: {cause}")
    error.rank = error.rank or whom
    return error


def _reason(error: BaseException) -> str:
    """The lines of Ray's that say why, without those that say who."""
    lines = str(error).strip().splitlines()
    return " ".join(line for line in lines if not line.startswith("\t"))
