"""Every route in every state of a worker: what it answers, and that a push afterwards works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from plugins.server.tests.scene import STATES, Scene

ERROR_KEYS = {"error", "state", "weight_version", "revision", "update_id", "rank"}


@dataclass(frozen=True)
class Waits:
    """The call is not answered before what is under way has ended, then with `status`."""

    status: int


CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "init": ("POST", "/init_weight_transfer_engine", {"body": {"init_info": {}}}),
    "shutdown": ("POST", "/shutdown_weight_transfer_engine", {}),
    "start": ("POST", "/start_weight_update", {"update": "u2"}),
    "start, same id": ("POST", "/start_weight_update", {"update": "u1"}),
    "start, no id": ("POST", "/start_weight_update", {}),
    "start draft": ("POST", "/start_draft_weight_update", {"update": "u2"}),
    "update": ("POST", "/update_weights", {"update": "u1", "sequence": 1}),
    "update, again": ("POST", "/update_weights", {"update": "u1", "sequence": 0}),
    "update, other id": ("POST", "/update_weights", {"update": "u2", "sequence": 0}),
    "finish, other id": ("POST", "/finish_weight_update", {"update": "u2"}),
    "finish": ("POST", "/finish_weight_update", {"update": "u1", "body": {"weight_version": "new"}}),
    "abort": ("POST", "/abort_weight_update", {}),
    "abort, other id": ("POST", "/abort_weight_update", {"update": "u2"}),
    "weight_info": ("GET", "/weight_info", {}),
    "is_paused": ("GET", "/is_paused", {}),
    "get_world_size": ("GET", "/get_world_size", {}),
    "metrics": ("GET", "/metrics", {}),
    "abort_requests": ("POST", "/abort_requests", {}),
    "pause": ("POST", "/pause?mode=keep", {}),
    "resume": ("POST", "/resume", {}),
    "label": ("POST", "/update_weight_version", {"body": {"new_version": "v9"}}),
    "checksum": ("POST", "/weight_checker", {"body": {"action": "checksum"}}),
    "reset": ("POST", "/weight_checker", {"body": {"action": "reset"}}),
    "health": ("GET", "/health", {}),
}

# Columns as STATES: uninitialised, ready, open, receiving, committing, torn.
TABLE: dict[str, tuple[int | Waits, ...]] = {
    "init": (200, 200, 200, 200, Waits(200), 200),
    "shutdown": (200, 200, 409, 409, 409, 200),
    "start": (409, 200, 409, 409, 409, 200),
    "start, same id": (409, 200, 200, 200, 409, 200),
    "start, no id": (409, 200, 409, 409, 409, 200),
    "start draft": (409, 409, 409, 409, 409, 409),
    "update": (409, 409, 200, 409, 409, 409),
    "update, again": (409, 409, 200, Waits(200), 200, 409),
    "update, other id": (409, 409, 409, 409, 409, 409),
    "finish": (409, 409, 400, 409, Waits(200), 409),
    "finish, other id": (409, 409, 409, 409, 409, 409),
    "abort": (200, 200, 200, 200, 409, 200),
    "abort, other id": (200, 200, 200, 200, 200, 200),
    "weight_info": (200, 200, 200, 200, 200, 200),
    "is_paused": (200, 200, 200, 200, 200, 200),
    "get_world_size": (200, 200, 200, 200, 200, 200),
    "metrics": (200, 200, 200, 200, 200, 200),
    "abort_requests": (501, 501, 501, 501, 501, 501),  # none were given to this server
    "pause": (200, 200, 200, 200, Waits(200), 200),
    "resume": (200, 200, 200, 200, 200, 409),
    "label": (200, 200, 409, 409, 409, 409),
    "checksum": (200, 200, 200, 200, Waits(200), 409),
    "reset": (200, 200, 409, 409, Waits(200), 200),
    "health": (200, 200, 200, 200, Waits(200), 503),
}

CASES = [(call, state, TABLE[call][place]) for call in CALLS for place, state in enumerate(STATES)]
ASKING = ("weight_info", "is_paused", "get_world_size", "metrics", "abort_requests")
CHANGING = [case for case in CASES if case[0] not in ASKING]
"""With several ranks: what changes nothing is left out, to save time."""


def send(scene: Scene, call: str) -> httpx.Response:
    method, path, options = CALLS[call]
    if path == "/update_weights":
        options = {**options, "body": {"update_info": scene.update_info()}}
    return scene.get(path) if method == "GET" else scene.post(path, **options)


def check(scene: Scene, call: str, state: str, expected: int | Waits) -> None:
    scene.enter(state)
    if isinstance(expected, Waits):
        waiting = scene.waiting(lambda: send(scene, call))
        scene.release()
        answer, status = waiting.result(), expected.status
    else:
        answer, status = send(scene, call), expected
    assert answer.status_code == status, answer.text
    if status >= 400:
        body = answer.json()
        assert set(body) == ERROR_KEYS
        assert body["error"]["code"] == status and body["error"]["message"]
    scene.check_recovers()


def ids(cases: list[tuple[str, str, int | Waits]]) -> list[str]:
    return [f"{call}-{state}" for call, state, _ in cases]


@pytest.mark.parametrize(("call", "state", "expected"), CASES, ids=ids(CASES))
def test_one_rank(scene: Scene, call: str, state: str, expected: int | Waits) -> None:
    check(scene, call, state, expected)


@pytest.mark.parametrize(("call", "state", "expected"), CHANGING, ids=ids(CHANGING))
def test_several_ranks(fleet: Scene, call: str, state: str, expected: int | Waits) -> None:
    check(fleet, call, state, expected)
