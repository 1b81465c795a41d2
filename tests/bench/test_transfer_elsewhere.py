"""What a library writes on its own does not stand between our lines, and is named where it is wanted."""

from __future__ import annotations

import asyncio
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pdserve.bench import transfer_elsewhere
from pdserve.bench.transfer_elsewhere import Elsewhere, write_errors_to
from pdserve.bench.transfer_methods import Case, Moved
from pdserve.bench.transfer_source import make_pool
from pdserve.core.errors import PdserveError, TransferError


def noisy(connection: Connection, log: str, *_: object) -> None:
    """In place of `serve_method`: a library that writes, whose second transfer fails."""
    write_errors_to(log)
    connection.send(None)
    for answer in (Moved(1.0, 1.0), TransferError("it broke", reason="BARE_FAILED")):
        try:
            connection.recv()
        except EOFError:
            return
        os.write(2, b"I1130 noise\n")
        connection.send(answer)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_noise_goes_to_a_file_that_a_failure_names(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer_elsewhere, "serve_method", noisy)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # the new process imports this module
    pool, case = make_pool(1 << 16, 4), Case(1 << 16, 4, False)

    async def body() -> None:
        method = Elsewhere("mooncake", True, pool, 20.0)
        assert (await method.move(case, 0)).wall_s == 1.0
        if fails:
            with pytest.raises(PdserveError, match=re.escape(str(tmp_path))) as e:
                await method.move(case, 1)
            assert e.value.message.startswith("it broke") and e.value.reason == "BARE_FAILED"
        await method.close()

    asyncio.run(body())
    pool.close()
    logs = [path.read_text() for path in tmp_path.iterdir()]
    assert logs == (["I1130 noise\n" * 2] if fails else [])
    assert "noise" not in capfd.readouterr().err
