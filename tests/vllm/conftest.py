"""Tests inside a real vLLM, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from memshare.client.cli.sidecar import Sidecar, running_sidecar

# The fast suite has no vLLM.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

POOL_BYTES = 256 << 20


@pytest.fixture
def pool() -> Iterator[Sidecar]:
    """A sidecar with room for some 180 blocks of the small model."""
    with running_sidecar(pool_bytes=POOL_BYTES) as running:
        yield running
