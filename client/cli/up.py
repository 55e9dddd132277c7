"""`memshare up`: the whole sidecar of this host, with what it finds and no configuration."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from memshare.client.cli import output
from memshare.client.cli.host import available_memory, default_pool_bytes
from memshare.client.cli.options import (
    ConfigOption,
    JsonOption,
    LogLevelOption,
    PolicyOption,
    PoolBytesOption,
    RuntimeOption,
    chosen,
)
from memshare.client.cli.processes import SidecarFailed
from memshare.client.cli.settings import agent_settings, manager_settings
from memshare.client.cli.sidecar import START_TIMEOUT, Sidecar
from memshare.client.cli.units import format_bytes
from memshare.wire.runtime import RuntimeDirectory

_WATCH_INTERVAL: Final = 0.2
# A manager that dies at once, time after time, will not do better the next time.
_MAX_QUICK_DEATHS: Final = 5
_QUICK: Final = 10.0


class _Stopped(BaseException):
    """A signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name


def up(
    pool_bytes: PoolBytesOption = None,
    policy: PolicyOption = None,
    runtime_dir: RuntimeOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = "warning",
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until all must be ready.")
    ] = START_TIMEOUT,
    json: JsonOption = False,
) -> None:
    """Run an agent and a manager on this host until Ctrl-C or SIGTERM.

    The pool is a quarter of the memory available, at most 2 GiB, unless told otherwise. With
    --json the document is printed once the sidecar is ready.
    """
    runtime = chosen(runtime_dir)
    size = _pool_size(pool_bytes, policy, config, runtime)
    sidecar = Sidecar(runtime, pool_bytes=size, policy=policy, config=config, log_level=log_level)
    output.say(f"starting in {runtime.path}, pool of {format_bytes(size)} in host memory")
    with _stopping(sidecar):
        sidecar.start(start_timeout)
        _announce(sidecar, json)
        _watch(sidecar)


def _pool_size(
    flag: int | None, policy: str | None, config: Path | None, runtime: RuntimeDirectory
) -> int:
    """The pool's size as told by flag, variable or file, else what this host can give.

    Reads all settings, so that a wrong one is refused before anything starts.
    """
    manager_settings(config, policy=policy, runtime_dir=runtime.path)
    settings = agent_settings(config, pool_bytes=flag, runtime_dir=runtime.path)
    if "pool_bytes" in settings.model_fields_set:
        return int(settings.pool_bytes)
    return default_pool_bytes(available_memory())


@contextmanager
def _stopping(sidecar: Sidecar) -> Iterator[None]:
    """Stop the sidecar at the end of the block, which a signal ends early."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    def kill(number: int, frame: FrameType | None) -> None:
        sidecar.kill_manager()
        sidecar.kill_agent()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    except _Stopped as stopped:
        output.say(f"{stopped.name}: stopping; once more to kill")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, kill)
        killed = sidecar.stop()
        if killed:
            output.say(f"killed, since it did not stop in time: {', '.join(killed)}")
        output.say("stopped")


def _announce(sidecar: Sidecar, json: bool) -> None:
    with sidecar.admin() as admin:
        status, policy = admin.status(), admin.policy().policy
    if json:
        output.print_json(
            {
                "ready": True,
                "runtime_dir": str(sidecar.runtime.path),
                "status": output.to_document(status),
                "policy": output.to_document(policy),
            }
        )
    output.say(
        f"ready: pool of {format_bytes(status.pool.pool_bytes)}, policy {policy.name}; engines "
        f"find it with MEMSHARE_RUNTIME_DIR={sidecar.runtime.path}; Ctrl-C stops it"
    )


def _watch(sidecar: Sidecar) -> None:
    """Restart a manager that dies. Raises `SidecarFailed` when the memory owner does."""
    quick_deaths, started = 0, time.monotonic()
    while True:
        time.sleep(_WATCH_INTERVAL)
        if sidecar.agent is not None and (ending := sidecar.agent.ended()):
            # The pool is gone with it, so nothing is left to serve.
            raise SidecarFailed(
                f"the agent ended with {ending} and its memory is gone: engines go on without "
                "sharing; start `memshare up` again"
            )
        if sidecar.manager is None or not (ending := sidecar.manager.ended()):
            continue
        quick_deaths = quick_deaths + 1 if time.monotonic() - started < _QUICK else 1
        if quick_deaths > _MAX_QUICK_DEATHS:
            raise SidecarFailed(
                f"the manager ended with {ending}, {quick_deaths} times in a row: see its log above"
            )
        output.say(f"the manager ended with {ending}: starting it again")
        started = time.monotonic()
        try:
            sidecar.start_manager()
        except SidecarFailed as error:
            # Engines decode without a manager, so the memory is kept and the next round decides.
            output.say(str(error))
        else:
            output.say("the manager is back; engines attach again by themselves")
