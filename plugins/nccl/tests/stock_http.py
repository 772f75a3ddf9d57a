"""A stock worker behind vLLM's routes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from plugins.nccl.tests.stock_scene import StockWorker


class HTTPServer:
    """vLLM's routes in front of a worker; what it raises is answered as vLLM does."""

    def __init__(self, worker: StockWorker) -> None:
        self.requests: list[str] = []
        noted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200, {"world_size": 1})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                method = self.path.removeprefix("/")
                noted.requests.append(method)
                if not hasattr(worker, method):
                    self.answer(404, {"detail": "Not Found"})
                    return
                try:
                    getattr(worker, method)(*body.values())
                    self.answer(200, {"message": "done"})
                except Exception as error:  # noqa: BLE001 - all of vLLM's workers' errors are answered so
                    words = f"Call to collective_rpc method failed: {error}"
                    self.answer(500, {"error": {"message": words, "type": "InternalServerError", "code": 500}})

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()
