"""`pdserve bench transfer`: how fast KV pages move between two processes, beside memcpy, bare sockets and libraries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from pdserve.bench.report import Report, check_json, print_report, without_goals, write_json
from pdserve.bench.transfer_args import INTEGRITIES, TransferConfig
from pdserve.bench.transfer_elsewhere import Elsewhere
from pdserve.bench.transfer_libraries import LIBRARIES
from pdserve.bench.transfer_methods import BareSockets, Case, Memcpy, Method, PlaneMethod
from pdserve.bench.transfer_report import Runs, keep, name_of, notes, raw, shares, tables
from pdserve.bench.transfer_source import PLANES, TLS_PLANE, make_pool
from pdserve.core.config import build_parser, from_namespace
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.core.extras import install_command
from pdserve.core.tls import TlsConfig, load_tls
from pdserve.kvtransfer.pool import KvPool

DESCRIPTION = """\
Move pages from the pool of one process into the pool of another by every data plane, with and without checksums,
beside one copy inside a process (memcpy), sendall/recv_into over a bare socket, and NIXL and Mooncake used directly.

  pdserve bench transfer --quick                       see that it works; its numbers mean little
  pdserve bench transfer --json transfer.json          the comparison, some ten minutes
  pdserve bench transfer --planes tcp --page-kib 256   one plane, one size of page
  pdserve bench transfer --planes nixl-shm,mooncake    libraries, bare and under pdserve

With the files of TLS (pdserve certs makes some) the plane tcp+tls is measured, too.
"""


@dataclass
class Measured:
    """Runs of all cases, and what is missing among them, in words."""

    runs: Runs = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Runs `pdserve bench transfer`; returns the exit status."""
    sections = {"Comparison": TransferConfig, "TLS": TlsConfig}
    config, files = from_namespace(
        sections, build_parser("pdserve bench transfer", DESCRIPTION, sections).parse_args(argv)
    )
    planes = _planes(config.planes, files)
    check_json(config.json)
    load_tls(files)
    progress = Console(stderr=True)
    say = partial(progress.print, markup=False, highlight=False)
    measured = asyncio.run(measure(config, files, planes, say))
    if config.planes == "all":
        measured.left_out += [f"{name}: not installed" for name in LIBRARIES if name not in planes]
    console = Console()
    for table in tables(measured.runs):
        console.print(table)
    report = Report(
        title="shares, over all cases",
        command=["pdserve", "bench", "transfer", *argv],
        seed=config.seed,
        rows=without_goals(shares(measured.runs)) if config.quick else shares(measured.runs),
        notes=[*notes(config.rounds(), measured.runs), *measured.failures, *measured.left_out],
        extra={"cases": raw(measured.runs)},
    )
    print_report(report, console)
    if config.json:
        write_json(report, Path(config.json))
    return 1 if measured.failures else 0


async def measure(
    config: TransferConfig, files: TlsConfig, planes: Sequence[str], say: Callable[[str], None]
) -> Measured:
    """Runs every case by every method, interleaved, until the time is over; the first run of a case only warms it up.

    A method that fails is left out until pages have another size.
    """
    measured, until_s = Measured(), time.monotonic() + config.max_minutes * 60
    for page_bytes in config.page_sizes():
        pool = make_pool(page_bytes, max(config.totals()) // page_bytes)
        found: dict[str, Method] = {}
        try:
            for name, make in _methods(planes, pool, config.timeout_s, files).items():
                found[name] = make()
            for case in _cases(page_bytes, config.totals()):
                if time.monotonic() > until_s:
                    measured.left_out.append(f"{name_of(case)}: left out, --max-minutes were over")
                    continue
                say(name_of(case))
                await _run(case, found, config, measured)
        finally:
            for method in found.values():
                await method.close()
            pool.close()
    return measured


async def _run(case: Case, found: dict[str, Method], config: TransferConfig, measured: Measured) -> None:
    runs = measured.runs.setdefault(case, {})
    for round_ in range(config.rounds() + 1):
        for name, method in list(found.items()):
            try:
                moved = await method.move(case, config.seed)
            except PdserveError as e:
                measured.failures.append(f"{name} failed: {name_of(case)}: {e.message}")
                await found.pop(name).close()
                continue
            if round_:
                keep(runs, name, moved)


def _cases(page_bytes: int, totals: Sequence[int]) -> list[Case]:
    return [Case(page_bytes, total // page_bytes, scattered) for total in totals for scattered in (False, True)]


def _methods(
    planes: Sequence[str], pool: KvPool, timeout_s: float, files: TlsConfig
) -> Mapping[str, Callable[[], Method]]:
    """What makes each method, by its name, in the order of the report."""
    makers: dict[str, Callable[[], Method]] = {
        "memcpy": partial(Memcpy, pool),
        "bare sockets": partial(BareSockets, pool, timeout_s),
    }
    for plane in planes:
        if plane in LIBRARIES:
            makers[f"bare {plane}"] = partial(Elsewhere, plane, True, pool, timeout_s)
            makers[f"{plane}, host"] = partial(Elsewhere, plane, False, pool, timeout_s)
            continue
        for mode in INTEGRITIES:
            makers[f"{plane}, {mode}"] = partial(PlaneMethod, plane, pool, mode, timeout_s, files)
    return makers


def _planes(wanted: str, files: TlsConfig) -> list[str]:
    installed = [name for name, library in LIBRARIES.items() if library.is_installed]
    known = [*PLANES, *([TLS_PLANE] if files.enabled else []), *LIBRARIES]
    chosen = [name for name in known if name not in LIBRARIES or name in installed]
    if wanted != "all":
        chosen = [name.strip() for name in wanted.split(",") if name.strip()]
    if TLS_PLANE in chosen and not files.enabled:
        raise ConfigError(f"--planes: {TLS_PLANE} needs --tls-cert-file, --tls-key-file and --tls-ca-file")
    if unknown := [name for name in chosen if name not in known]:
        names = ", ".join(("all", *PLANES, TLS_PLANE, *LIBRARIES))
        raise ConfigError(f"--planes: unknown {', '.join(unknown)}; known: {names}")
    if missing := [name for name in chosen if name in LIBRARIES and name not in installed]:
        extra = LIBRARIES[missing[0]].transport
        raise ConfigError(f"--planes: {missing[0]} is not installed: {install_command(f'server,bench,{extra}')}")
    return chosen
