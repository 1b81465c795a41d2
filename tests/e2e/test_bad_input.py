"""Bad input of every kind: the right status, a message that says what to do, and the server well afterwards."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pdserve.cli.processes import service_command
from pdserve.client import Client
from pdserve.client.errors import InvalidRequest, NotFound, Overloaded, PdserveError, Unimplemented
from pdserve.engine.model_store import BUILT_IN_MODEL, resolve_model
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from tests.support.deployment import Deployment, deploy
from tests.support.redis_server import redis_server

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("bad-input")
    with deploy(directory, "fake", flags=["--max-model-len", str(MAX_MODEL_LEN)]) as running:
        yield running


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Client]:
    with deployment.client() as c:
        yield c


BAD_REQUESTS = [
    ("empty text", {"prompt": ""}, InvalidRequest, "prompt"),
    ("empty ids", {"prompt_token_ids": []}, InvalidRequest, "prompt"),
    ("too long", {"prompt_token_ids": [5] * MAX_MODEL_LEN}, InvalidRequest, str(MAX_MODEL_LEN)),
    ("max_tokens 0", {"max_tokens": 0}, InvalidRequest, "max_tokens"),
    ("max_tokens negative", {"max_tokens": -3}, InvalidRequest, "max_tokens"),
    ("max_tokens beyond the context", {"max_tokens": MAX_MODEL_LEN}, InvalidRequest, "max_tokens"),
    ("temperature negative", {"temperature": -1.0}, InvalidRequest, "temperature"),
    ("temperature NaN", {"temperature": math.nan}, InvalidRequest, "temperature"),
    ("temperature infinite", {"temperature": math.inf}, InvalidRequest, "temperature"),
    ("top_p 0", {"top_p": 0.0}, InvalidRequest, "top_p"),
    ("min_p 2", {"min_p": 2.0}, InvalidRequest, "min_p"),
    ("logprobs 1000", {"logprobs": 1000}, InvalidRequest, "logprobs"),
    ("empty stop string", {"stop": [""]}, InvalidRequest, "stop"),
    ("token id out of range", {"prompt_token_ids": [10**9]}, InvalidRequest, "1000000000"),
    ("unknown model", {"model": "no-such-model"}, NotFound, "test-model"),
    ("bad request id", {"request_id": "a b"}, InvalidRequest, "request_id"),
    ("n 17", {"n": 17}, InvalidRequest, "n"),
    ("presence_penalty", {"presence_penalty": 0.5}, Unimplemented, "presence_penalty"),
    ("frequency_penalty", {"frequency_penalty": 0.5}, Unimplemented, "frequency_penalty"),
    ("repetition_penalty", {"repetition_penalty": 1.5}, Unimplemented, "repetition_penalty"),
    ("min_tokens beyond max_tokens", {"min_tokens": 5}, InvalidRequest, "min_tokens"),
    ("logit_bias", {"logit_bias": {3: 1.0}}, Unimplemented, "logit_bias"),
    ("logit_bias out of range", {"logit_bias": {10**6: 1.0}}, InvalidRequest, "logit_bias"),
    ("allowed_token_ids out of range", {"allowed_token_ids": [10**6]}, InvalidRequest, "allowed_token_ids"),
    ("presence_penalty 3", {"presence_penalty": 3}, InvalidRequest, "presence_penalty"),
    ("frequency_penalty -3", {"frequency_penalty": -3}, InvalidRequest, "frequency_penalty"),
    ("repetition_penalty 0", {"repetition_penalty": 0}, InvalidRequest, "repetition_penalty"),
    ("blank bad word", {"bad_words": [" "]}, InvalidRequest, "bad_words"),
    ("bad_words", {"bad_words": ["x"]}, Unimplemented, "bad_words"),
    ("prompt_logprobs 21", {"prompt_logprobs": 21}, InvalidRequest, "prompt_logprobs"),
    ("structured_outputs", {"structured_outputs": {"json_object": True}}, Unimplemented, "structured_outputs"),
    ("priority on workers without the policy", {"priority": 5}, InvalidRequest, "--scheduling-policy priority"),
    ("priority 101", {"priority": 101}, InvalidRequest, "priority"),
    ("cache_salt too long", {"cache_salt": "s" * 129}, InvalidRequest, "cache_salt"),
]


@pytest.mark.parametrize(("options", "error", "word"), [b[1:] for b in BAD_REQUESTS], ids=[b[0] for b in BAD_REQUESTS])
def test_refused_with_status_and_name(client: Client, options: dict, error: type[PdserveError], word: str) -> None:
    options = dict(options)
    if "prompt" not in options and "prompt_token_ids" not in options:
        options["prompt_token_ids"] = [1, 2, 3]
    options.setdefault("max_tokens", 4)
    with pytest.raises(error) as caught:
        client.generate(**options)
    assert word in caught.value.message
    assert caught.value.reason
    assert len(client.generate(prompt_token_ids=[1, 2, 3], max_tokens=4).token_ids) == 4


def test_no_prompt_at_all(deployment: Deployment) -> None:
    with grpc.insecure_channel(deployment.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(inference_pb2.GenerateRequest(), timeout=10))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in caught.value.details()


def test_bytes_that_are_no_message(deployment: Deployment, client: Client) -> None:
    """Invalid UTF-8 in a string field: gRPC cannot decode the message, and says so."""
    bad = b"\x1a\x02\xff\xfe"  # field 3 (text), two bytes that are no UTF-8
    with grpc.insecure_channel(deployment.address) as channel:
        call = channel.unary_stream("/pdserve.v1.Inference/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(bad, timeout=10))
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    assert client.generate(prompt_token_ids=[1, 2, 3], max_tokens=2).token_ids


def test_message_over_the_limit(deployment: Deployment, client: Client) -> None:
    with pytest.raises(Overloaded) as caught:
        client.generate("x" * (17 << 20), max_tokens=2)
    assert "16777216" in caught.value.message or "limit" in caught.value.message.lower()
    assert client.generate(prompt_token_ids=[1, 2, 3], max_tokens=2).token_ids


def test_unknown_request(client: Client) -> None:
    with pytest.raises(NotFound):
        client.get_request("never-seen")
    assert client.cancel("never-seen") is False
    assert client.delete_request("never-seen") is False


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = service_command(words[0], *words[1:])
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


SERVICES = ("router", "prefill", "decode")


@pytest.mark.parametrize("service", SERVICES)
def test_unknown_flag(service: str) -> None:
    done = run(service, "--max-num-sequences", "3")
    assert done.returncode == 2
    assert "--max-num-sequences" in done.stderr
    assert "Traceback" not in done.stderr


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, last


@pytest.mark.parametrize("service", SERVICES)
def test_no_redis(service: str) -> None:
    fake = ["--model", "fake"] + ([] if service == "router" else ["--runner", "fake"])
    assert_one_clear_line(run(service, *fake, "--redis-url", "redis://127.0.0.1:1/0"), "127.0.0.1:1", "redis")


@pytest.mark.parametrize("service", SERVICES)
def test_port_in_use(service: str, deployment: Deployment) -> None:
    port = deployment.address.rsplit(":", 1)[1]
    fake = ["--model", "fake"] + ([] if service == "router" else ["--runner", "fake"])
    with redis_server() as url:
        assert_one_clear_line(run(service, *fake, "--port", port, "--redis-url", url), port, "in use")


@pytest.mark.parametrize("service", SERVICES)
def test_wrong_model_directory(service: str, tmp_path: Path) -> None:
    with redis_server() as url:
        assert_one_clear_line(run(service, "--model", str(tmp_path), "--redis-url", url), str(tmp_path))


@pytest.mark.parametrize("service", SERVICES)
def test_missing_model_directory(service: str) -> None:
    with redis_server() as url:
        assert_one_clear_line(run(service, "--model", "/no/such/model", "--redis-url", url), "/no/such/model")


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_corrupt_model_file(service: str, tmp_path: Path) -> None:
    """The weights are cut short, as by a full disk: the worker names the file and does not start."""
    for file in resolve_model(BUILT_IN_MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = tmp_path / "model.safetensors"
    with weights.open("rb") as whole:
        head = whole.read(100_000)
    weights.unlink()
    weights.write_bytes(head)
    with redis_server() as url:
        assert_one_clear_line(run(service, "--model", str(tmp_path), "--redis-url", url), "model.safetensors")


def test_workers_of_different_models(tmp_path: Path) -> None:
    """A worker with another identity is shown as incompatible and never paired; the others go on serving."""
    with deploy(tmp_path, "fake") as running, running.client() as client:
        running.start_worker("decode-odd", "--served-model-name", "other").wait_ready(60)
        from tests.support.deployment import wait_until

        def states() -> dict[str, str]:
            return {w.worker_id: w.state for m in client.models() for w in m.workers}

        wait_until(lambda: "incompatible" in states().get("decode-odd", ""), 20, "the odd worker to be refused")
        assert "other" in states()["decode-odd"]
        for _ in range(8):
            assert len(client.generate(prompt_token_ids=[1, 2, 3], max_tokens=3).token_ids) == 3
