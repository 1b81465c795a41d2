"""`pdserve bench peers`: the flags, whole rounds over peers made for the test, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.bench import peers, peers_env, peers_prepare, peers_systems
from pdserve.bench.peers_args import PeersConfig, chosen_suites
from pdserve.bench.peers_clients import Endpoint
from pdserve.bench.peers_limits import Limits
from pdserve.bench.peers_measure import Conditions, Level, items, lengths, run_system, summarize
from pdserve.bench.peers_process import Command, Processes, SystemFailed
from pdserve.bench.peers_systems import Launch, Place, System, free_port, systems
from pdserve.cli import __main__ as cli
from pdserve.core.errors import ConfigError
from tests.bench.test_serve import outcome

SERVER = str(Path(__file__).with_name("peer_server.py"))
CORES = tuple(sorted(os.sched_getaffinity(0)))


def fake(name: str, fault: str = "", **more: Any) -> System:
    def launch(place: Place) -> Launch:
        port = free_port()
        argv = (sys.executable, "-S", SERVER, str(port), fault)
        return Launch(
            commands=(Command(name=name, argv=argv, cores=place.cores),), endpoint=Endpoint("openai", (port,))
        )

    return System(name=name, launch=launch, **more)


def place(scratch: Path) -> Place:
    return Place(
        model=scratch,
        gguf={},
        pythons={},
        cores=CORES[:1],
        scratch=scratch,
        cache=scratch,
        max_num_seqs=2,
        max_model_len=1024,
    )


def conditions(*levels: Level) -> Conditions:
    return Conditions(
        levels=levels or (Level(concurrency=2, num_prompts=3),),
        vocab_size=100,
        question=(5, 6, 7),
        seed=0,
        start_timeout_s=30.0,
        load_timeout_s=30.0,
    )


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_lengths_are_those_of_the_comparison() -> None:
    prompts, outputs = lengths(48, 110, 429), lengths(48, 66, 256)
    assert sum(prompts) / 48 == pytest.approx(110, abs=1) and prompts[-1] == 429
    assert sum(outputs) / 48 == pytest.approx(66, abs=1) and outputs[-1] == 256
    one, two = items(12, 50, "0"), items(12, 50, "1")
    assert [(len(i.prompt_token_ids), i.max_tokens) for i in one] == [
        (len(i.prompt_token_ids), i.max_tokens) for i in two
    ]
    assert one != two and max(t for i in one for t in i.prompt_token_ids) < 50 and one == items(12, 50, "0")


def test_the_numbers_of_a_load() -> None:
    found = summarize([outcome(0, (1.0, 2.0), 2.0, 4), outcome(1, (2.0, 2.5, 4.0), 4.0, 4)], cpu_s=2.0)
    assert (found.tokens_per_s, found.tokens_per_cpu_s, found.cores_busy) == (2, 4, 0.5)
    assert found.ttft_p50_ms == 1000 and found.itl_p50_ms == 1000 and found.outputs_per_token == 5 / 8
    assert found.tpot_p50_ms == pytest.approx((1000 / 3 + 2000 / 3) / 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (outcome(0, (1.0,), 1.0, 3), "3 tokens in 1 pieces came where 4 were asked for"),
        (outcome(0, (), 1.0, 4), "0 pieces"),
        (outcome(0, (1.0,), 1.0, 0, "HTTP 500"), "1 of 2 requests failed: HTTP 500"),
    ],
)
def test_a_load_that_is_not_what_was_asked_for_has_no_numbers(wrong: Any, said: str) -> None:
    with pytest.raises(SystemFailed, match=said):
        summarize([outcome(0, (1.0,), 1.0, 4), wrong], 1.0)


def test_a_system_is_measured_and_nothing_of_it_stays(tmp_path: Path) -> None:
    levels = (Level(concurrency=1, num_prompts=2), Level(concurrency=2, num_prompts=3))
    run = run_system(fake("good", "child"), place(tmp_path), conditions(*levels), 0)
    assert run.failure is None and run.answer == " a" * 16 and set(run.levels) == {1, 2}
    assert run.ready_s is not None and run.ready_s > 0 and run.levels[2].tokens_per_s > 0
    assert run.peak_bytes is not None and run.peak_process_bytes is not None
    assert run.peak_bytes > run.peak_process_bytes > 1 << 20, "two processes, the larger one a Python"


@pytest.mark.parametrize(("fault", "said"), [("short", "were asked for"), ("die", "requests failed")])
def test_a_system_that_breaks_is_reported(tmp_path: Path, fault: str, said: str) -> None:
    run = run_system(fake("bad", fault), place(tmp_path), conditions(), 0)
    assert run.failure is not None and said in run.failure and run.levels == {} and run.ready_s is not None


@pytest.mark.parametrize(("proof", "measured"), [("serving", True), ("External Cache Hit!", False)])
def test_a_system_whose_log_lacks_the_proof_has_no_numbers(tmp_path: Path, proof: str, measured: bool) -> None:
    plain = fake("said")
    system = System(name="said", launch=lambda place: replace(plain.launch(place), proof=proof))
    run = run_system(system, place(tmp_path), conditions(), 0)
    assert bool(run.levels) == measured and (run.failure is None) == measured


def test_a_program_that_is_not_there_or_never_ready(tmp_path: Path) -> None:
    gone = Command(name="gone", argv=("no-such-program",), cores=CORES)
    processes = Processes([gone], tmp_path)
    try:
        with pytest.raises(SystemFailed, match=r"(?s)gone ended with status 1.*no-such-program"):
            processes.wait_ready(lambda: False, 30.0)
    finally:
        processes.end()
    slow = Command(name="slow", argv=(sys.executable, "-S", "-c", "import time; time.sleep(600)"), cores=CORES)
    processes = Processes([slow], tmp_path)
    try:
        with pytest.raises(SystemFailed, match="not ready within"):
            processes.wait_ready(lambda: False, 0.2)
    finally:
        processes.end()
    assert alive(processes.pids()) == []


def test_cores_and_environment_are_those_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('PYTHONPATH'), os.environ['X'])"
    argv = (sys.executable, "-S", "-c", code)
    command = Command(name="show", argv=argv, cores=CORES[-1:], env={"X": "1"}, unset=("PYTHONPATH",))
    processes = Processes([command], tmp_path)
    try:
        assert processes.wait_all(30.0) == 0
    finally:
        processes.end()
    assert (tmp_path / "show.log").read_text().strip() == f"[{CORES[-1]}] None 1"


INTERRUPTED = """
import json, pathlib, sys
from pdserve.bench.peers_process import Command, Processes, sigterm_as_interrupt
with sigterm_as_interrupt():
    command = Command(name="peer", argv=(sys.executable, "-S", *sys.argv[2:]), cores=(int(sys.argv[1]),))
    processes = Processes([command], pathlib.Path.cwd())
    try:
        processes.wait_ready(lambda: len(processes.pids()) == 2, 30.0)
        sys.stdout.write(json.dumps(processes.pids()) + chr(10))
        sys.stdout.flush()
        processes.wait_ready(lambda: False, 60.0)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        processes.end()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Not even a child in a session of its own that ignores SIGTERM."""
    words = [sys.executable, "-c", INTERRUPTED, str(CORES[0]), SERVER, str(free_port()), "child"]
    bench = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert bench.stdout is not None
    pids = json.loads(bench.stdout.readline())
    assert len(alive(pids)) == 2
    bench.send_signal(number)
    assert bench.wait(30) == 130 and alive(pids) == []
    bench.stdout.close()


def broken_recipe() -> peers_env.Recipe:
    return peers_env.Recipe(name="broken", requirements=("no-such-package==1",), check="")


def test_an_environment_that_cannot_be_built_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = ("pip", (sys.executable, "-S", "-c", "import sys; sys.exit(open(sys.argv[1]).read())"), 30.0)
    monkeypatch.setattr(
        peers_env, "_steps", lambda recipe, directory, pins: [(fails[0], (*fails[1], str(pins)), fails[2])]
    )
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(SystemFailed, match=r"(?s)pip ended with status 1.*no-such-package==1"):
            peers_env.build(broken_recipe(), tmp_path, CORES, said.append)
    assert len(said) == 2 and not (tmp_path / broken_recipe().key / peers_env.STAMP).exists()


def test_a_whole_environment_is_not_built_again(tmp_path: Path) -> None:
    recipe = broken_recipe()
    (tmp_path / recipe.key).mkdir()
    (tmp_path / recipe.key / peers_env.STAMP).write_text("")
    python = peers_env.build(recipe, tmp_path, CORES, pytest.fail)
    assert python == tmp_path / recipe.key / "bin" / "python"


def test_pins_are_names_and_versions() -> None:
    for recipe in peers_env.recipes(1).values():
        assert recipe.requirements and all(
            line.count("==") == 1 and "/" not in line and "@" not in line for line in recipe.requirements
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command over systems made for the test; gives the report."""
    made = {s.name: s for s in (fake("pdserve-mixed"), fake("vllm", environment="vllm"), fake("slow", slow=True))}
    made["llamacpp-f32"] = fake("llamacpp-f32", environment="llamacpp")
    monkeypatch.setattr(peers, "systems", lambda: made)
    monkeypatch.setattr(peers, "resolve_model", lambda name: tmp_path)
    monkeypatch.setattr(peers, "num_params", lambda model: 1000)
    monkeypatch.setattr(peers, "conditions", lambda config, suite, place: conditions(*suite.levels))
    monkeypatch.setattr(peers, "measure_limits", lambda place: Limits(read_bytes_per_s=1e9, gemm_flops_per_s=1e10))
    monkeypatch.setattr(peers_prepare, "cache_dir", lambda: tmp_path / "cache")

    def build(recipe: peers_env.Recipe, root: Path, cores: object, say: object) -> Path:
        if recipe.name == "llamacpp":
            raise SystemFailed("no compiler")
        return Path(sys.executable)

    monkeypatch.setattr(peers_prepare, "build", build)

    def run(*words: str) -> dict[str, Any]:
        status = cli.main(["bench", "peers", *words, "--json", str(tmp_path / "r.json")])
        return {"status": status, **json.loads((tmp_path / "r.json").read_text())}

    return run


