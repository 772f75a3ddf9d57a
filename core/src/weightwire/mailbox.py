"""Where a member waits for answers, and learns that the epoch is dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from weightwire.deadline import Deadline
from weightwire.errors import DeadlineExceeded, OrderError, WeightwireError, describe, error_from_json
from weightwire.frames import Frame, encode

_GRACE_SECONDS: Final = 1.0


class Mailbox:
    """Replies by key, for threads that wait; and the one failure that ends all waiting.

    Args:
        post: Hands an encoded frame to the hub, from any thread, without blocking.

    Attributes:
        failure: Why the epoch is dead. The first reason stays.
        failed_rank: The member rank it is about, if it is about one.
        closed: The host ended the epoch in good order.
        left: This member did.
        opened: This member has been welcomed.
        on_death: Called once, without arguments, when the epoch has died; from whichever thread learnt of it.
    """

    def __init__(self, post: Callable[[bytes], object]) -> None:
        self.failure: WeightwireError | None = None
        self.failed_rank: int | None = None
        self.closed = False
        self.left = False
        self.opened = False
        self.on_death: Callable[[], object] | None = None
        self._post = post
        self._condition = threading.Condition()
        self._replies: dict[str | int, Frame | None] = {}
        self._watched: list[Deadline] = []

    def open(self) -> None:
        """Say that this member is welcome."""
        with self._condition:
            self.opened = True
            self._condition.notify_all()

    def put(self, key: str | int, reply: Frame) -> None:
        """Give a reply to whoever waits for it; one that nobody waits for is dropped."""
        with self._condition:
            if key in self._replies:
                self._replies[key] = reply
                self._condition.notify_all()

    def die(self, error: WeightwireError, *, rank: int | None = None, closed: bool = False) -> bool:
        """End all waiting with `error`, unless something else has; whether it did."""
        with self._condition:
            if self.failure is not None:
                return False
            self.failure, self.failed_rank, self.closed = error, rank, closed
            self._condition.notify_all()
            watched = tuple(self._watched)
        for deadline in watched:
            deadline.cancel(_copy(error))
        if self.on_death is not None:
            self.on_death()
        return True

    def wait_dead(self, seconds: float) -> None:
        """Wait for the epoch to die, for so long at most."""
        with self._condition:
            self._condition.wait_for(lambda: self.failure is not None, seconds)

    def leave(self) -> bool:
        """End all waiting because this member leaves; whether it had not before."""
        with self._condition:
            first, self.left = not self.left, True
            self._condition.notify_all()
        return first

    @contextmanager
    def watch(self, deadline: Deadline) -> Iterator[None]:
        """While the block runs, `die` cancels `deadline`; if it was called before, at once."""
        with self._condition:
            self._watched.append(deadline)
            failure = self.failure
        try:
            if failure is not None:
                deadline.cancel(_copy(failure))
            yield
        finally:
            with self._condition:
                self._watched.remove(deadline)

    def wait_opened(self, deadline: Deadline, what: str) -> None:
        """Wait until this member is welcome; raises as `ask` does."""
        with self._condition:
            deadline.wait_for(lambda: self.opened or self._is_over(), self._condition, what)
            if self._is_over():
                raise self._end()

    def ask(
        self,
        key: str | int,
        request: bytes,
        *,
        regret: Frame,
        deadline: Deadline,
        what: str,
        limit: float | None = None,
    ) -> Frame:
        """Post `request`, wait for the reply of that `key`.

        When the wait ends first, `regret` is posted with the reason, and the hub has one second to say whether the
        reply was on its way all the same: then that is returned.

        Args:
            key: Of the request and its reply.
            request: An encoded frame.
            regret: The frame that takes it back.
            deadline: Of the public call.
            what: What is being waited for, in words.
            limit: Seconds after which to end before the deadline.

        Raises:
            DeadlineExceeded: The deadline or the limit passed; says who has not come, if the hub knows.
            WeightwireError: Why the epoch is dead, or what the deadline was cancelled with.
            OrderError: This member has left.
        """
        until = None if limit is None else time.monotonic() + limit

        def arrived() -> bool:
            if self._replies[key] is not None or self._is_over():
                return True
            if until is not None and time.monotonic() >= until:
                raise DeadlineExceeded(f"{what} did not end within {limit:g} s")
            return False

        with self._condition:
            if self._is_over():
                raise self._end()
            assert key not in self._replies, f"{key} is being waited for already"
            self._replies[key] = None
            try:
                self._post(request)
                try:
                    deadline.wait_for(arrived, self._condition, what)
                except BaseException as reason:  # noqa: BLE001  raised again, unless it came too late
                    return self._take_back(key, regret, reason)
                return self._reply(key)
            finally:
                del self._replies[key]

    def _take_back(self, key: str | int, regret: Frame, reason: BaseException) -> Frame:
        """The reply, if it was on its way; else raises `reason`, in the hub's words if the time is over."""
        self._post(encode({**regret, "error": describe(reason).to_json()}))
        until = time.monotonic() + _GRACE_SECONDS
        while self._replies[key] is None and not self._is_over() and time.monotonic() < until:
            self._condition.wait(_GRACE_SECONDS)
        reply = self._replies[key]
        if reply is not None and "silent" not in reply:
            return reply
        if not isinstance(reason, DeadlineExceeded):
            raise reason
        if reply is not None:
            silent = "; ".join(reply["silent"]) or "nobody else"
            raise DeadlineExceeded(f"{reason.message}: nothing was written by {silent}") from None
        if not self._is_over():
            self.die(DeadlineExceeded(f"{reason.message}, and trainer rank 0 does not answer"), rank=0)
        raise self._end() from None

    def _is_over(self) -> bool:
        return self.failure is not None or self.left

    def _reply(self, key: str | int) -> Frame:
        reply = self._replies[key]
        if reply is None:
            raise self._end()
        return reply

    def _end(self) -> WeightwireError:
        if self.failure is not None:
            return _copy(self.failure)
        return OrderError("this member has left the epoch: close() was called")


def _copy(error: WeightwireError) -> WeightwireError:
    # An exception collects the frames it was raised through; one object raised in many threads would hold them all.
    return error_from_json(error.to_json())
