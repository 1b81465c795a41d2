"""The command line as a newcomer meets it: help, refusals, exit codes, and what it loads."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from pdserve.cli import __main__ as cli
from pdserve.cli import status, up
from pdserve.cli.processes import Child, usable_cores, warnings_of
from pdserve.cli.sample import run_sample
from pdserve.cli.up import UpConfig, threads_of
from pdserve.core.config import load
from pdserve.core.errors import ConfigError, EngineError
from pdserve.core.tls import TlsConfig
from pdserve.engine.config import EngineConfig
from tests.client.scripted import accepted, delta, finished, hello, refuse, serving, silent

NOBODY = "127.0.0.1:1"


def test_help_names_every_command_and_a_first_one_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli.COMMANDS) and "First command to try:\n  pdserve up" in text
    assert cli.main([]) == 2


@pytest.mark.parametrize("words", [["generate"], ["status"], ["fetch-model"], ["bench"], ["bench", "serve"], ["certs"]])
def test_each_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert cli.main([*words, "--help"]) == 0
    except SystemExit as e:  # argparse leaves that way
        assert e.code == 0
    assert "usage: pdserve " + " ".join(words) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generat"], "did you mean 'generate'"),
        (["xyz"], "unknown command 'xyz'"),
        (["bench", "serv"], "did you mean 'serve'"),
        (["generate", "Hi", "--max-token", "3"], "did you mean --max-tokens"),
        (["generate", "Hi", "--max-tokens", "x"], "invalid int value"),
        (["generate", "Hi", "--router", "nowhere"], "not host:port"),
        (["status", "--nonsense"], "Try 'pdserve status --help'"),
        (["prefill", "--batching", "static"], "use pdserve decode --role mixed"),
        (["decode", "--batching", "dynamic"], "--batching is 'dynamic'"),
        (["up", "--batching", "static"], "use --prefill 0 --decode 0 --mixed 1, or pdserve.LLM"),
        (["up", "--swap-space-bytes", "1GB"], "--swap-space-bytes: it is '1GB'; it must be an integer (bytes)"),
        (["decode", "--step-target-ms", "x"], "--step-target-ms: it is 'x'; it must be a finite number (ms)"),
        (["decode", "--step-target-ms", "nan"], "--step-target-ms is nan"),
        (["up", "--prefill", "65"], "--prefill is 65; it must be at most 64 workers"),
        (["prefill", "--require-tls"], "--require-tls needs --tls-cert-file"),
        (["router", "--tls-ca-file", "ca.crt"], "--tls-cert-file, --tls-key-file"),
        (["decode", "--require-tls"], "--require-tls needs --tls-cert-file"),
        (
            ["up", "--tls-cert-file", "/no", "--tls-key-file", "/no", "--tls-ca-file", "/no"],
            "--tls-cert-file /no: No such",
        ),
        (["decode", "--role", "mixed", "--batch-size", "8"], "--batch-size is 8"),
        (["up", "--kv-integrity=none"], "set PDSERVE_KV_INTEGRITY in the environment"),
        (["fetch-model", "org/name"], "did you mean --model org/name?"),
        (["router", "--worker-timeout-s", "1"], "--worker-timeout-s is 1 and --heartbeat-s 1"),
        (["bench", "transfer", "--json", "/no/such/x.json"], "--json /no/such/x.json: there is no directory /no/such"),
        (["bench", "peers", "--json", "/tmp"], "--json /tmp: it is a directory"),
        (["bench", "engine", "interference", "--quick", "--num-decodes", "4"], "--num-decodes is 4"),
    ],
)
def test_a_wrong_command_line_is_2_and_says_what_to_do(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = cli.main(words)
    except SystemExit as e:
        code = e.code
    assert code == 2 and said in capsys.readouterr().err


def test_the_launcher_hands_its_options_on_as_they_are() -> None:
    given = EngineConfig(runner="fake", enable_prefix_caching=False, num_pages=7)
    secured = TlsConfig(tls_cert_file="c", tls_key_file="k", tls_ca_file="a", require_tls=True)
    for config in (given, secured):
        (again,) = load("test", "", {"": type(config)}, up._flags(config), {})
        assert again == config


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--port is taken"), 2, "pdserve status: --port is taken\n"),
        (EngineError("it broke"), 1, "error: it broke (ENGINE_FAILED)\n"),
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError("x", name="redis"), 2, ".venv/bin/pip install -c constraints.txt -e '.[server]'\n"),
    ],
)
def test_failures_are_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(status, "main", fail)
    assert cli.main(["status"]) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == bool(said)


def test_generate_streams_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(hello) as (router, address):
        words = ["generate", "Hi", "--router", address, "--temperature", "0", "--stop", "a", "--stop", "b", "--timings"]
        assert cli.main(words) == 0
        [sent] = router.requests
    out, err = capsys.readouterr()
    assert out == "Hello\n" and "TTFT" in err and "1500.0 ms" in err and "decode" not in err
    assert sent.text == "Hi" and sent.sampling.HasField("temperature") and list(sent.sampling.stop) == ["a", "b"]


def test_generate_asks_for_a_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    with serving(hello) as (router, address):
        assert cli.main(["generate", "Hi", "--router", address, "--json-schema", str(schema)]) == 0
        assert cli.main(["generate", "Hi", "--router", address, "--regex", "a+"]) == 0
        assert [r.sampling.structured_outputs.json for r in router.requests] == ['{"type": "object"}', ""]
        assert router.requests[1].sampling.structured_outputs.regex == "a+"
        assert cli.main(["generate", "Hi", "--router", address, "--grammar", str(schema), "--priority", "-3"]) == 0
        assert router.requests[2].sampling.structured_outputs.grammar and router.requests[2].priority == -3
        assert cli.main(["generate", "Hi", "--router", address, "--choice", "yes", "--choice", "no"]) == 0
        assert list(router.requests[3].sampling.structured_outputs.choice) == ["yes", "no"]
        assert cli.main(["generate", "Hi", "--router", address, "--json-schema", str(tmp_path / "none")]) == 2
    assert "--json-schema" in capsys.readouterr().err


def test_generate_reads_stdin_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    with serving(hello) as (router, address):
        assert cli.main(["generate", "--router", f"{NOBODY},{address}", "--json", "--system", "Be brief"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "Hello" and result["finish_reason"] == "stop" and result["usage"]["completion_tokens"] == 3
    assert [m.content for m in router.requests[-1].chat.messages] == ["Be brief", "from a pipe"]


def test_generate_gives_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    def two(request: Any, context: Any) -> Any:
        yield accepted(request)
        for choice, text in ((1, "beta"), (0, "alpha")):
            event = delta(0, [7], text)
            event.delta.choice = choice
            yield event
        yield finished(2)

    with serving(two) as (router, address):
        assert cli.main(["generate", "Hi", "--router", address, "--n", "2"]) == 0
        assert capsys.readouterr().out == "[0] alpha\n[1] beta\n"
        assert cli.main(["generate", "Hi", "--router", address, "--n", "2", "--json"]) == 0
    assert [c["text"] for c in json.loads(capsys.readouterr().out)["choices"]] == ["alpha", "beta"]
    assert [r.sampling.n for r in router.requests] == [2, 2]


def test_generate_reports_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    def script(request, context):  # type: ignore[no-untyped-def]
        refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "'top_p' is 0; it must be in (0, 1]", "BAD_PARAMETER")
        yield

    with serving(script) as (_, address):
        assert cli.main(["generate", "Hi", "--router", address]) == 1
    assert capsys.readouterr().err == "error: 'top_p' is 0; it must be in (0, 1] (BAD_PARAMETER)\n"


def test_what_ends_an_answer_early_is_told_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(silent) as (_, address):
        assert cli.main(["generate", "Hi", "--router", address, "--timeout-s", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "a\n" and err.startswith("error: no whole answer within timeout_s=1;") and err.count("\n") == 1


def test_ctrl_c_cancels_the_request_and_is_130() -> None:
    with serving(silent) as (router, address):
        command = [sys.executable, "-m", "pdserve.cli", "generate", "Hi", "--router", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read(1) == b"a"
            process.send_signal(2)
            assert process.wait(20) == 130
            assert process.stderr.read() == b""
        assert router.cancels.get(timeout=10) == router.requests[0].request_id


def test_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "router_health", lambda address: "SERVING")
    with serving(hello) as (_, address):
        assert cli.main(["status", "--router", address]) == 0
        table = capsys.readouterr().out
        assert cli.main(["status", "--router", address, "--json"]) == 0
    assert f"router {address}: SERVING" in table and "d0" in table and "model m: ready" in table
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True and report["models"][0]["workers"][0]["worker_id"] == "d0"


def test_status_of_nobody_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--router", NOBODY]) == 1
    out = capsys.readouterr().out
    assert "no answer (UNAVAILABLE)" in out and "UNREACHABLE" in out


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == cores
    for text, expected in (("max 100000", cores), ("9900000 100000", min(cores, 99)), ("20000 100000", 1)):
        quota.write_text(text + "\n")
        assert usable_cores(quota) == expected


def test_workers_of_one_role_divide_the_cores() -> None:
    up = UpConfig(prefill=1, decode=2, mixed=3)
    assert [threads_of(role, up, 8) for role in ("prefill", "decode", "mixed")] == [8, 4, 2]
    assert threads_of("decode", UpConfig(decode=4), 2) == 1


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pdserve.cli.__main__ import main; main(['--help']); main(['nonsense'])\n"
        "print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "transformers", "redis", "grpc", "numpy", "rich"} & set(done.stderr.split())


def test_the_end_of_a_log_is_that_of_this_process(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("of the process before\n")
    child = Child("worker", [sys.executable, "-c", "import sys; sys.stderr.write('why it ended')"], log)
    assert child.wait(60)
    assert child.log_tail() == "    why it ended" and log.read_text().startswith("of the process before")


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["bench", "--help"], ["generate", "--help"], ["bench", "engine", "--help"]]
)
def test_a_reader_that_left_is_no_failure_of_ours(words: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        command = [sys.executable, "-m", "pdserve.cli", *words]
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environ
        )
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


def test_what_children_warned_of_is_told_once(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pdserve.core.log import logging, setup_logging\nsetup_logging('info')\n"
        "logging.getLogger('pdserve.x').info('fine')\nlogging.getLogger('pdserve.x').warning('no %s kernels', 'CPU')\n"
        "sys.stderr.write('a line of nobody\\n')"
    )
    old = "2026-11-30T08:00:00 WARNING pdserve.x of the process before\n"
    children = []
    for name in ("prefill-0", "decode-0"):
        (tmp_path / name).write_text(old)
        children.append(Child(name, [sys.executable, "-c", code], tmp_path / name))
    assert all(child.wait(60) for child in children)
    assert warnings_of(children) == ["prefill-0, decode-0: no CPU kernels"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq = 32", "unknown option max_num_seq; did you mean max_num_seqs?"),
        ("[engine]\nmax-num-seqs = 3", "unknown option engine; write options without sections"),
        ('max-num-seqs = "many"', "max_num_seqs is 'many'; it must be an integer"),
        ('kv-integrity = ["host"]', "kv_integrity is ['host']; it must be text"),
        ("enable-prefix-caching = 7", "enable_prefix_caching is 7; it must be True or False"),
    ],
)
def test_a_wrong_file_is_named_with_what_would_be_right(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    assert cli.main(["decode", "--config", str(path)]) == 2
    assert f"{path}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "flag"), [("prefill", "--pull-idle-s"), pytest.param("decode", "--data-port", marks=pytest.mark.slow)]
)
def test_a_worker_warns_of_flags_of_the_other_role(role: str, flag: str) -> None:
    command = [sys.executable, "-m", "pdserve.cli", role, "--runner=fake", "--redis-url=redis://127.0.0.1:1/0"]
    environ = {**os.environ, "PDSERVE_RESERVE_WAIT_S": "3"}
    done = subprocess.run(
        [*command, "--pull-idle-s=3", "--data-port=0"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"no effect on a {role} worker: {flag}\n" in done.stderr and done.returncode == 2


def test_the_sample_of_a_model_without_a_chat_template_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    def base_model(request: Any, context: Any) -> Any:
        if request.HasField("chat"):
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "no chat template", "NO_CHAT_TEMPLATE")
        yield from hello(request, context)

    with serving(base_model) as (router, address):
        run_sample(Console(), address, "Once upon a time")
    assert router.requests[-1].text == "Once upon a time" and "Hello" in capsys.readouterr().out
