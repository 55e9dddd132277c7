"""The worker process: signatures, search, verification, copies. It may crash; the pool stays.

The owner starts it with the pool's descriptor open. It holds nothing that cannot be rebuilt.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from memshare.gpu_agent.config import AgentSettings, pulse_seconds
from memshare.gpu_agent.operations import AgentOperations
from memshare.gpu_agent.pool import HostPool
from memshare.gpu_agent.search import SEARCHES
from memshare.gpu_agent.service import AgentServicer
from memshare.gpu_agent.sessions import Sessions
from memshare.gpu_agent.warmup import warm_up
from memshare.kernels import get_block_kernels, get_kernels
from memshare.v1 import agent_pb2, agent_pb2_grpc
from memshare.wire.errors import MemshareError
from memshare.wire.logs import configure_logging
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.sockets import claimed_path

MAX_MESSAGE_BYTES: Final = 64 << 20
SERVICE: Final = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
_PR_SET_PDEATHSIG: Final = 1
_FLUSH_SECONDS: Final = 0.2

# grpc-stubs knows nothing of the asynchronous servicer.
_Health = Any

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve AgentService until SIGTERM or the owner's end; the exit status of the process."""
    parser = argparse.ArgumentParser(prog="memshare.gpu_agent.worker")
    parser.add_argument("--pool-descriptor", type=int, required=True)
    parser.add_argument("--pool-id", type=bytes.fromhex, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--pulse-descriptor", type=int, required=True)
    parser.add_argument("--settings", type=AgentSettings.model_validate_json, required=True)
    options = parser.parse_args(arguments)
    settings: AgentSettings = options.settings
    configure_logging(settings.log_format, settings.log_level, process="worker")
    _die_with(options.owner_pid)
    try:
        pool = HostPool.attach(options.pool_descriptor, options.pool_id)
        asyncio.run(_serve(pool, settings, options.pulse_descriptor))
    except (MemshareError, OSError, ValueError, ImportError) as error:
        log.error("the worker cannot run", error=str(error))
        return 1
    except Exception:
        log.exception("the worker cannot run")
        return 1
    return 0


async def _serve(pool: HostPool, settings: AgentSettings, pulse: int) -> None:
    loop = asyncio.get_running_loop()
    beating = asyncio.create_task(_beat(pulse, settings.worker_timeout))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    kernels = get_kernels(settings.kernels)
    search = SEARCHES[settings.search](kernels)
    # Zero stands for no epoch at all.
    epoch = secrets.randbelow((1 << 64) - 1) + 1
    executor = ThreadPoolExecutor(settings.threads, thread_name_prefix="call")
    block_kernels = get_block_kernels(settings.kernels)
    sessions = Sessions(pool, kernels, block_kernels)
    operations = AgentOperations(sessions, search, epoch, settings.weigh_heads)
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        )
    )
    servicer = AgentServicer(operations, executor)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)
    health_service: _Health = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    path = RuntimeDirectory(settings.runtime_dir).worker_socket
    with claimed_path(path) as swept:
        if swept:
            log.warning("swept the socket of a worker that died", path=str(path))
        # Nobody reaches a worker that would have to compile first.
        warming = loop.run_in_executor(executor, warm_up, kernels, block_kernels)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((warming, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await warming
            await _set_health(health_service, health_pb2.HealthCheckResponse.SERVING)
            _bind(server, path)
            await server.start()
            log.info("ready", epoch=epoch, kernels=settings.kernels, search=settings.search)
            await stopped
            await _set_health(health_service, health_pb2.HealthCheckResponse.NOT_SERVING)
            await servicer.drain(settings.stop_timeout)
            # What is left are answers on their way and health watches, which would never end.
            await server.stop(_FLUSH_SECONDS)
    beating.cancel()
    # Not joined: a call that outlasts the stop must not outlast the process.
    executor.shutdown(wait=False, cancel_futures=True)
    log.info("stopped")
    sys.stderr.flush()
    os._exit(0)


async def _beat(pulse: int, timeout: float) -> None:
    """Tell the owner that calls are still answered here: by this loop, as this is."""
    while timeout:
        # Full when the owner stands still, broken when it ends.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(pulse, b"\0")
        await asyncio.sleep(pulse_seconds(timeout))


async def _set_health(service: _Health, status: int) -> None:
    for name in ("", SERVICE):
        await service.set(name, status)


def _bind(server: grpc.aio.Server, path: Path) -> None:
    # For this user alone: the calls write to any row. By the mask, because a chmod after bind
    # would leave a moment in which others may connect.
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"cannot listen at {path}: {error}") from None
    finally:
        os.umask(mask)


def _die_with(owner: int) -> None:
    """Have the kernel kill this process when its owner ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        log.warning("cannot be tied to the owner", error=os.strerror(ctypes.get_errno()))
    # The owner may have ended before the call.
    if os.getppid() != owner:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
