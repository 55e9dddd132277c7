"""A sidecar for all tests that leave it as they found it, and private ones to break."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# Test modules share the harness by its plain name.
sys.path.insert(0, str(Path(__file__).parent))

from manager_harness import Engine, Sidecar, running, wait_for


@pytest.fixture(scope="session")
def shared_sidecar() -> Iterator[Sidecar]:
    path = Path(tempfile.mkdtemp(prefix="memshare-", dir="/tmp"))
    with running(path / "run", hello_seconds=1) as sidecar:
        yield sidecar
    shutil.rmtree(path)


@pytest.fixture
def sidecar(shared_sidecar: Sidecar) -> Iterator[Sidecar]:
    """A running sidecar; the test must leave all rows free."""
    yield shared_sidecar
    wait_for(shared_sidecar.all_free, "all rows to be free after the test")
    shared_sidecar.check()


@pytest.fixture
def engine(sidecar: Sidecar) -> Iterator[Engine]:
    engine = Engine(sidecar)
    yield engine
    engine.vanish()


@pytest.fixture
def fresh(runtime_dir: Path) -> Iterator[Callable[..., Sidecar]]:
    """Starts private sidecars that a test may break."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(runtime_dir / "run", **settings))
