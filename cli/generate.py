"""`pdserve generate`: one prompt to a router, the answer on stdout as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from pdserve.cli.arguments import add_router, router_addresses
from pdserve.cli.timings import timing_lines
from pdserve.client import Client, RequestOptions, Result, TokenStream
from pdserve.core.config import Parser
from pdserve.core.errors import ConfigError

_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("n", int, "answers, at most 16; several are printed at the end, each after its number (default: 1)"),
    ("max_tokens", int, "tokens to generate at most (default: 256, or what the model's length leaves)"),
    ("temperature", float, "0 always takes the likeliest token; higher is more varied (default: 1)"),
    ("top_p", float, "choose among the likeliest tokens that together hold this probability, in (0, 1] (default: 1)"),
    ("top_k", int, "choose among the N likeliest tokens; 0: all (default: 0)"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest, in [0, 1] (default: 0)"),
    ("seed", int, "same seed, same answer (default: another one each time)"),
    ("logprobs", int, "with --json: log-probabilities of this many likeliest tokens"),
    ("timeout_s", float, "give up after this many seconds (default: never)"),
    ("model", str, "served model name (default: the only one)"),
    ("priority", int, "lower starts first, -100 to 100; for --scheduling-policy priority (default: 0)"),
    ("request_id", str, "id of the request, to look it up or cancel it"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    prompt = _prompt(args.prompt)
    options = _options(args)
    with Client(router_addresses(args.router)) as client:
        if args.chat or args.system:
            messages = [{"role": "user", "content": prompt}]
            if args.system:
                messages.insert(0, {"role": "system", "content": args.system})
            stream = client.stream_chat(messages, **options)
        else:
            stream = client.stream(prompt, **options)
        several = args.n is not None and args.n > 1
        result = _print_stream(stream, quiet=args.json or several)
    if args.json:
        left_out = () if several else ("choices",)  # the only choice is the result itself
        print(json.dumps({name: value for name, value in asdict(result).items() if name not in left_out}))
    elif several:
        print("\n".join(f"[{i}] {choice.text}" for i, choice in enumerate(result.choices)))
    if args.timings:
        sys.stderr.write("\n".join(timing_lines(result.timings, result.usage)) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "pdserve generate",
        "Send a prompt to a router and print the answer as it comes. A router must be running: see 'pdserve up'.",
        'examples:\n  pdserve generate --chat "What is the capital of France?" --temperature 0\n'
        "  pdserve generate 'Once upon a time' --max-tokens 32 --timings\n"
        "  echo 'Once upon a time' | pdserve generate --json",
    )
    parser.add_argument("prompt", nargs="?", help="the text; left out or '-': read from standard input")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message of a conversation, not raw text")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation (implies --chat)")
    add_router(parser)
    for name, kind, text in _OPTIONS:
        metavar = {int: "N", float: "X", str: "NAME"}[kind]
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", type=Path, help="the answer is JSON that this schema allows")
    form.add_argument("--regex", metavar="REGEX", help="the whole answer matches this regular expression")
    form.add_argument("--choice", action="append", metavar="TEXT", help="the answer is one of these; to be repeated")
    form.add_argument("--grammar", metavar="FILE", type=Path, help="the answer is of this grammar (Lark or GBNF)")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="print the whole result as one JSON object at the end")
    parser.add_argument("--timings", action="store_true", help="print where the time went to standard error")
    return parser


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise ConfigError("no prompt; write e.g. pdserve generate 'Once upon a time', or pipe text in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise ConfigError(f"the prompt on standard input is not valid text: {e}") from None


def _options(args: argparse.Namespace) -> RequestOptions:
    names = [name for name, _, _ in _OPTIONS] + ["stop", "ignore_eos"]
    options = {name: getattr(args, name) for name in names}
    if (form := _form(args)) is not None:
        options["structured_outputs"] = form
    return cast(RequestOptions, options)


def _form(args: argparse.Namespace) -> dict[str, object] | None:
    for name, flag, path in (("json", "--json-schema", args.json_schema), ("grammar", "--grammar", args.grammar)):
        if path is not None:
            try:
                return {name: path.read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as e:
                raise ConfigError(f"{flag} {path} cannot be read: {e}") from e
    if args.regex is not None:
        return {"regex": args.regex}
    return None if args.choice is None else {"choice": args.choice}


def _print_stream(stream: TokenStream, quiet: bool) -> Result:
    begun = False
    with stream:
        try:
            for delta in stream:
                if not quiet:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    begun = True
        except BaseException:
            if begun:
                sys.stdout.write("\n")  # what says why the answer ends here begins a line of its own
                sys.stdout.flush()
            raise
        if not quiet:
            sys.stdout.write("\n")
        return stream.result
