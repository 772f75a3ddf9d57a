"""The engine core's part: it owns the scheduler, so it is here that readers are kept out.

A call of the weight API reaches every worker through `EngineCore.collective_rpc`, which `install` wraps for servers
with a weightwire backend. Per call: refuse what does not fit (no update open, asleep), run it on every rank, ask every
rank how it went, raise the first error. A finish is one step of the core's loop, in which no forward pass can run: it
pauses if the trainer asks for it, commits, resets the prefix cache and resumes, whatever became of the trainer
meanwhile. Weights that are torn keep the scheduler paused and requests refused until a full update commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any, Final

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState

from weightwire.errors import error_from_json
from weightwire_vllm.options import parse_options
from weightwire_vllm.plugin import BACKEND, UnsupportedVLLM

_ENGINE: Final = "weight_transfer_engine"
"""The worker's attribute that holds the HostedEngine; `collective_rpc` calls it like a method."""

logger = init_logger("vllm.weightwire")

Plain = Callable[..., Any]


def install() -> None:
    """Wrap the engine core's methods; any number of times.

    Raises:
        UnsupportedVLLM: It lacks one of them.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.llm_engine import LLMEngine

    needed = {
        EngineCore: ("collective_rpc", "resume_scheduler"),
        EngineCoreProc: ("_reject_add_in_shutdown",),
        LLMEngine: ("add_request",),
    }
    for owner, names in needed.items():
        for name in names:
            if not callable(getattr(owner, name, None)):
                raise UnsupportedVLLM(f"this vLLM's {owner.__name__} has no {name}(): use vLLM 0.32 or 0.33")
    if hasattr(EngineCore.collective_rpc, "__weightwire__"):
        return
    EngineCore.collective_rpc = _collective_rpc(EngineCore.collective_rpc)
    EngineCore.resume_scheduler = _resume_scheduler(EngineCore.resume_scheduler)
    LLMEngine.add_request = _add_request(LLMEngine.add_request)
    EngineCoreProc._reject_add_in_shutdown = _reject_add(EngineCoreProc._reject_add_in_shutdown)


def _collective_rpc(plain: Plain) -> Plain:
    @wraps(plain)
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        host = _host(self, plain)
        call = None if host is None or not isinstance(method, str) else host.calls.get(method)
        return plain(self, method, timeout, args, kwargs) if call is None else call(method, args, kwargs or {})

    collective_rpc.__weightwire__ = True  # type: ignore[attr-defined]
    return collective_rpc


def _resume_scheduler(plain: Plain) -> Plain:
    @wraps(plain)
    def resume_scheduler(self: Any) -> Any:
        host = _host(self, None)
        if host is not None and host.refusing is not None:
            raise RuntimeError(f"WeightsTorn: {host.refusing}")
        return plain(self)

    return resume_scheduler


def _add_request(plain: Plain) -> Plain:
    """For an engine core in its caller's process: the request is refused before anybody waits for its end."""

    @wraps(plain)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        host = _host(getattr(self.engine_core, "engine_core", None), None)
        if host is not None and host.refusing is not None:
            raise RuntimeError(f"WeightsTorn: {host.refusing}")
        return plain(self, *args, **kwargs)

    return add_request


def _reject_add(plain: Plain) -> Plain:
    @wraps(plain)
    def reject_add(self: Any, request: Any) -> bool:
        host = _host(self, None)
        if host is None or host.refusing is None:
            return bool(plain(self, request))
        self._send_error_outputs_to_client([request.request_id], request.client_index)
        return True

    return reject_add


def _host(core: Any, plain: Plain | None) -> ServerHost | None:
    """The state of an engine core, if its server has a weightwire backend."""
    host: ServerHost | None = getattr(core, "_weightwire", None)
    if host is None and plain is not None:
        config = getattr(core.vllm_config, "weight_transfer_config", None)
        if str(getattr(config, "backend", "")).partition("_")[0] == BACKEND:
            host = core._weightwire = ServerHost(core, plain)
    return host


