"""Small servers with OpenAI's protocol: one that plays a script, and one around a real model."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, Any] | bytes]


def completion(text: str, read: int = 100, written: int = 50) -> dict[str, Any]:
    """A reply in the form of /chat/completions."""
    return {
        "object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": read, "completion_tokens": written},
    }  # fmt: skip


@contextlib.contextmanager
def served(answer: Callable[[str, dict[str, Any], dict[str, str]], Reply]) -> Iterator[str]:
    """Serve `answer(path, body, headers)` on a free port; yields the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = answer(self.path, body, dict(self.headers))
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def raw(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serve whatever `answer(connection)` sends after a request; yields the base URL.

    The request is read to its end: what lies unread when a connection is closed resets it, and the answer with it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        with connection.makefile("rb") as request:
                            request.readline()
                            request.read(int(http.client.parse_headers(request)["Content-Length"] or 0))
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        listening.shutdown(socket.SHUT_RDWR)


def of_model(tokenizer: Any, model: Any) -> Callable[[str, dict[str, Any], dict[str, str]], Reply]:
    """Answers of a model of transformers, one request at a time."""
    from gpu_accel.cuda_llm.models import generate

    lock = threading.Lock()

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        with lock:
            text, (read, written) = generate(
                tokenizer, model, body["messages"], max_tokens=body["max_tokens"],
                temperature=body.get("temperature", 0.0), seed=body.get("seed", 0),
            )  # fmt: skip
        return 200, completion(text, read, written)

    return answer
