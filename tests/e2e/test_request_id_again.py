"""A request_id whose record is gone (deleted, or past its TTL) is a new request on the same, long-lived workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.client import Client, NotFound
from pdserve.engine.fake import FAKE_VOCAB_SIZE, expected_tokens
from tests.support.deployment import Deployment, deploy, wait_until

RECORD_TTL_S = 2


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    flags = ["--num-pages", "256"]
    router_flags = ["--record-ttl-s", str(RECORD_TTL_S)]
    with deploy(tmp_path_factory.mktemp("again"), "fake", ("prefill-0", "decode-0"), flags, router_flags) as running:
        yield running


def check(client: Client, request_id: str, life: int, **options: object) -> None:
    """One life of the id; each asks something else."""
    prompt = [(life * 31 + i) % FAKE_VOCAB_SIZE for i in range(20)]
    result = client.generate(prompt_token_ids=prompt, request_id=request_id, max_tokens=5, temperature=0, **options)  # type: ignore[arg-type]
    expected = expected_tokens(prompt, 5)
    assert list(result.token_ids) == expected[: len(result.token_ids)]
    assert result.finish_reason == "stop" if options else result.token_ids == tuple(expected)


def gone(client: Client, request_id: str) -> bool:
    try:
        client.get_request(request_id)
    except NotFound:
        return True
    return False


def forget(client: Client, request_id: str) -> None:
    """Deletes the record; were we slower than its TTL, it is gone already."""
    client.delete_request(request_id)
    assert gone(client, request_id)


def test_after_delete(deployment: Deployment) -> None:
    with deployment.client() as client:
        for life in range(10):
            check(client, "deleted", life)
            forget(client, "deleted")


def test_at_once_after_an_end_that_the_engine_hears_of_later(deployment: Deployment) -> None:
    """A stop string ends the stream in the output stage: the engine may still hold the sequence when the id is back."""
    with deployment.client() as client:
        for life in range(20):
            check(client, "stopped", life, stop=["t"])
            forget(client, "stopped")


def test_after_the_ttl(deployment: Deployment) -> None:
    with deployment.client() as client:
        for life in range(2):
            check(client, "expired", life)
            wait_until(lambda: gone(client, "expired"), 10 * RECORD_TTL_S, "the record to expire")
