"""SIGKILL and SIGSTOP of workers at work: a clear error within 5 s, no leak on the survivor, a restart serves again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.client.errors import Unavailable
from tests.support.deployment import Deployment, deploy, wait_until

from .planes import PARAMS, plane_flags
from .streams import BackgroundStream, wait_begun

ERROR_WITHIN_S = 5.0


@pytest.fixture(params=PARAMS)
def deployment(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    # Fake steps take their time, so that a death can be placed inside a prefill or a decode.
    flags = ["--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-pages", "512", "--fake-step-ms", "20"]
    slow = {"prefill-0": ["--fake-step-ms", "100"]}
    with deploy(tmp_path, "fake", flags=[*flags, *plane_flags(request.param)], worker_flags=slow) as running:
        yield running


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_killed_worker(deployment: Deployment, victim: str) -> None:
    check_death(deployment, victim, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_worker_whose_native_code_crashed(deployment: Deployment, victim: str) -> None:
    check_death(deployment, victim, signal.SIGSEGV)


def check_death(deployment: Deployment, victim: str, how: signal.Signals) -> None:
    survivor = "decode-0" if victim == "prefill-0" else "prefill-0"
    with deployment.client() as client:
        if victim == "prefill-0":
            streams = [BackgroundStream(client, 2000, 4, seed) for seed in range(3)]
            wait_until(
                lambda: deployment.metric(victim, "pdserve_engine_sequences_running") > 0, 20, "a prefill to run"
            )
        else:
            streams = [BackgroundStream(client, 40, 2000, seed) for seed in range(3)]
            wait_begun(streams, 4)
        killed_s = time.monotonic()
        deployment.kill(victim, how)
        for stream in streams:
            error = stream.end()
            assert isinstance(error, Unavailable), error
            assert victim in error.message
            assert stream.ended_s is not None and stream.ended_s - killed_s < ERROR_WITHIN_S
        wait_until(lambda: deployment.all_pages_free(survivor), 20, f"{survivor} to free its pages")

        survivor_pid = deployment.children[survivor].pid
        deployment.start_worker(victim).wait_ready(60)
        wait_until(lambda: any(m.ready for m in client.models()), 20, "the router to have a route again")
        assert deployment.all_pages_free(victim), "reported before its first step"
        assert len(client.generate(prompt_token_ids=[7] * 40, max_tokens=8, ignore_eos=True).token_ids) == 8
        assert deployment.children[survivor].pid == survivor_pid
        assert deployment.children[survivor].returncode is None
