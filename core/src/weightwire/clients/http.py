"""A worker server over HTTP: the routes and bodies of vLLM's RL API, with deadlines and update ids in headers.

A server of weightwire answers a failed call with its error as JSON; it is raised here as the class and in the words
it had there. Calls that carry an update id are repeated once when the connection broke before the answer came, since
the server answers a repetition as it answered the first.
"""

from __future__ import annotations

import re
from typing import Any

import httpx

from weightwire.clients.protocol import PauseMode
from weightwire.errors import (
    DeadlineExceeded,
    PeerFailed,
    PeerLost,
    WeightwireError,
    error_from_json,
)
from weightwire.messages import WeightTransferUpdatePayload

TIMEOUT_HEADER = "Weightwire-Timeout"
UPDATE_HEADER = "Weightwire-Update"
SEQUENCE_HEADER = "Weightwire-Sequence"
_GRACE_SECONDS = 5.0
_PASSED_ON = re.compile(r"Call to collective_rpc method failed: (\w+): (.*)", re.DOTALL)
"""How vLLM passes on what its workers raised."""
_KEEP_ALIVE_SECONDS = 4.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that no call is sent into a closed one."""


class HTTPVLLMWeightSyncClient:
    """Talks to one worker server, weightwire's or vLLM's.

    Args:
        base_url: Where the server's control routes are mounted, e.g. `"http://127.0.0.1:8000"`.
        timeout: Deadline of a call that names none, in seconds.
        token: Bearer token, where the server asks for one.
    """

    def __init__(self, base_url: str, timeout: float = 300, *, token: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_keepalive_connections=8, keepalive_expiry=_KEEP_ALIVE_SECONDS)
        # trust_env off: a proxy of the environment must not see the secrets of init_info.
        self._failed = False
        self._http = httpx.Client(base_url=self.base_url, headers=headers, limits=limits, trust_env=False)

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Have the server connect to a trainer."""
        self._post("init_weight_transfer_engine", {"init_info": init_info}, timeout=timeout)

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update."""
        route = "start_draft_weight_update" if draft else "start_weight_update"
        self._post(route, timeout=timeout, update_id=update_id)

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Have the server receive one message."""
        body = {"update_info": update_info}
        self._post("update_weights", body, timeout=timeout, update_id=update_id, sequence=sequence)

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Have the server commit the open update."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("finish_weight_update", body, timeout=timeout, update_id=update_id)

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Have the server drop the open update."""
        self._post("abort_weight_update", timeout=timeout, update_id=update_id)

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Have the server leave the trainer."""
        self._post("shutdown_weight_transfer_engine", timeout=timeout)

    def update_weight_version(self, new_version: str, *, timeout: float | None = None) -> None:
        """Set the label alone."""
        self._post("update_weight_version", {"new_version": new_version}, timeout=timeout)

    def weight_checker(self, action: str, baseline: dict[str, str] | None = None) -> dict[str, Any]:
        """Ask for checksums, compare them, or reset the weights to zero."""
        body: dict[str, Any] = {"action": action}
        if baseline is not None:
            body["baseline"] = baseline
        return self._post("weight_checker", body)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks behind the server."""
        answer = self._get("get_world_size", {"include_dp": str(include_dp).lower()})
        return int(answer["world_size"])

    def weight_info(self) -> dict[str, Any]:
        """Label, revision and state of the server's weights."""
        return self._get("weight_info")

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out."""
        self._post("pause", timeout=timeout, params={"mode": mode})

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers in again."""
        self._post("resume", timeout=timeout)

    def is_paused(self) -> bool:
        """Whether readers are kept out."""
        return bool(self._get("is_paused")["is_paused"])

    def _get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        return self._call("GET", path, params=params, timeout=self.timeout)

    def _post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        params: dict[str, str] | None = None,
        timeout: float | None = None,
        update_id: str | None = None,
        sequence: int | None = None,
    ) -> dict[str, Any]:
        seconds = self.timeout if timeout is None else timeout
        headers = {TIMEOUT_HEADER: f"{seconds:.3f}"}
        if update_id is not None:
            headers[UPDATE_HEADER] = update_id
        if sequence is not None:
            headers[SEQUENCE_HEADER] = str(sequence)
        repeats = 1 if update_id is not None else 0
        return self._call("POST", path, json=body, params=params, headers=headers, timeout=seconds, repeats=repeats)

    def _call(self, method: str, path: str, *, timeout: float, repeats: int = 0, **request: Any) -> dict[str, Any]:
        # vLLM closes a connection after an unexpected error, and may do so when the next call is on its way.
        repeats = max(repeats, int(self._failed))
        while True:
            try:
                # The server reads its own, shorter deadline, so that its words arrive before ours run out.
                limit = httpx.Timeout(timeout + _GRACE_SECONDS, connect=min(timeout, 10.0))
                response = self._http.request(method, f"/{path}", timeout=limit, **request)
                self._failed = response.is_server_error
                return self._answer(path, response)
            except httpx.TimeoutException as error:
                raise DeadlineExceeded(
                    f"{self.base_url}/{path} did not answer within {timeout:g} s", rank=self.base_url
                ) from error
            except httpx.TransportError as error:
                if repeats == 0:
                    raise PeerLost(
                        f"{self.base_url}/{path} could not be reached: {error}", rank=self.base_url
                    ) from error
                repeats -= 1

    def _answer(self, path: str, response: httpx.Response) -> dict[str, Any]:
        try:
            body = response.json() if response.content else {}
        except ValueError:
            body = {}
        if response.is_success:
            return body if isinstance(body, dict) else {}
        raise self._error(path, response, body if isinstance(body, dict) else {})

    def _error(self, path: str, response: httpx.Response, body: dict[str, Any]) -> WeightwireError:
        record = body.get("error")
        if isinstance(record, dict):
            known = {key: record.get(key) for key in ("type", "message", "param", "transport", "rank")}
            if passed_on := _PASSED_ON.fullmatch(str(known["message"])):
                known |= {"type": passed_on[1], "message": passed_on[2]}
            error = error_from_json(known)
        else:
            words = record if isinstance(record, str) else response.text[:500]
            hint = "; a vLLM server needs VLLM_SERVER_DEV_MODE=1" if response.status_code == 404 else ""
            error = PeerFailed(f"/{path} answered {response.status_code}: {words}{hint}")
        error.rank = f"{self.base_url}, {error.rank}" if error.rank else self.base_url
        return error
