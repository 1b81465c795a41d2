from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.kernels.configs import MAX_SPLITS, choose_splits, cuda_arch, decode_config, power_of_two, prefill_config

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("find", [decode_config, prefill_config])
def test_every_width_has_a_valid_entry(arch, find) -> None:  # type: ignore[no-untyped-def]
    for num_bytes in (2, 4):
        for dim in (16, 64, 65, 128, 129, 256):
            config = find(arch, dim, num_bytes)
            assert config.block_n >= 16 and config.block_n == power_of_two(config.block_n)
            assert config.block_m >= 16 and config.block_m == power_of_two(config.block_m)
            assert config.min_split_tokens % config.block_n == 0
        with pytest.raises(ConfigError, match="257"):
            find(arch, 257, num_bytes)


@pytest.mark.parametrize("arch", ARCHS)
def test_pages_of_fp8_have_an_entry_for_every_width(arch) -> None:  # type: ignore[no-untyped-def]
    for num_bytes in (2, 4):
        for dim in (16, 64, 65, 128, 129, 256):
            config, plain = (prefill_config(arch, dim, num_bytes, is_fp8_kv=fp8) for fp8 in (True, False))
            assert config.block_n >= 16 and config.block_n == power_of_two(config.block_n)
            assert config.block_n * config.block_m <= plain.block_n * plain.block_m


def test_cuda_capabilities_find_their_table() -> None:
    assert [cuda_arch(major) for major in (8, 9, 10, 12)] == ["sm_80", "sm_90", "sm_100", "sm_80"]
    with pytest.raises(ConfigError, match="7"):
        cuda_arch(7)


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(1, 200_000))
def test_splits_fit_the_length(num_cores: int, num_programs: int, max_tokens: int) -> None:
    splits = choose_splits(num_cores, num_programs, max_tokens, 256)
    assert 1 <= splits <= MAX_SPLITS and splits == power_of_two(splits)
    assert splits == 1 or splits < 2 * -(-max_tokens // 256)


def test_one_long_sequence_fills_the_device_and_a_full_batch_is_not_split() -> None:
    assert choose_splits(132, 8, 32_768, 256) == 64
    assert choose_splits(132, 64 * 8, 1024, 256) == 2
    assert choose_splits(132, 256 * 8, 1024, 256) == 1
    assert choose_splits(132, 256 * 8, 32_768, 256) == 4
