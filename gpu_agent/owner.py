"""The owner process: it holds the pool, hands out its descriptor and keeps a worker running.

It runs no kernels and imports no compiler, so that little can make it crash: the memory, and with
it every engine, lives as long as this process serves.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import structlog

from memshare.gpu_agent.config import AgentSettings
from memshare.gpu_agent.handoff import HandoffServer
from memshare.gpu_agent.pool import HostPool
from memshare.gpu_agent.supervisor import keep_worker
from memshare.wire.errors import MemshareError
from memshare.wire.logs import configure_logging
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.sockets import claimed_path

_BACKLOG: Final = 128
# Descriptors the owner needs besides those of its connections.
_OWN_DESCRIPTORS: Final = 64

log = structlog.get_logger()


def run_agent(settings: AgentSettings) -> int:
    """Own a pool and serve it until SIGTERM or SIGINT; the exit status of the process.

    Ready when the owner's socket accepts connections; the worker is ready when its health service
    says SERVING. Call it from the main thread. Errors at start are logged and give status 1.
    """
    configure_logging(settings.log_format, settings.log_level, process="owner")
    try:
        with ExitStack() as stack:
            directory = RuntimeDirectory(settings.runtime_dir)
            directory.create()
            path = directory.owner_socket
            # Claimed before the pool is allocated: a second agent must not take its memory first.
            if stack.enter_context(claimed_path(path)):
                log.warning("swept the socket of an agent that died", path=str(path))
            pool = HostPool.create(settings.pool_bytes)
            stack.callback(pool.close)
            _allow_descriptors(settings.max_connections + _OWN_DESCRIPTORS)
            listener = stack.enter_context(_listen(path))
            asyncio.run(_serve(listener, pool, settings))
    except MemshareError as error:
        log.error("the agent cannot run", reason=error.reason, error=str(error))
        return 1
    except OSError as error:
        log.error("the agent cannot run", error=str(error))
        return 1
    except KeyboardInterrupt:
        # During the start; once the agent serves, an interrupt is an orderly stop.
        return 128 + signal.SIGINT
    return 0


async def _serve(listener: socket.socket, pool: HostPool, settings: AgentSettings) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = HandoffServer(listener, pool, settings)
    worker = asyncio.create_task(keep_worker(pool, settings))
    ending = asyncio.create_task(stop.wait())
    log.info("ready", pool_bytes=pool.num_bytes, socket=str(settings.runtime_dir / "owner.sock"))
    try:
        await asyncio.wait((worker, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        log.info("stopping")
        server.close()
        worker.cancel()
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await worker


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    # By the mask, because a chmod after bind would leave a moment in which anyone may connect.
    mask = os.umask(0o117)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def _allow_descriptors(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("fewer connections than max_connections fit the descriptor limit", limit=most)