class ServerHost:
    """An engine core with weightwire inside its workers.

    Args:
        core: The engine core.
        plain: Its own `collective_rpc`.

    Attributes:
        refusing: Why the weights are not fit to read, so that requests are refused; None if they are.
    """

    def __init__(self, core: Any, plain: Plain) -> None:
        self._core = core
        self._plain = plain
        # An engine core in its caller's process has no loop of its own.
        self._steps_by_hand = not hasattr(core, "run_busy_loop")
        self._in_place = parse_options(core.vllm_config).get("staging") == "none"
        self.refusing: str | None = None
        self._resume_after = False
        self._open = False
        self._pause: str | None = None
        self._label: str | None = None
        self.calls: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Any]] = {
            "init_weight_transfer_engine": self._initialise,
            "shutdown_weight_transfer_engine": self._shutdown,
            "start_weight_update": self._start,
            "start_draft_weight_update": self._start,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
        }

    # Running a call on every rank

    def _run(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        executor = self._core.model_executor
        try:
            answers: list[Any] = self._plain(self._core, method, None, args, kwargs)
        except Exception as error:
            if not getattr(executor, "is_failed", False):
                raise
            # vLLM is about to end; what its executor raises meanwhile does not say why.
            words = f"PeerLost: a worker process of this server died ({method}): see its log, and start it again"
            raise RuntimeError(words) from error
        return answers

    def _ask(self, question: str) -> list[dict[str, Any]]:
        return self._run(_ENGINE, (question,))

    def _settle(self) -> None:
        """Raise what the first rank has to tell that failed."""
        answers = self._ask("outcome")
        torn = [str(answer["rank"]) for answer in answers if answer["weights"] == "torn"]
        if torn:
            self._refuse(f"the weights of worker rank {', '.join(torn)} are torn: push a full update")
        elif not (self._in_place and self._open) or any(answer["error"] for answer in answers):
            self._admit()
        for answer in answers:
            if answer["error"] is not None:
                error = error_from_json(answer["error"])
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _clear(self) -> None:
        """End vLLM's own belief in an update."""
        if self._open:
            self._open = False
            self._ask("clear")
            self._run("finish_weight_update")

    # The calls

    def _initialise(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        answers = self._other(method, args, kwargs)
        self._clear()
        return answers

    def _shutdown(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if self._open:
            raise RuntimeError(f"OrderError: {method} while an update is open: finish it first")
        return self._other(method, args, kwargs)

    def _other(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        answers = self._run(method, args, kwargs)
        self._settle()
        return answers

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        self._refuse_asleep(method)
        if self._open:
            # Open still, as far as vLLM knows: its trainer may be gone, which the workers notice when they are asked.
            if any(answer["update"] != "none" for answer in self._ask("info")):
                raise RuntimeError(f"OrderError: {method} while an update is open: finish it first")
            self._clear()
        if "draft" in method and not all(self._run("supports_draft_weight_updates")):
            # Asked first: a worker without one raises, and vLLM takes the other ranks' answers for the next call's.
            raise RuntimeError(f"OrderError: {method}: this server has no draft model (--speculative-config)")
        answers = self._run(method, args, kwargs)
        self._open = True
        self._settle_or_clear()
        return answers

    def _settle_or_clear(self) -> None:
        try:
            self._settle()
        except BaseException:
            self._clear()
            raise

    def _update(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        self._refuse_asleep(method)
        self._refuse_unopened(method)
        info = kwargs.get("update_info", args[0] if args else {})
        workers = self._core.vllm_config.parallel_config.world_size_across_dp
        if isinstance(info, list) and len(info) != workers:
            raise RuntimeError(f"MessageError: update_info lists {len(info)} elements for {workers} workers")
        first = info[0] if isinstance(info, list) else info
        self._pause, self._label = (first.get("pause"), first.get("label")) if isinstance(first, dict) else (None, None)
        if self._pause == "wait" and self._steps_by_hand and self._core.scheduler.has_unfinished_requests():
            raise RuntimeError("Unsupported: pause='wait' would wait for requests that only this process can carry on")
        if self._in_place:
            self._refuse("an in-place update is writing the weights", keep=True)
        answers = self._run(method, args, kwargs)
        self._settle_or_clear()
        return answers

    def _finish(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refuse_asleep(method)
        self._refuse_unopened(method)
        mode, self._pause = self._pause, None
        if mode in (None, "keep") or (mode == "wait" and self._steps_by_hand) or self._core.is_scheduler_paused():
            return self._commit(resume=False)
        # The core's loop goes on until nothing is running; what follows then is one step of it.
        paused = self._core.pause_scheduler(mode=mode, clear_cache=False)
        if paused is None:
            return self._commit(resume=True)
        done: Future[Any] = Future()

        def commit(finished: Future[Any]) -> None:
            try:
                finished.result()
                done.set_result(self._commit(resume=True))
            except Exception as error:  # noqa: BLE001  for whoever waits for `done`
                done.set_exception(error)

        paused.add_done_callback(commit)
        return done

    def _commit(self, *, resume: bool) -> list[Any]:
        try:
            answers = self._run("finish_weight_update")
            self._open = False
            self._settle()
            self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            self._core.reset_encoder_cache()
            if self._label is not None:
                self._core.set_weight_version(self._label)
            return answers
        finally:
            if resume:
                self._resume()

    def _refuse_unopened(self, method: str) -> None:
        if not self._open:
            raise RuntimeError(f"OrderError: {method} while no update is open: call start_weight_update first")

    def _refuse_asleep(self, method: str) -> None:
        if self._core.model_executor.is_sleeping:
            raise RuntimeError(f"OrderError: {method} while the server is asleep: wake it up first (POST /wake_up)")

    # Keeping readers out

    def _refuse(self, why: str, *, keep: bool = False) -> None:
        """Run no forward pass and take no request; what is running is kept for later, or aborted."""
        if self.refusing is None:
            self._resume_after = not self._core.is_scheduler_paused()
        if why != self.refusing:
            logger.log(logging.INFO if keep else logging.ERROR, "weightwire: %s; no request is taken until then", why)
            self.refusing = why
            if keep:
                # At once, unlike a pause, which would wait for a step: none is under way while this runs.
                self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            else:
                self._core.pause_scheduler(mode="abort", clear_cache=False)

    def _admit(self) -> None:
        if self.refusing is not None:
            self.refusing = None
            if self._resume_after:
                self._core.resume_scheduler()

    def _resume(self) -> None:
        """Resume after our own pause; where requests are refused, once they are not."""
        if self.refusing is None:
            self._core.resume_scheduler()
        else:
            self._resume_after = True
