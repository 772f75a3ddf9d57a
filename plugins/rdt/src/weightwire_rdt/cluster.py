"""Ray, as far as the transport needs it: this process in a cluster, actors beside it, and calls that end in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from weightwire.deadline import Deadline
from weightwire.errors import PeerLost, TransferError, TransportUnavailable, WeightwireError, error_from_json

_SLICE = 0.1
_REACH_SECONDS = 5.0
_BACKEND = "sharded_rdt"


def join_cluster() -> Any:
    """Ray's module, with this process in a cluster: its own, else that of `RAY_ADDRESS`, else one on this host.

    A handler of SIGTERM that the process has stays, as a host's own, such as vLLM's, ends it in its own way.

    Raises:
        TransportUnavailable: There is none, or it does not take this process.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            _reach(address)
            with _keeping_handler():
                ray.init(address=address, logging_level="warning", log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise TransportUnavailable(
                f"backend {_BACKEND!r} runs on Ray, and this process is in no cluster ({error}): start one with "
                "`ray start --head`, or set RAY_ADDRESS; one that wants a token has to find the same RAY_AUTH_MODE and "
                "RAY_AUTH_TOKEN here"
            ) from error
    return ray


def _reach(address: str) -> None:
    """Find out soon that nothing listens at `host:port`: Ray would try for minutes, whatever the caller's deadline."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal()) or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing can be reached at RAY_ADDRESS {address}: {error}") from error


@contextlib.contextmanager
def _keeping_handler() -> Iterator[None]:
    """Put this process's handler of SIGTERM back, which Ray replaces where it can: on the main thread."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if ours else None
    try:
        yield
    finally:
        if before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)


def namespace() -> str:
    """The Ray namespace of this process."""
    ray = join_cluster()
    return str(ray.get_runtime_context().namespace)


def result(reference: Any, deadline: Deadline, *, whom: str) -> Any:
    """What an actor's method returned.

    Args:
        reference: Its object reference.
        deadline: Of the public call.
        whom: The actor in words.

    Raises:
        WeightwireError: What the method answered, see `answering`.
        PeerLost: The actor is gone.
        DeadlineExceeded: The deadline passed.
        BaseException: What the deadline was cancelled with.
    """
    ray = join_cluster()
    while True:
        deadline.check(f"an answer of {whom}")
        try:
            ready, _ = ray.wait([reference], timeout=min(_SLICE, deadline.remaining()), fetch_local=False)
            if not ready:
                continue
            answer = ray.get(reference, timeout=deadline.remaining() + _SLICE)
        except ray.exceptions.RayError as error:
            raise in_our_words(error, whom) from error
        return unwrapped(answer)


def first_line(error: BaseException) -> str:
    """The first line of what Ray says."""
    return str(error).strip().partition("\n")[0]


def in_our_words(error: Exception, whom: str) -> WeightwireError:
    """What an error of Ray's means: `PeerLost` where `whom`, an actor or the owner of an object, is gone."""
    ray = join_cluster()
    if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)):
        return PeerLost(f"{whom} is gone: {first_line(error)}", transport=_BACKEND)
    return TransferError(f"{whom}: {first_line(error)}", transport=_BACKEND)


def answer_of(error: WeightwireError) -> dict[str, Any]:
    """An error as JSON, for an actor's method to return: Ray would pickle an exception."""
    return {"error": error.to_json()}


def unwrapped(answer: Any) -> Any:
    """An answer, or the error that it is.

    Raises:
        WeightwireError: It is one.
    """
    if isinstance(answer, dict) and "error" in answer:
        raise error_from_json(answer["error"])
    return answer


def found(ray: Any, name: str, where: str, whom: str) -> Any:
    """A named actor.

    Args:
        ray: Ray's module.
        name: The actor's.
        where: Its namespace.
        whom: The actor in words.

    Raises:
        PeerLost: There is none.
    """
    try:
        return ray.get_actor(name, namespace=where)
    except ValueError as error:
        words = f"{whom} is not in this Ray cluster, or has died: {first_line(error)}"
        raise PeerLost(words, transport=_BACKEND) from error


class Beside:
    """An actor on this process's node that ends with this process; started when it is first needed.

    Args:
        cls: What runs in it, with methods that are coroutines.
        what: What it is, for its name.
        options: Further options of the actor.
    """

    def __init__(self, cls: type, what: str, **options: Any) -> None:
        self._cls = cls
        self._what = what
        self._options = options
        self._lock = threading.Lock()
        self._process = 0
        self._started: dict[str, tuple[str, Any]] = {}

    def get(self, where: str, deadline: Deadline, *, whom: str | None = None) -> tuple[str, Any]:
        """Its name in a namespace, and its handle; one that died is replaced.

        Args:
            where: The namespace.
            deadline: Of the public call.
            whom: The actor in words; None says its name.

        Raises:
            PeerLost: It cannot be replaced: this process's node is lost.
            DeadlineExceeded: It did not start in time.
        """
        ray = join_cluster()
        with self._lock:
            if self._process != os.getpid():
                self._process, self._started = os.getpid(), {}
            known = self._started.get(where)
            if known is not None:
                try:
                    result(known[1].__ray_ready__.remote(), deadline, whom=whom or known[0])
                    return known
                except PeerLost:
                    del self._started[where]
            self._started[where] = started = self._start(ray, where)
        result(started[1].__ray_ready__.remote(), deadline, whom=whom or started[0])
        return started

    def _start(self, ray: Any, where: str) -> tuple[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"weightwire_rdt_{self._what}_{uuid.uuid4().hex[:12]}"
        node = ray.get_runtime_context().get_node_id()
        options = {
            "name": name,
            "namespace": where,
            "num_cpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }
        return name, ray.remote(self._cls).options(**options, **self._options).remote()


def tell(method: Any, *arguments: Any) -> None:
    """Call an actor's method without waiting for it; an actor that is gone need not hear."""
    import ray

    if ray.is_initialized():
        method.remote(*arguments)
