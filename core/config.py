"""Configuration: frozen dataclasses whose fields document themselves, read from defaults < file < environment < flags.

A field is declared with `option(...)`; `load` turns dataclasses into flags, reads the sources in that order and builds
the objects, whose `__post_init__` may check further. Unknown keys are errors. Nothing is mutated afterwards.
"""

from __future__ import annotations

import argparse
import difflib
import math
import numbers
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pdserve.core.errors import ConfigError
from pdserve.core.kv_transfer_config import ON_REQUEST, KvTransferConfig
from pdserve.core.net import check_address

ENV_PREFIX = "PDSERVE_"
_MAX_INT = 2**63 - 1
_MAX_COUNT = 2**31 - 1
C = TypeVar("C")


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals say what to do: a close flag, and where the help is."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        known = list(self._option_string_actions)
        flags = [f for f in re.findall(r"--[\w-]+", message) if f not in known]
        close = [c for f in flags for c in difflib.get_close_matches(f, known, n=1)]
        words = message.removeprefix("unrecognized arguments: ")
        if words != message and not words.startswith("-") and "--model" in known:
            close = [f"--model {words.split()[0]}"]
        hint = f"did you mean {' '.join(close)}? " if close else ""
        self.exit(2, f"{self.prog}: {message}\n{hint}Try '{self.prog} --help'.\n")


