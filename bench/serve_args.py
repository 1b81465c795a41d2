"""The flags of `pdserve bench serve`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pdserve.cli.arguments import add_router
from pdserve.core.config import Parser

_EPILOG = """examples, with a system started by 'pdserve up':
  pdserve bench serve --num-prompts 20 --request-rate 2 --random-input-len 64 --random-output-len 32
  pdserve bench serve --max-concurrency 8 --goodput ttft:1000 tpot:200 --json result.json
  pdserve bench serve --trace bench/data/azure2023_conv_2000.csv --scale 16 --num-prompts 50
the same load on another server:
  pdserve bench serve --backend openai --base-url http://127.0.0.1:8000 --model NAME --num-prompts 20"""


def build_parser() -> argparse.ArgumentParser:
    """The parser, with every default in the help."""
    parser = Parser(
        "pdserve bench serve",
        "Send many requests to a running system and report latency (TTFT, TPOT, ITL, E2EL), throughput\n"
        "and goodput. Open loop: --request-rate. Closed loop: --max-concurrency.",
        _EPILOG,
    )
    _add_target(parser.add_argument_group("what is measured"))
    _add_load(parser.add_argument_group("load"))
    _add_dataset(parser.add_argument_group("prompts"))
    _add_report(parser.add_argument_group("report"))
    return parser


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=("pdserve", "openai"),
        default="pdserve",
        help="pdserve: our gRPC; openai: any OpenAI-compatible HTTP server (default: pdserve)",
    )
    add_router(group)
    group.add_argument("--base-url", metavar="URL", help="server of --backend openai, e.g. http://127.0.0.1:8000")
    group.add_argument("--endpoint", default="/v1/completions", help="path on it (default: /v1/completions)")
    group.add_argument("--model", metavar="NAME", help="served model name; needed with --backend openai")
    group.add_argument("--timeout-s", type=positive(float), metavar="S", help="deadline of each request")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-prompts", type=positive(int), default=100, metavar="N", help="requests (default: 100)")
    group.add_argument(
        "--request-rate",
        type=positive(float),
        metavar="R",
        help="mean arrivals per second; inf: all at once (default: inf, or the trace's own times)",
    )
    group.add_argument(
        "--burstiness",
        type=positive(float),
        default=1.0,
        metavar="X",
        help="gaps are gamma-distributed with this shape; 1: Poisson, less: burstier (default: 1)",
    )
    group.add_argument("--max-concurrency", type=positive(int), metavar="N", help="requests in flight at most")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and tokens (default: 0)")


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=("random", "trace"), default="random", help="(default: random)")
    group.add_argument("--random-input-len", type=positive(int), default=128, metavar="N", help="(default: 128 tokens)")
    group.add_argument("--random-output-len", type=positive(int), default=32, metavar="N", help="tokens (default: 32)")
    group.add_argument(
        "--random-range-ratio", type=_fraction, default=0.0, metavar="X", help="lengths vary by this share (default: 0)"
    )
    group.add_argument("--trace", metavar="FILE", help="trace of --dataset-name trace; see bench/data/README.md")
    group.add_argument(
        "--scale",
        type=_at_least_one,
        default=1.0,
        metavar="N",
        help="divide the trace's lengths by N and multiply its gaps by N (default: 1)",
    )
    group.add_argument("--vocab-size", type=positive(int), metavar="N", help="default: the model's; openai: 32000")
    group.add_argument(
        "--max-model-len", type=positive(int), metavar="N", help="cut requests to this; default: the model's"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="always generate the full length (default: yes)",
    )


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="LIST",
        help="which to report (default: ttft,tpot,itl,e2el)",
    )
    group.add_argument("--metric-percentiles", default="90,99", metavar="LIST", help="(default: 90,99)")
    group.add_argument(
        "--goodput", nargs="+", metavar="METRIC:MS", help="limits of a good request, e.g. ttft:200 tpot:50"
    )
    group.add_argument("--json", metavar="FILE", help="write rows, command, commit, machine and seed")
    group.add_argument("--save-result", action="store_true", help="also write every request's times to a JSON file")
    group.add_argument("--result-filename", metavar="FILE", help="name of that file (default: from backend and date)")


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A type of argument: numbers greater than 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it when the text is no number
    return parse


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _at_least_one(text: str) -> float:
    value = float(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number >= 1")
    return value
