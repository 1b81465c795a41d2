"""`pdserve`: one command for everything. Each subcommand's module is imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pdserve.core.errors import ConfigError
from pdserve.core.extras import install_command

COMMANDS = {
    "up": (
        "pdserve.cli.up",
        "start a whole system on this machine (store, workers, router) and try it once",
    ),
    "generate": ("pdserve.cli.generate", "send a prompt to a router and print the answer as it comes"),
    "status": ("pdserve.cli.status", "show the models and workers of a router, and whether it is ready"),
    "bench": ("pdserve.cli.bench", "measure: latency and throughput under load (bench serve), and more"),
    "router": ("pdserve.router.__main__", "start a router: takes requests and chooses the workers for each"),
    "prefill": ("pdserve.prefill_service.__main__", "start a prefill worker: computes prompts"),
    "decode": ("pdserve.decode_service.__main__", "start a decode worker: generates tokens (--role mixed: both)"),
    "certs": ("pdserve.cli.certs", "make certificates to try mutual TLS with"),
    "fetch-model": ("pdserve.cli.fetch_model", "download and convert the built-in model, and show where it lies"),
}
SERVICES = ("router", "prefill", "decode")
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pdserve <command> ...`.

    Args:
        argv: Words after "pdserve"; default: the process's.

    Returns:
        Exit status: 0 done, 1 failed, 2 wrong command line or configuration, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            status = _dispatch(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (e.g. `head`) left: what Python would flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    if argv is None and words and words[0] in SERVICES:
        _end_now(status)
    return status


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"pdserve {version('pdserve')}")
        return 0
    if words[0] not in COMMANDS:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        sys.stderr.write(f"pdserve: unknown command '{words[0]}'\n{hint}Try 'pdserve --help'.\n")
        return 2
    return _run(words[0], words[1:])


def _run(command: str, argv: list[str]) -> int:
    if command in SERVICES:  # else gRPC writes a line for each stranger whose handshake fails
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        module = importlib.import_module(COMMANDS[command][0])
        return int(module.main(argv) or 0)
    except ConfigError as e:
        sys.stderr.write(f"pdserve {command}: {e.message}\n")
        return 2
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] == "pdserve":
            raise
        extra = {"bench": "server,bench", "certs": "server,certs"}.get(command, "server")
        sys.stderr.write(
            f"pdserve {command}: the package '{e.name}' is missing; in pdserve's directory: {install_command(extra)}\n"
        )
        return 2
    except _typed_errors() as e:
        sys.stderr.write(f"error: {e} ({getattr(e, 'reason', 'UNKNOWN')})\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _end_now(status: int) -> NoReturn:
    """Ends a service that has stopped in order; taking down torch's and gRPC's modules would only take seconds more."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _typed_errors() -> tuple[type[Exception], ...]:
    """Evaluated only when something was raised, so that no command pays for the import."""
    from pdserve.client.errors import PdserveError as ClientSide
    from pdserve.core.errors import PdserveError as ServerSide

    return ClientSide, ServerSide


def _help() -> str:
    commands = "\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: pdserve <command> [options]

Serve large language models with prefill (computing the prompt) and decode (generating tokens) on separate workers.

First command to try:
  pdserve up                              # starts everything here; stop it with Ctrl-C
then, in another terminal:
  pdserve generate --chat "What is the capital of France?" --temperature 0

Commands:
{commands}

'pdserve <command> --help' explains a command's options; 'pdserve --version' prints the version."""


if __name__ == "__main__":
    sys.exit(main())
