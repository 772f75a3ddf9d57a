"""NIXL as the two wires use it: one agent for a process, and boxes into which notifications are sorted.

NIXL is a library of one-sided reads: a reader that knows where bytes lie takes them, and the other side's processor is
not asked, within a host. Between hosts they go over RDMA or whatever UCX finds.
"""

from __future__ import annotations

import importlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from weightwire.errors import PeerLost, TransferError

_MODULES: Final = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_BACKEND: Final = "UCX"
_POLL_SECONDS: Final = 0.001
_DONE: Final = "DONE"
_FAILED: Final = "ERR"

_lock = threading.Lock()
_agent: NixlAgent | None = None


class Span(NamedTuple):
    """Bytes of memory: address, length, and number of the device (0 for the CPU)."""

    address: int
    nbytes: int
    device: int


def span_of(tensor: Tensor) -> Span:
    """Where a contiguous tensor lies."""
    return Span(tensor.data_ptr(), tensor.numel() * tensor.itemsize, tensor.device.index or 0)


def memory_of(device: torch.device) -> str:
    """What NIXL calls the memory of a device."""
    return "VRAM" if device.type == "cuda" else "DRAM"


def missing() -> str | None:
    """Why NIXL cannot be used in this process, in words; None if it can."""
    try:
        _api()
    except ImportError as error:
        return f"NIXL cannot be imported ({error}): pip install 'weightwire-rdt[nixl]'"
    return None


def process_agent() -> NixlAgent:
    """The agent of this process, made when it is first asked for.

    Raises:
        TransferError: NIXL is not installed, or finds no way to move bytes.
    """
    global _agent
    with _lock:
        if _agent is None or not _agent.mine:
            _agent = NixlAgent()
        return _agent


def _api() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    error: ImportError | None = None
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as missed:
            error = error or missed
    assert error is not None
    raise error


class Ending(Protocol):
    """What ends at some time."""

    @property
    def ended(self) -> bool:
        """Whether it has."""


