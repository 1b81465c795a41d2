"""A small HTTP server around transformers, one of the peers of `pdserve bench peers`.

A program of its own, run by the Python of the peer's environment: it imports nothing of pdserve. It answers
`POST /v1/completions` (prompt of token ids, max_tokens, stream) as the OpenAI API does, always greedy and always to the
full length, and `GET /health` once the model is loaded.

- static: `generate` on fixed batches, padded on the left; a batch runs to its longest member. A row's tokens are sent
  as they are made and its stream ends with its own last token.
- continuous: transformers' continuous batching.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

KV_PAGES = 64
KV_PAGE_TOKENS = 256
STEP_TOKENS = 512
REQUEST_TIMEOUT_S = 900.0


class Job:
    """One request. The model's thread puts tokens, the handler's takes them; None ends it, an exception fails it."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.sent = 0
        self.out: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()

    def put(self, tokens: list[int]) -> None:
        """Takes new tokens; the last one ends the job."""
        for token in tokens[: self.max_tokens - self.sent]:
            self.out.put(token)
            self.sent += 1
            if self.sent == self.max_tokens:
                self.out.put(None)


class Emit(StoppingCriteria):  # type: ignore[misc] # transformers is untyped here
    """Sends each step's tokens, and says which rows have all of theirs."""

    def __init__(self, jobs: list[Job], width: int) -> None:
        self._jobs = jobs
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """See transformers."""
        for job, token in zip(self._jobs, input_ids[:, -1].tolist(), strict=True):
            job.put([token])
        made = input_ids.shape[1] - self._width
        return torch.tensor([made >= job.max_tokens for job in self._jobs])


class StaticBatches:
    """`generate` on batches of at most `size`, collected for `window_s`."""

    def __init__(self, model: Any, size: int, window_s: float) -> None:
        self._model = model
        self._size = size
        self._window_s = window_s
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queues it."""
        self._waiting.put(job)

    def _run(self) -> None:
        while True:
            jobs = [self._waiting.get()]
            deadline = time.monotonic() + self._window_s
            while len(jobs) < self._size and (left := deadline - time.monotonic()) > 0:
                try:
                    jobs.append(self._waiting.get(timeout=left))
                except queue.Empty:
                    break
            try:
                self._generate(jobs)
            except Exception as e:  # noqa: BLE001 - whatever it is, the clients hear of it
                for job in jobs:
                    job.out.put(e)

    def _generate(self, jobs: list[Job]) -> None:
        width = max(len(job.prompt) for job in jobs)
        pads = [width - len(job.prompt) for job in jobs]
        ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(pads, jobs, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(job.max_tokens for job in jobs),
            stopping_criteria=StoppingCriteriaList([Emit(jobs, width)]),
        )


class ContinuousBatches:
    """transformers' own continuous batching."""

    def __init__(self, model: Any) -> None:
        config = ContinuousBatchingConfig(
            page_size=KV_PAGE_TOKENS, num_blocks=KV_PAGES, max_batch_tokens=STEP_TOKENS, allow_block_sharing=False
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        self._manager = model.init_continuous_batching(generation, config)
        self._manager.start()
        self._jobs: dict[str, Job] = {}
        self._ids = (f"r{i}" for i in itertools.count())
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Hands it over."""
        name = next(self._ids)
        self._jobs[name] = job
        if (
            self._manager.add_request(job.prompt, name, max_new_tokens=job.max_tokens, streaming=True, eos_token_id=-1)
            is None
        ):
            del self._jobs[name]
            job.out.put(RuntimeError("refused"))

    def _run(self) -> None:
        while True:
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                if not self._manager.is_running():
                    for job in list(self._jobs.values()):  # handlers add to it
                        job.out.put(RuntimeError("the generation thread has ended"))
                    self._jobs.clear()
                    time.sleep(0.1)
                continue
            found = self._jobs.get(result.request_id)
            if found is None:
                continue
            if result.error is not None:
                found.out.put(RuntimeError(result.error))
            else:
                found.put(list(result.generated_tokens[found.sent :]))
            if result.is_finished():
                del self._jobs[result.request_id]


class Handler(BaseHTTPRequestHandler):
    """The two endpoints."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    batches: StaticBatches | ContinuousBatches
    tokenizer: Any

    def do_GET(self) -> None:
        """Health."""
        self._send(200 if self.path == "/health" else 404, b"{}")

    def do_POST(self) -> None:
        """A completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        job = Job(list(body["prompt"]), int(body["max_tokens"]))
        self.batches.submit(job)
        tokens: list[int] = []
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
        while (got := job.out.get(timeout=REQUEST_TIMEOUT_S)) is not None:
            if isinstance(got, Exception):
                self._fail(got, bool(body.get("stream")))
                return
            tokens.append(got)
            if body.get("stream"):
                self._event({"choices": [self._choice([got], None)]})
        usage = {"prompt_tokens": len(job.prompt), "completion_tokens": len(tokens)}
        if body.get("stream"):
            self._event({"choices": [self._choice([], "length")], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            answer = {"choices": [self._choice(tokens, "length")], "usage": usage}
            self._send(200, json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _choice(self, tokens: list[int], finish_reason: str | None) -> dict[str, object]:
        return {"index": 0, "text": self.tokenizer.decode(tokens), "finish_reason": finish_reason}

    def _event(self, value: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _fail(self, error: Exception, streaming: bool) -> None:
        answer: dict[str, object] = {"error": {"message": repr(error)}}
        if streaming:
            self._event(answer)
        else:
            self._send(500, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Waits for as many connections at once as a load may open: beyond five the system would reset some."""

    request_queue_size = 128


def main() -> None:
    """Loads the model, then serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mode", choices=("static", "continuous"), required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batch-window-s", type=float, default=0.03)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    Handler.tokenizer = AutoTokenizer.from_pretrained(args.model)
    static = args.mode == "static"
    Handler.batches = StaticBatches(model, args.batch_size, args.batch_window_s) if static else ContinuousBatches(model)
    server = Server(("127.0.0.1", args.port), Handler)
    server.serve_forever()


if __name__ == "__main__":
    main()
