"""Clients that are slow, silent, greedy or broken: the server goes on answering, and they hold nothing."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from plugins.server.tests.scene import Scene, small_model, until
from weightwire.worker import Worker
from weightwire_server import BoundServer, create_app, patience
from weightwire_server.access import BearerToken

MIB = 1 << 20
PATH = "/update_weights"


def resident() -> int:
    """Bytes of memory that this process, client and server, has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def flat_memory(limit: int = 64 * MIB) -> Iterator[None]:
    before = resident()
    yield
    assert resident() - before < limit


def connect(url: str) -> socket.socket:
    host, port = url.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def check_answers(scene: Scene) -> None:
    began = time.monotonic()
    assert scene.get("/health").status_code == 200
    assert scene.get("/weight_info").status_code == 200
    assert time.monotonic() - began < 5.0


def goes_on_sending(client: socket.socket, content: bytes, *, pause: float = 0.0) -> None:
    """Send until the connection breaks."""
    for _ in range(100_000):
        client.sendall(content)
        time.sleep(pause)


def ended(client: socket.socket) -> bool:
    """Whether the server has closed this connection; waits for it."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


def test_a_thousand_connections_that_say_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HEAD_SECONDS", 2.0)
    with flat_memory(), ExitStack() as stack:
        clients = [stack.enter_context(connect(scene.url)) for _ in range(1000)]
        check_answers(scene)
        assert all(ended(client) for client in clients)
        check_answers(scene)


@pytest.mark.parametrize("start", [b"", b"POST /update_weights HTTP/1.1\r\nHost: x\r\nX-", b"\x16\x03\x01\x02"])
def test_a_head_that_never_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(patience, "HEAD_SECONDS", 0.3)
    with connect(scene.url) as client:
        client.sendall(start)
        assert ended(client)
    check_answers(scene)


def test_bytes_that_trickle_in_after_an_answer() -> None:
    with BoundServer(create_app(Worker(small_model())), timeout_keep_alive=1) as server, connect(server.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nG")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            goes_on_sending(client, b"E", pause=0.05)


def test_a_body_that_drips(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightwire_server.inbound.BODY_SECONDS", 0.5)
    scene.enter("open")
    with connect(scene.url) as client:
        client.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode())
        for _ in range(3):
            client.sendall(b" ")
            check_answers(scene)
        assert client.recv(1000).startswith(b"HTTP/1.1 504")
    assert scene.get("/weight_info").json()["update"] == "open"


def test_answers_that_nobody_reads(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WRITE_SECONDS", 0.3)
    with flat_memory(), connect(scene.url) as client:
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            client.setsockopt(socket.SOL_SOCKET, buffer, 4096)
        client.settimeout(0.2)
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        with pytest.raises(OSError):
            goes_on_sending(client, request)
        until(lambda: not scene.busy())
    check_answers(scene)


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_body_of_a_gibibyte(scene: Scene, announced: bool) -> None:
    scene.use(body_limit=MIB)
    scene.enter("open")
    kind = f"Content-Length: {1 << 30}" if announced else "Transfer-Encoding: chunked"
    piece = b" " * 65536
    chunk = piece if announced else b"10000\r\n" + piece + b"\r\n"
    with flat_memory(), connect(scene.url) as client:
        client.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n".encode())
        client.setblocking(False)
        sent, answer = 0, b""
        while not answer and sent < 1 << 30:
            with suppress(BlockingIOError):
                sent += client.send(chunk[sent % len(chunk) :])
            with suppress(BlockingIOError):
                answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 413")
        assert sent < 64 * MIB
    check_answers(scene)
    assert scene.get("/weight_info").json()["update"] == "open"


def test_what_is_no_http(scene: Scene) -> None:
    with connect(scene.url) as client:
        client.sendall(b"\x00" * 100 + b"\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400")
    with connect(scene.url) as client, pytest.raises(ConnectionError):
        goes_on_sending(client, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * MIB)
    check_answers(scene)


def test_a_token_is_nowhere_to_be_read(capfd: pytest.CaptureFixture[str]) -> None:
    token = "open-sesame"
    worker = Worker(small_model())
    app = create_app(worker, token=token)
    with BoundServer(app, access_log=True, log_level="info") as server:
        for header in ("Bearer open-sesam", f"Basic {token}"):
            answer = httpx.get(f"{server.url}/weight_info", headers={"Authorization": header}, trust_env=False)
            assert answer.status_code == 401
            assert token not in answer.text + str(answer.headers)
        good = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{server.url}/weight_info", headers=good, trust_env=False).status_code == 200
        assert token not in repr((app, server, BearerToken(token), app.routes))
    assert token not in "".join(capfd.readouterr())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=worker"
    options = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *options], check=True, capture_output=True)
    app = create_app(Worker(small_model()), token="t")
    with BoundServer(app, ssl_certfile=certificate, ssl_keyfile=key) as server:
        assert server.url == f"https://127.0.0.1:{server.port}"
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.url, verify=trusted, trust_env=False) as client:
            assert client.get("/health").json() == {"status": "ok"}
            assert client.get("/weight_info").status_code == 401
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{server.url}/health", trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False)
        silent = connect(server.url)  # a handshake that never begins
        with silent, httpx.Client(base_url=server.url, verify=trusted, trust_env=False) as client:
            assert client.get("/health").status_code == 200
