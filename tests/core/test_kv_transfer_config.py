"""--kv-transfer-config: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.core.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.kv_transfer_config import ON_REQUEST, TRANSPORTS, KvTransferConfig


def test_text_and_file_say_the_same(tmp_path: Path) -> None:
    text = '{"transports": ["tcp"]}'
    path = tmp_path / "transfer.json"
    path.write_text(text)
    assert KvTransferConfig.parse(text) == KvTransferConfig.parse(str(path)) == KvTransferConfig(transports=("tcp",))
    assert KvTransferConfig.parse(None) == KvTransferConfig.parse("{}") == KvTransferConfig(transports=TRANSPORTS)
    assert WorkerConfig(kv_transfer_config=text).kv_transfer.transports == ("tcp",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kv_connector": "x", "transports": ["tcp"]}', "unknown key kv_connector; the keys are transports"),
        ('{"nixl": {"ucx": "tcp"}}', "nixl: unknown key ucx; the keys are ucx_tls, ucx_net_devices"),
        ('{"nixl": {"ucx_tls": 1}}', 'nixl is {"ucx_tls": 1}; it must be an object of texts'),
        ('{"mooncake": {"protocol": "pigeon"}}', "mooncake: protocol is 'pigeon'"),
        ('{"mooncake": {"protocol": "rdma"}}', "mooncake: protocol rdma needs host"),
        ('{"nixl": {"ucx_tls": "rc"}}', "nixl has options, but transports is ['shm', 'tcp']"),
        ('{"max_quarantined_pages": -1}', "max_quarantined_pages is -1"),
        ('{"max_quarantined_pages": true}', "max_quarantined_pages is true"),
        ('{"transports": ["tcp", "pigeon"]}', "transports names 'pigeon'"),
        ('{"transports": []}', "at least one"),
        ('{"transports": ["tcp", "tcp"]}', "each once"),
        ('{"transports": "tcp"}', 'transports is "tcp"; it must be a list'),
        ('{"transports": [1]}', "it must be a list of names"),
        ('{"transports"', "not JSON"),
        ('{"transports": ["tcp"], "transports": ["shm"]}', "a key is there twice"),
        ('{"nixl": ' + '{"a":' * 50_000, "not JSON"),
        ('{"nixl": {"ucx_tls": "tcp\\u0000"}}', "texts that can be printed"),
        ("no-such-file.json", "--kv-transfer-config no-such-file.json"),
        ("tcp", """; e.g. '{"transports": ["tcp"]}'"""),
    ],
)
def test_refusals_name_the_flag_and_the_word(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        WorkerConfig(kv_transfer_config=text)
    assert said in e.value.message and "--kv-transfer-config" in e.value.message


def test_a_one_sided_transport_demands_checksums() -> None:
    text = '{"transports": ["nixl", "tcp"], "nixl": {"ucx_tls": "tcp"}}'
    config = WorkerConfig(kv_transfer_config=text).kv_transfer
    assert config.transports == ("nixl", "tcp") and config.nixl.environment() == {"UCX_TLS": "tcp"}
    with pytest.raises(ConfigError, match="--kv-integrity none: transport nixl"):
        WorkerConfig(kv_transfer_config=text, kv_integrity="none")
    assert not set(TRANSPORTS) & set(ON_REQUEST)


def test_a_file_with_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="one JSON object"):
        KvTransferConfig.parse(str(path))


def test_the_default_is_the_shortest_way_first() -> None:
    assert WorkerConfig().kv_transfer.transports == ("shm", "tcp")