def test_rounds_alternate_and_what_cannot_be_built_is_said(
    bench: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench("--concurrency", "1,2", "--num-prompts", "3", "--num-prompts-alone", "1", "--repeats", "2")
    runs = report["suites"]["peers"]["runs"]
    assert [r["system"] for r in runs] == ["pdserve-mixed", "vllm", "slow", "vllm", "pdserve-mixed"]
    assert report["status"] == 0 and all(set(r["levels"]) == {"1", "2"} for r in runs)
    assert "llamacpp-f32 could not be built: no compiler" in report["notes"]
    assert "peers: slow in the first round only" in report["notes"]
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["at 1: tokens/s, pdserve-mixed / vllm"]["value"] > 0
    assert rows["memory read, measured"]["value"] == 1
    shown = capsys.readouterr().out
    assert "concurrency 2, 3 requests" in shown and "llamacpp-f32 could not be built" in shown


def test_a_suite_ends_when_its_time_is_over(
    bench: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(0, 10**6, 25))  # seconds: every look at the clock costs 25 of them
    monkeypatch.setattr(peers, "now", lambda: float(next(ticks)))
    report = bench("--concurrency", "1", "--num-prompts-alone", "1", "--max-minutes", "5")
    assert len(report["suites"]["peers"]["runs"]) == 3
    assert "peers: 1 of 3 rounds, for --max-minutes is 5" in report["notes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "vlm"], "--peers: unknown vlm; known: all, none, vllm"),
        (["--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["--concurrency", "0"], "at least 1"),
        (["--concurrency", "8,8"], "--concurrency is '8,8'; name each number once"),
        (["--cores", "4096"], "usable are"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--suite", "all"], "--suite is 'all'"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "peers", *words]) == 2
    assert said in capsys.readouterr().err


def test_suites_hold_what_the_flags_ask_for() -> None:
    both = chosen_suites(PeersConfig(suite="both", peers="vllm,llamacpp-q8_0"), systems())
    assert [s.name for s in both[0].systems if s.environment] == ["vllm", "llamacpp-q8_0"]
    assert {s.name for s in both[1].systems} == {"pdserve-pd", "pdserve-mixed", "vllm", "vllm-disaggregated"}
    assert [(x.concurrency, x.num_prompts) for x in both[0].levels] == [(1, 8), (8, 48), (16, 48)]
    alone = chosen_suites(PeersConfig(peers="none"), systems())
    assert [s for s in alone[0].systems if s.environment] == []
    ours = chosen_suites(PeersConfig(peers="none", suite="disaggregation"), systems())
    assert [s.name for s in ours[0].systems] == ["pdserve-pd", "pdserve-mixed"]


def test_systems_get_the_same_limits_and_cores(tmp_path: Path) -> None:
    pythons = dict.fromkeys(("vllm", "llamacpp", "transformers"), Path("python"))
    here = Place(
        model=tmp_path,
        gguf={"F32": tmp_path / "f", "Q8_0": tmp_path / "q"},
        pythons=pythons,
        cores=(0, 1),
        scratch=tmp_path,
        cache=tmp_path,
        max_num_seqs=16,
        max_model_len=1024,
    )
    for system in systems().values():
        (command,) = system.launch(here).commands
        words = " ".join(command.argv)
        assert command.cores == (0, 1), system.name
        assert "transformers" in system.name or "16" in command.argv, system.name
        assert system.environment is None or "PYTHONPATH" in command.unset
        assert "1024" in words or "16384" in words or "transformers" in system.name, system.name
    launch = peers_systems.vllm_disaggregated().launch(here)
    assert [c.cores for c in launch.commands] == [(0,), (1,)] and launch.litter is not None
    assert "ExampleConnector" in " ".join(launch.commands[0].argv)


def test_config_is_refused_as_a_class() -> None:
    with pytest.raises(ConfigError, match="--num-prompts is 0"):
        PeersConfig(num_prompts=0)
