"""Keeps one worker process running over the pool."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Final

import structlog

from memshare.gpu_agent.config import AgentSettings
from memshare.gpu_agent.pool import HostPool

_FIRST_DELAY: Final = 0.1
_LAST_DELAY: Final = 5.0
# A worker that lived this long died of something new.
_STABLE_SECONDS: Final = 30.0
# Beyond the worker's own bound, for its exit.
_STOP_MARGIN: Final = 1.0

log = structlog.get_logger()


async def keep_worker(pool: HostPool, settings: AgentSettings) -> None:
    """Start the worker, and start it again with growing delays when it ends.

    Runs until cancelled; then the worker is stopped, at last by SIGKILL, before this returns.
    """
    delay = _FIRST_DELAY
    while True:
        started = time.monotonic()
        worker = await _start(pool, settings)
        try:
            code = await worker.wait()
        except asyncio.CancelledError:
            await _stop(worker, settings.stop_timeout + _STOP_MARGIN)
            raise
        if time.monotonic() - started > _STABLE_SECONDS:
            delay = _FIRST_DELAY
        log.error("the worker ended, starting it again", pid=worker.pid, code=code, delay=delay)
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LAST_DELAY)


async def _start(pool: HostPool, settings: AgentSettings) -> asyncio.subprocess.Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "memshare.gpu_agent.worker",
        f"--pool-descriptor={pool.descriptor}",
        f"--pool-id={pool.pool_id.hex()}",
        f"--owner-pid={os.getpid()}",
        f"--settings={settings.model_dump_json()}",
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(pool.descriptor,),
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