class NixlAgent:
    """Memory that others may read, reads of theirs, and short messages; every method may be called from any thread.

    Attributes:
        name: What other agents call it.
    """

    def __init__(self) -> None:
        if (reason := missing()) is not None:
            raise TransferError(reason)
        api = _api()
        self.name = f"weightwire-{uuid.uuid4().hex}"
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._boxes: dict[str, deque[bytes]] = {}
        self._ending: list[tuple[Sequence[Ending], Callable[[], None]]] = []
        try:
            # Its thread would poll without a pause, and cost every process a core all the time, also one that trains or
            # answers. Whoever waits here polls anyway.
            # Reads are begun without our lock, so that others can use the agent meanwhile: its own must hold.
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND], sync_mode=strict)
            self._agent = api.nixl_agent(self.name, config)
        except Exception as error:
            raise TransferError(f"NIXL's agent cannot be made: {error}") from error

    @property
    def mine(self) -> bool:
        """Whether this process made it; a forked one has none of its threads."""
        return self._process == os.getpid()

    def metadata(self) -> bytes:
        """What another agent has to know of this one: how to reach it, and the memory that is registered now."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def meet(self, name: str, metadata: bytes) -> None:
        """Learn of another agent, or what it has registered since."""
        if name != self.name:
            with self._lock:
                self._agent.add_remote_agent(metadata)

    def forget(self, name: str) -> None:
        """Another agent is gone."""
        if name != self.name:
            with self._lock:
                self._quietly(lambda: self._agent.remove_remote_agent(name))

    @staticmethod
    def _quietly(call: Any) -> None:
        try:
            call()
        except Exception as error:
            if not type(error).__name__.startswith("nixl"):
                raise

    # Memory

    def register(self, spans: Sequence[Span], memory: str) -> Any:
        """Let other agents read some memory, and this one write it; returns what `deregister` takes."""
        with self._lock:
            return self._agent.register_memory([(*span, "") for span in spans], memory, [_BACKEND])

    def register_storage(self, tensor: Tensor) -> Any:
        """As `register`, for the whole storage of a tensor."""
        storage = tensor.untyped_storage()
        span = Span(storage.data_ptr(), storage.nbytes(), tensor.device.index or 0)
        return self.register([span], memory_of(tensor.device))

    def deregister(self, registration: Any) -> None:
        """Take that back; nothing may be reading it."""
        with self._lock:
            self._quietly(lambda: self._agent.deregister_memory(registration, [_BACKEND]))

    # Messages

    def open_box(self, box: str) -> None:
        """Keep what arrives for `box` from now on."""
        with self._lock:
            self._boxes.setdefault(box, deque())

    def close_box(self, box: str) -> None:
        """Drop it, and what still arrives."""
        with self._lock:
            self._boxes.pop(box, None)

    def notify(self, name: str, box: str, body: bytes) -> None:
        """Send a message to a box of another agent.

        Raises:
            PeerLost: It is gone.
        """
        with self._lock:
            try:
                self._agent.send_notif(name, f"{box}\n".encode() + body)
            except Exception as error:
                raise _lost(error) from error
            self._sort()  # UCX sends when somebody looks

    def take(self, box: str) -> list[bytes]:
        """What has arrived in a box since it was last asked for."""
        with self._lock:
            self._sort()
            kept = self._boxes.get(box)
            if not kept:
                return []
            found = list(kept)
            kept.clear()
            return found

    def once_ended(self, reads: Sequence[Ending], then: Callable[[], None]) -> None:
        """Call `then` when none of these reads is on its way any more, and keep them until then."""
        with self._lock:
            self._ending.append((reads, then))
            self._settle()

    def _settle(self) -> None:
        over = [(reads, then) for reads, then in self._ending if all(one.ended for one in reads)]
        self._ending = [pair for pair in self._ending if pair not in over]
        for _, then in over:
            then()

    def poll(self) -> None:
        """Have UCX send what waits, and sort what arrived."""
        with self._lock:
            self._sort()

    def _sort(self) -> None:
        if self._ending:
            self._settle()
        for messages in self._agent.get_new_notifs().values():
            for message in messages:
                to, _, body = message.partition(b"\n")
                kept = self._boxes.get(to.decode(errors="replace"))
                if kept is not None:
                    kept.append(body)

    # Reads

    def read(self, name: str, here: Iterable[Span], there: Iterable[Span], memory: tuple[str, str]) -> Read:
        """Begin to read memory of another agent, which need not do anything for it.

        Args:
            name: The other agent.
            here: Registered memory of this process, of the same lengths as `there`.
            there: Registered memory of the other one.
            memory: Kinds of memory here and there, as of `memory_of`.

        Raises:
            PeerLost: It is gone.
        """
        with self._lock:
            try:
                handle = self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(list(map(tuple, here)), memory[0]),
                    self._agent.get_xfer_descs(list(map(tuple, there)), memory[1]),
                    name,
                    b"",  # a notification of NIXL's own would have the read wait until the other process polls
                    [_BACKEND],
                )
            except Exception as error:
                raise _lost(error) from error
        try:
            # Within a host the bytes are copied in here: other threads must be able to use the agent meanwhile.
            state = self._agent.transfer(handle)
        except Exception as error:
            raise _lost(error) from error
        return Read(self, handle, state)


class Polling:
    """A thread that looks after an agent now and then: what is large leaves UCX only while somebody does.

    Args:
        agent: The agent.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._run, name="weightwire-rdt-poll", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            self._agent.poll()

    def stop(self) -> None:
        """End it, if it runs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join()


class Read:
    """A read on its way.

    Args:
        agent: Whose.
        handle: NIXL's.
        state: NIXL's, so far.
    """

    def __init__(self, agent: NixlAgent, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self._failure: PeerLost | None = None

    @property
    def done(self) -> bool:
        """Whether all bytes are here.

        Raises:
            PeerLost: The other agent is gone.
        """
        with self._agent._lock:
            if self._handle is not None:
                self._look()
            if self._failure is not None:
                raise self._failure
            return self._handle is None

    def _look(self) -> None:
        raw = self._agent._agent
        try:
            if self._state not in (_DONE, _FAILED):
                self._state = raw.check_xfer_state(self._handle)
            if self._state == _FAILED:
                self._failure = PeerLost("NIXL could not read: the other process is gone, or its memory is")
        except Exception as error:  # noqa: BLE001 - `_lost` tells NIXL's from others
            self._state, self._failure = _FAILED, _lost(error)
        if self._state in (_DONE, _FAILED):
            handle, self._handle = self._handle, None
            self._agent._quietly(lambda: raw.release_xfer_handle(handle))

    @property
    def ended(self) -> bool:
        """Whether nothing is written any more, for whatever reason."""
        try:
            return self.done
        except PeerLost:
            return True


def _lost(error: Exception) -> PeerLost:
    """What an exception of NIXL's means; any other is a fault of ours."""
    if not type(error).__name__.startswith("nixl"):
        raise error
    return PeerLost(f"NIXL: {error}: the other process is gone, or cannot be reached")
