"""Configuration: values of the wrong type are refused by name, wherever they come from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.up import UpConfig
from pdserve.core.config import (
    ServiceConfig,
    WorkerConfig,
    as_keywords,
    build_parser,
    check,
    load,
    option,
    without_effect,
)
from pdserve.core.errors import ConfigError
from pdserve.core.request import Role
from pdserve.engine.config import EngineConfig
from pdserve.router.config import RouterConfig, RouterServiceConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    num_pages: int = option(4, "pages", unit="pages", minimum=1)
    wait_s: float | None = option(None, "wait", unit="s", minimum=0)
    model_name: str = option("m", "name")
    share: bool = option(True, "share")

    def __post_init__(self) -> None:
        check(self)


def built(file: Path, *argv: str, **environ: str) -> Config:
    config: Config
    [config] = load("test", "A test.", {"test": Config}, ["--config", str(file), *argv], environ)
    return config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"num_pages": "4"}, "--num-pages is '4'; it must be an integer"),
        ({"num_pages": 4.0}, "--num-pages is 4.0; it must be an integer"),
        ({"num_pages": True}, "--num-pages is True; it must be an integer"),
        ({"num_pages": None}, "--num-pages is None; it must be an integer"),
        ({"wait_s": float("nan")}, "--wait-s is nan; it must be a finite number"),
        ({"wait_s": float("inf")}, "--wait-s is inf; it must be a finite number"),
        ({"wait_s": "1"}, "--wait-s is '1'; it must be a finite number"),
        ({"model_name": 5}, "--model-name is 5; it must be text"),
        ({"share": 1}, "--share is 1; it must be True or False"),
    ],
)
def test_a_wrong_type_is_refused_by_name(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config(**value)
    assert refusal.value.message == message


@dataclass(frozen=True, kw_only=True)
class Bounds:
    num_bytes: int = option(0, "bytes", unit="bytes")
    seed: int = option(0, "seed")
    num_pages: int | None = option(None, "pages", unit="pages")
    wait_s: float = option(0, "time", unit="s")
    scale: float = option(0, "any")

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("name", "most", "unit"),
    [
        ("num_bytes", 2**63 - 1, " bytes"),
        ("seed", 2**63 - 1, ""),
        ("num_pages", 2**31 - 1, " pages"),
        ("wait_s", 2**31 - 1, " s"),
    ],
)
def test_numbers_are_bounded_though_no_bound_is_declared(name: str, most: int, unit: str) -> None:
    assert getattr(Bounds(**{name: most}), name) == most
    for value in (most + 1, 10**30):
        with pytest.raises(ConfigError) as refusal:
            Bounds(**{name: value})
        flag = "--" + name.replace("_", "-")
        assert refusal.value.message == f"{flag} is {value}; it must be at most {most}{unit}"
    assert Bounds(scale=1e300).scale == 1e300


SERVERS = [ServiceConfig, WorkerConfig, EngineConfig, RouterConfig, RouterServiceConfig, UpConfig]


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, f.name) for cls in SERVERS for f in fields(cls) if str(f.type).startswith("int")]
)
def test_no_integer_of_a_server_is_taken_at_any_size(cls: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--{name.replace('_', '-')} is 10{{30}}; it must be at most \d+"):
        cls(**{name: 10**30})


def test_what_is_right_passes() -> None:
    assert Config(num_pages=1, wait_s=0).wait_s == 0
    assert Config(wait_s=None).wait_s is None


@pytest.mark.parametrize("line", ["num_pages = 1.5", "num-pages = true", "wait_s = true", "num_pages = 'x'"])
def test_a_file_has_types_too(tmp_path: Path, line: str) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text(line)
    with pytest.raises(ConfigError, match=r"pdserve\.toml: (num_pages|wait_s) is .*; it must be an? (integer|finite)"):
        built(file)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text("num_pages = 7\nwait-s = 2\nmodel_name = 'file'\nshare = false")
    got = built(file, "--num-pages", "9", PDSERVE_NUM_PAGES="8", PDSERVE_WAIT_S="3")
    assert got == Config(num_pages=9, wait_s=3.0, model_name="file", share=False)


def test_a_caller_of_python_reads_keywords() -> None:
    said = as_keywords("--num-pages is 0 (see --role mixed and --wait-s): raise --num-pages", Config)
    assert said == "num_pages is 0 (see --role mixed and wait_s): raise num_pages"


@pytest.mark.parametrize("address", ["10.0.0.7:9000", "worker-0.pool:1", "[fd00::7]:65535"])
def test_an_address_for_others_is_taken_as_it_is(address: str) -> None:
    assert ServiceConfig(advertise_address=address).advertise_address == address
    assert WorkerConfig(advertise_data_address=address).advertise_data_address == address


@pytest.mark.parametrize(
    "address", ["worker-0", "9000", ":9000", "[]:9000", "host:", "host:0", "host:65536", "host:1e3", "fd00::7:9000"]
)
def test_an_address_that_nobody_could_reach_is_refused_by_its_flag(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--advertise-address is .*; it must be host:port"):
        ServiceConfig(advertise_address=address)
    with pytest.raises(ConfigError, match=r"--advertise-data-address is .*; it must be host:port"):
        WorkerConfig(advertise_data_address=address)


def test_the_help_shows_the_environment_by_an_option_of_the_command() -> None:
    assert "PDSERVE_NUM_PAGES=4;" in build_parser("p", "", {"": Config}).format_help()
    assert "PDSERVE_LOG_LEVEL=debug;" in build_parser("p", "", {"": ServiceConfig}).format_help()


WORKER = {"Worker": WorkerConfig, "Engine": EngineConfig}


@pytest.mark.parametrize(
    ("role", "told"),
    [
        ("prefill", ["--kv-convert-dtype", "--pull-idle-s"]),
        ("decode", ["--data-port", "--max-unreserved-fraction"]),
        ("mixed", ["--data-port", "--kv-convert-dtype", "--pull-idle-s", "--max-unreserved-fraction"]),
    ],
)
def test_flags_of_another_role_are_told(role: str, told: list[str]) -> None:
    argv = ["--data-port", "0", "--pull-idle-s=3", "--no-kv-convert-dtype", "--max-unreserved-fraction=1"]
    assert without_effect(role, WORKER, [*argv, "--kv-integrity", "host", "--num-pages=4"]) == told
    assert without_effect(role, WORKER, ["--worker-id", "pull_idle_s"]) == []


def test_the_roles_of_options_are_those_of_workers() -> None:
    named = {role for cls in WORKER.values() for f in fields(cls) for role in f.metadata["roles"]}
    assert named == {Role.PREFILL, Role.DECODE}
    assert "decode: a pull that receives nothing" in build_parser("p", "", WORKER).format_help()
