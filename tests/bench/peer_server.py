"""A peer for tests: an OpenAI-compatible server that makes tokens of nothing. `peer_server.py PORT [FAULT]`.

Faults: short (one token too few), die (ends at the first streamed request), child (has a child that ignores SIGTERM).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULT = sys.argv[2] if len(sys.argv) > 2 else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer("application/json", b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAULT == "die" and body.get("stream"):
            os._exit(3)
        made = body["max_tokens"] - (FAULT == "short" and bool(body.get("stream")))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
        if not body.get("stream"):
            choice = {"text": " a" * made, "finish_reason": "length"}
            self.answer("application/json", json.dumps({"choices": [choice], "usage": usage}).encode())
            return
        events = [{"choices": [{"text": " a", "finish_reason": None}]}] * made
        events.append({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.answer("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    if FAULT == "child":
        subprocess.Popen(
            [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
            start_new_session=True,
        )
    ThreadingHTTPServer.request_queue_size = 128  # a load connects with all requests at once
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
