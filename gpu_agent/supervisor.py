"""Keeps one worker process running over the pool."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from typing import Final

import structlog

from memshare.gpu_agent.config import AgentSettings, pulse_seconds
from memshare.gpu_agent.pool import HostPool

_FIRST_DELAY: Final = 0.1
_LAST_DELAY: Final = 5.0
# A worker that lived this long died of something new.
_STABLE_SECONDS: Final = 30.0
# Beyond the worker's own bound, for its exit.
_STOP_MARGIN: Final = 1.0
# For a worker's start, up to its first sign of life.
_START_SECONDS: Final = 60.0

log = structlog.get_logger()


async def keep_worker(pool: HostPool, settings: AgentSettings) -> None:
    """Start the worker, and start it again with growing delays when it ends.

    Runs until cancelled; then the worker is stopped, at last by SIGKILL, before this returns.
    """
    delay = _FIRST_DELAY
    while True:
        started = time.monotonic()
        pulse, sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            try:
                worker = await _start(pool, settings, sender)
            finally:
                os.close(sender)
            watch = asyncio.create_task(_kill_when_silent(worker, pulse, settings.worker_timeout))
            try:
                code = await worker.wait()
            except asyncio.CancelledError:
                await _stop(worker, settings.stop_timeout + _STOP_MARGIN)
                raise
            finally:
                watch.cancel()
        finally:
            os.close(pulse)
        if time.monotonic() - started > _STABLE_SECONDS:
            delay = _FIRST_DELAY
        log.error("the worker ended, starting it again", pid=worker.pid, code=code, delay=delay)
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LAST_DELAY)


async def _kill_when_silent(worker: asyncio.subprocess.Process, pulse: int, timeout: float) -> None:
    """Kill a worker of which nothing was heard for `timeout` seconds; never if that is 0."""
    if not timeout:
        return
    pause = pulse_seconds(timeout)
    # Its first sign comes once its imports are done.
    left = max(timeout, _START_SECONDS)
    while left > 0:
        # Counted in rounds, so that a time in which this process stood still is nobody's silence.
        await asyncio.sleep(pause)
        left = timeout if _heard(pulse) else left - pause
    log.error("the worker gives no sign of life, killing it", pid=worker.pid, seconds=timeout)
    with suppress(ProcessLookupError):
        worker.kill()


def _heard(pulse: int) -> bool:
    try:
        return os.read(pulse, 4096) != b""
    except BlockingIOError:
        return False


async def _start(
    pool: HostPool, settings: AgentSettings, sender: int
) -> asyncio.subprocess.Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "memshare.gpu_agent.worker",
        f"--pool-descriptor={pool.descriptor}",
        f"--pool-id={pool.pool_id.hex()}",
        f"--owner-pid={os.getpid()}",
        f"--pulse-descriptor={sender}",
        f"--settings={settings.model_dump_json()}",
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(pool.descriptor, sender),
        # An interrupt from the terminal goes to the owner, which stops the worker in order.
        process_group=0,
    )
    log.info("started the worker", pid=worker.pid)
    return worker


async def _stop(worker: asyncio.subprocess.Process, timeout: float) -> None:
    if worker.returncode is None:
        worker.terminate()
    try:
        await asyncio.wait_for(worker.wait(), timeout)
    except TimeoutError:
        log.warning("the worker does not stop, killing it", pid=worker.pid)
        worker.kill()
        await worker.wait()
