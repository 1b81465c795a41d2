"""Each test of this folder runs on some prompts in `make test` and on all of them in `make test-slow`."""

from __future__ import annotations

import pytest

from tests.parity.reference import Reference, references, some_references


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def expected(request: pytest.FixtureRequest) -> list[Reference]:
    """What transformers gives for the prompts."""
    return references() if request.param == "all" else some_references()
