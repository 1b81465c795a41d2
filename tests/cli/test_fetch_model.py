"""`pdserve fetch-model` of a directory: what is whole is printed, what is damaged is named."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.cli import __main__ as cli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of two shards with a tensor each; no weights that anybody could serve."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    shards = {"a": "1.safetensors", "b": "2.safetensors"}
    for tensor, shard in shards.items():
        header = json.dumps({tensor: {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}).encode()
        (tmp_path / shard).write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"c"'))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / "config.json").write_text("{ bad"), "config.json cannot be read: "),
        (lambda d: (d / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda d: _shorten(d / "2.safetensors"), "2.safetensors: its tensors end at byte "),
        (lambda d: (d / "1.safetensors").write_bytes(b"\xff" * 8), "1.safetensors: its header is longer than the file"),
        (lambda d: (d / "1.safetensors").write_bytes(b""), "1.safetensors: "),
        (lambda d: (d / "1.safetensors").write_bytes((d / "2.safetensors").read_bytes()), "b is also in another file"),
        (
            lambda d: (d / "2.safetensors").unlink(),
            "lacks 1 of the 2 files of weights that it names, such as 2.",
        ),
        (lambda d: _rename_tensor(d / "2.safetensors"), "lacks 1 weights, such as b, which should be in 2.safetensors"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    ],
)
def test_a_damaged_directory_is_1_with_the_reason(
    model: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(model)
    assert cli.main(["fetch-model", "--model", str(model)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.endswith(" (CORRUPT_MODEL)\n")


def test_files_that_are_not_read_need_not_be_whole(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "consolidated.safetensors").write_bytes((model / "1.safetensors").read_bytes())
    assert cli.main(["fetch-model", "--model", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"


def test_a_whole_directory_is_printed_and_no_torch_is_loaded(model: Path) -> None:
    code = (
        "import sys; from pdserve.cli.__main__ import main\n"
        f"sys.exit(main(['fetch-model', '--model', {str(model)!r}]) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{model}\n"), done.stderr
