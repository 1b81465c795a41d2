"""`pdserve bench`: which measurements there are; each is a module of `pdserve.bench`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

BENCHES = {
    "serve": ("pdserve.bench.serve", "latency, throughput and goodput of a running system under load"),
    "engine": ("pdserve.bench.engine", "batching, memory and scheduler policies of one engine, in this process"),
    "handoff": ("pdserve.bench.handoff", "what handing a request from prefill to decode takes, on a deployment"),
    "kernels": ("pdserve.bench.kernels", "our CPU kernels beside those of the libraries that torch brings"),
    "transfer": ("pdserve.bench.transfer", "KV pages between two processes, beside memcpy and bare sockets"),
    "peers": ("pdserve.bench.peers", "pdserve beside vLLM, llama.cpp and transformers on this machine"),
    "gil": ("pdserve.bench.gil", "what Python's lock costs: the engine as a thread and as a process"),
}


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench <name> ...`; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        names = "\n".join(f"  {name:<8} {text}" for name, (_, text) in BENCHES.items())
        print(
            "usage: pdserve bench <name> [options]\n\n"
            "Measure. Every bench prints a table; --json FILE writes its rows.\n\n"
            f"{names}\n\nexample, with a system started by 'pdserve up':\n"
            "  pdserve bench serve --num-prompts 20 --request-rate 2 --random-input-len 64 --random-output-len 32"
        )
        return 0 if argv else 2
    if argv[0] not in BENCHES:
        close = difflib.get_close_matches(argv[0], BENCHES, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        sys.stderr.write(f"pdserve bench: unknown bench '{argv[0]}'\n{hint}Try 'pdserve bench --help'.\n")
        return 2
    return int(importlib.import_module(BENCHES[argv[0]][0]).main(argv[1:]))