def option(
    default: object,
    help: str,
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    roles: Sequence[str] = (),
) -> Any:  # dataclasses.field is untyped in the same way
    """Declares one configuration field.

    Args:
        default: Value when no source gives one.
        help: One line, for `--help`.
        unit: Unit of the value, or what kind of thing it is ("file"); empty for names and switches.
        choices: The values allowed, for closed sets.
        minimum: Smallest value allowed.
        maximum: Largest value allowed; of a number without one it is what 64 bits hold, for a count what 31 do: more
            fits into no message.
        roles: Of the workers that heed it; empty: all do.
    """
    meta = {"help": help, "unit": unit, "choices": tuple(choices), "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata={**meta, "roles": tuple(roles)})


def check(config: object) -> None:
    """Checks every field of a config against its type, range and choices; call it from `__post_init__`.

    Raises:
        ConfigError: With flag, value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for f in fields(config):  # type: ignore[arg-type]
        value, meta, hint = getattr(config, f.name), f.metadata, hints[f.name]
        if value is None and isinstance(hint, types.UnionType):
            continue
        flag = flag_name(f.name)
        if (expected := _wrong_type(value, _base_type(hint))) is not None:
            raise ConfigError(f"{flag} is {value!r:.80}; it must be {expected}")
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(meta['choices'])}")
        if meta["minimum"] is not None and value < meta["minimum"]:
            raise ConfigError(f"{flag} is {value!r:.80}; it must be at least {meta['minimum']:g}{_unit(meta['unit'])}")
        if (maximum := _maximum(meta, _base_type(hint))) is not None and value > maximum:
            shown = f"{maximum:g}" if isinstance(maximum, float) else maximum
            raise ConfigError(f"{flag} is {value!r:.80}; it must be at most {shown}{_unit(meta['unit'])}")


_EXPECTED = {bool: "True or False", int: "an integer", float: "a finite number", str: "text"}


def _wrong_type(value: object, kind: type) -> str | None:
    """What a value of a field of this type must be; None when it is, or when the type is none of ours."""
    if kind is float:
        right = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    elif kind is int:
        right = not isinstance(value, bool) and isinstance(value, numbers.Integral)
    else:
        right = kind not in _EXPECTED or isinstance(value, kind)
    return None if right else _EXPECTED[kind]


def _maximum(meta: Mapping[str, Any], kind: type) -> float | None:
    """Largest value of a field."""
    if meta["maximum"] is not None or kind not in (int, float):
        most: float | None = meta["maximum"]
        return most
    return _MAX_COUNT if meta["unit"] not in ("", "bytes") else _MAX_INT if kind is int else None


def as_keywords(message: str, cls: type) -> str:
    """A message with keyword arguments where it names flags of `cls`: what a caller of Python wrote."""
    names = {flag_name(f.name): f.name for f in fields(cls)}
    return re.sub(r"--[a-z][a-z0-9-]*", lambda flag: names.get(flag[0], flag[0]), message)


def heeds(role: str, f: Field[Any]) -> bool:
    """Whether a field has an effect on workers of a role."""
    return not f.metadata["roles"] or role in f.metadata["roles"]


def without_effect(role: str, sections: Mapping[str, type], argv: Sequence[str]) -> list[str]:
    """Flags of a command line that have no effect on a worker of a role.

    Of the command line only: a file and the environment may be those of several workers.
    """
    given = {word.partition("=")[0] for word in argv}
    ours = [f for cls in sections.values() for f in fields(cls) if not heeds(role, f)]
    return [flag for f in ours if given & {flag := flag_name(f.name), flag.replace("--", "--no-", 1)}]


def flag_name(name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def load(
    prog: str,
    description: str,
    sections: Mapping[str, type],
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Builds one object per section from defaults < `--config` file (TOML) < environment < flags.

    Args:
        prog: Name shown in the help, e.g. "pdserve prefill".
        description: First lines of the help.
        sections: Title -> config dataclass; field names must be distinct over all sections.
        argv: Command-line words after the command's name.
        environ: Environment; default is the process's. `PDSERVE_MAX_NUM_SEQS` sets `max_num_seqs`.

    Returns:
        The objects in the order of `sections`.

    Raises:
        ConfigError: A value is wrong or a key unknown.
        SystemExit: `--help` (0) or a flag that argparse refuses (2).
    """
    parser = build_parser(prog, description, sections)
    return from_namespace(sections, parser.parse_args(argv), environ)


def build_parser(prog: str, description: str, sections: Mapping[str, type]) -> argparse.ArgumentParser:
    """The argument parser of `load`, for commands that add arguments of their own."""
    parser = Parser(prog, description)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of the options below (names with _ or -)")
    for title, cls in sections.items():
        group = parser.add_argument_group(title)
        for f in fields(cls):
            _add_flag(group, cls, f)
    declared = {f.name: (cls, f) for cls in sections.values() for f in fields(cls)}
    valued = [f for cls, f in declared.values() if _base_type(typing.get_type_hints(cls)[f.name]) is not bool]
    shown = next((f for f in valued if f.default not in (None, MISSING, "")), None)
    example = "LOG_LEVEL=debug" if "log_level" in declared or shown is None else f"{shown.name.upper()}={shown.default}"
    parser.epilog = (
        f"Every option can also be set in the environment, e.g. {ENV_PREFIX}{example}; flags win over the "
        "environment, the environment wins over the file."
    )
    return parser


def from_namespace(
    sections: Mapping[str, type], namespace: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> list[Any]:
    """Builds the objects of `load` from parsed arguments."""
    environ = os.environ if environ is None else environ
    file_values = _read_file(namespace.config) if namespace.config else {}
    known = {f.name for cls in sections.values() for f in fields(cls)}
    if unknown := sorted(set(file_values) - known):
        close = [c for name in unknown for c in difflib.get_close_matches(name, known, n=1)]
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        if any(isinstance(file_values[name], dict) for name in unknown):
            hint = "; write options without sections"
        raise ConfigError(f"{namespace.config}: unknown option {', '.join(unknown)}{hint}")
    built = []
    for cls in sections.values():
        hints = typing.get_type_hints(cls)
        values: dict[str, object] = {}
        for f in fields(cls):
            if f.name in file_values:
                values[f.name] = _convert(f.name, hints[f.name], file_values[f.name], f"{namespace.config}: {f.name}")
            if (env := environ.get(ENV_PREFIX + f.name.upper())) is not None:
                values[f.name] = _convert(f.name, hints[f.name], env, ENV_PREFIX + f.name.upper())
            if (flag := getattr(namespace, f.name)) is not None:
                values[f.name] = flag
        built.append(cls(**values))
    return built


def run_main(prog: str, main: typing.Callable[[], int]) -> NoReturn:
    """Runs a command: typed errors become one line on stderr and exit status 2 (config) or 1."""
    try:
        sys.exit(main())
    except ConfigError as e:
        sys.stderr.write(f"{prog}: {e.message}\n")
        sys.exit(2)


def _add_flag(group: Any, cls: type, f: Field[Any]) -> None:
    kind = _base_type(typing.get_type_hints(cls)[f.name])
    default = None if f.default is MISSING else f.default
    shown = "" if default is None or default == "" else f" (default: {default}{_unit(f.metadata['unit'])})"
    of = f"{', '.join(f.metadata['roles'])}: " if f.metadata["roles"] else ""
    help_text = (of + f.metadata["help"] + shown).replace("%", "%%")
    if kind is bool:
        group.add_argument(flag_name(f.name), action=argparse.BooleanOptionalAction, default=None, help=help_text)
        return
    parse = _parser_of(kind, f.metadata["unit"])
    group.add_argument(flag_name(f.name), type=parse, default=None, metavar=_placeholder(f), help=help_text)


def _parser_of(kind: Any, unit: str) -> typing.Callable[[str], object]:
    """The type of a flag: says what it must be, with its unit."""

    def parse(text: str) -> object:
        try:
            return kind(text)
        except ValueError:
            told = f" ({unit})" if unit else ""
            raise argparse.ArgumentTypeError(f"it is {text!r:.80}; it must be {_EXPECTED[kind]}{told}") from None

    return parse


def _placeholder(f: Field[Any]) -> str:
    """What stands for the value in the help: the choices, the unit, or the last word of the name."""
    if f.metadata["choices"]:
        return "{" + ",".join(f.metadata["choices"]) + "}"
    return str(f.metadata["unit"] or f.name.rpartition("_")[2]).upper()


def _convert(name: str, hint: Any, value: object, where: str) -> object:
    kind = _base_type(hint)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(value).lower()]
        if isinstance(value, bool | dict | list) or (kind is int and isinstance(value, float)):
            raise TypeError  # a file has types: 1.5 pages are no 1
        return kind(value)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{where} is {value!r}; it must be {_EXPECTED[kind]}") from None


def _base_type(hint: Any) -> Any:
    """`int | None` -> `int`."""
    if isinstance(hint, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _read_file(path: str) -> dict[str, object]:
    try:
        raw = tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"--config {path}: {e.strerror}") from e
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"--config {path}: not TOML: {e}") from e
    return {k.replace("-", "_"): v for k, v in raw.items()}


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What every service has: where it listens, where the store is, what it reports."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = option(0, "gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    advertise_address: str | None = option(None, "host:port that others reach this service at; default: host:port")
    metrics_port: int | None = option(
        None, "Prometheus metrics port; 0 picks a free one; not set: no metrics endpoint", minimum=0, maximum=65535
    )
    redis_url: str = option("redis://127.0.0.1:6379/0", "Redis or Valkey with request state and worker discovery")
    cluster: str = option("default", "name that separates deployments sharing one Redis")
    otlp_traces_endpoint: str | None = option(None, "OTLP gRPC endpoint for traces, e.g. http://127.0.0.1:4317")
    log_level: str = option("info", "least severe log lines shown", choices=("debug", "info", "warning", "error"))
    max_message_bytes: int = option(16 << 20, "largest gRPC message accepted", unit="bytes", minimum=1 << 16)
    drain_grace_s: float = option(30.0, "time that running requests get after SIGTERM", unit="s", minimum=0)

    def __post_init__(self) -> None:
        check(self)
        if self.advertise_address:
            check_address(self.advertise_address, "--advertise-address")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What every worker has beside the engine: its name, its health limit and its side of the KV transfer."""

    worker_id: str | None = option(None, "stable name of this worker; default: role, host name and port")
    step_stall_s: float = option(
        60.0, "liveness fails when sequences run but no engine step ends for this long", unit="s", minimum=1
    )
    health_port: int | None = option(
        None, "plain gRPC port that answers health only, for probes without TLS; 0 picks one", minimum=0, maximum=65535
    )
    router_timeout_s: float = option(3.0, "a router silent for this long is taken for dead", unit="s", minimum=0.1)
    data_port: int = option(
        0, "port of the tcp data plane for KV; 0 picks a free one", minimum=0, maximum=65535, roles=("prefill",)
    )
    advertise_data_address: str | None = option(
        None, "host:port that decode workers reach the tcp data plane at", roles=("prefill",)
    )
    kv_lease_s: float = option(
        10.0,
        "time that computed pages wait for a reader without renewal",
        unit="s",
        minimum=0.1,
        roles=("prefill",),
    )
    kv_integrity: str = option(
        "host",
        "page checksums: xxh3 on the host, or none; a decode worker with host refuses a prefill worker with none",
        choices=("host", "none"),
    )
    kv_transfer_config: str | None = option(
        None,
        "how KV pages travel, JSON or a file with it; keys: transports (shm, tcp, nixl, mooncake; most wanted first), "
        'max_quarantined_pages, nixl, mooncake; default {"transports":["shm","tcp"]}',
    )
    kv_convert_dtype: bool = option(
        False,
        "take KV of prefill workers with another --dtype, rounded to this worker's; tokens may then differ from those "
        "of a mixed worker",
        roles=("decode",),
    )
    kv_staging_bytes: int = option(
        64 << 20,
        "memory through which KV of another page size or dtype is converted, for each kind of page that comes",
        unit="bytes",
        minimum=1,
        roles=("decode",),
    )
    reserve_wait_s: float = option(
        5.0, "time that a reservation waits for free pages", unit="s", minimum=0, roles=("decode",)
    )
    pull_idle_s: float = option(
        2.0, "a pull that receives nothing for this long fails", unit="s", minimum=0.05, roles=("decode",)
    )
    pull_min_rate: float = option(
        50.0,
        "a pull slower than this after its first 5 s fails; lower it for slow links",
        unit="MB/s",
        minimum=0.1,
        roles=("decode",),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.advertise_data_address:
            check_address(self.advertise_data_address, "--advertise-data-address")
        unsafe = [t for t in self.kv_transfer.transports if t in ON_REQUEST]  # refused before the model is loaded
        if unsafe and self.kv_integrity == "none":
            raise ConfigError(
                f"--kv-integrity none: transport {unsafe[0]} (--kv-transfer-config) knows a stale page by its checksum "
                "only; use --kv-integrity host"
            )

    @cached_property
    def kv_transfer(self) -> KvTransferConfig:
        """What `kv_transfer_config` says."""
        return KvTransferConfig.parse(self.kv_transfer_config)
