"""The manager's process: sockets, services, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from memshare.manager.admin_service import AdminService
from memshare.manager.agent_link import MAX_MESSAGE_BYTES
from memshare.manager.config import ManagerSettings
from memshare.manager.manager import Manager
from memshare.manager.service import ManagerService
from memshare.v1 import admin_pb2, admin_pb2_grpc, manager_pb2, manager_pb2_grpc
from memshare.wire.errors import MemshareError
from memshare.wire.logs import configure_logging
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.sockets import claimed_path
from memshare.wire.version import VERSION

_SERVICES: Final = (
    manager_pb2.DESCRIPTOR.services_by_name["ManagerService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
_HEALTH_SECONDS: Final = 0.1
_log = structlog.get_logger("memshare.manager")


def run_manager(settings: ManagerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code."""
    configure_logging(settings.log_format, settings.log_level)
    try:
        asyncio.run(serve(settings))
    except MemshareError as error:
        _log.error("manager cannot run", reason=error.reason, error=str(error))
        return 1
    return 0


async def serve(settings: ManagerSettings, stop: asyncio.Event | None = None) -> None:
    """Serve on the runtime directory's socket until a signal comes or `stop` is set.

    Raises `SocketInUse` if another manager serves there, `InvalidArgument` for a directory that
    others may write to.
    """
    runtime = RuntimeDirectory(settings.runtime_dir)
    runtime.create()
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    with claimed_path(runtime.manager_socket) as swept:
        if swept:
            _log.warning("left-over socket removed", path=str(runtime.manager_socket))
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may handle signals; elsewhere `stop` is the way.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, stop.set)
        await _serve(settings, runtime.manager_socket, stop)


async def _serve(settings: ManagerSettings, socket: Path, stop: asyncio.Event) -> None:
    manager = Manager(settings)
    server = grpc.aio.server(options=_OPTIONS)
    manager_pb2_grpc.add_ManagerServiceServicer_to_server(ManagerService(manager), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(manager), server)
    health_service = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    with _private_files():
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
    os.chmod(socket, 0o660)
    _log.info("manager serves", socket=str(socket), version=VERSION, pid=os.getpid())
    link = asyncio.create_task(manager.link.run())
    watch = asyncio.create_task(_follow_health(manager, health_service))
    try:
        await stop.wait()
        _log.info("draining", sessions=len(manager.engines))
        manager.drain("the manager is stopping")
        await _set_health(health_service, serving=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds):
                while manager.engines:
                    await asyncio.sleep(0.02)
    finally:
        manager.draining = True
        watch.cancel()
        await server.stop(0.2)
        link.cancel()
        await asyncio.gather(link, watch, return_exceptions=True)
        _log.info("manager stopped")


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Files made in the block are for user and group alone, from their first moment."""
    before = os.umask(0o117)
    try:
        yield
    finally:
        os.umask(before)


async def _follow_health(manager: Manager, service: HealthServicer) -> None:
    known: bool | None = None
    while True:
        serving = manager.link.pool is not None and not manager.draining
        if serving != known:
            known = serving
            await _set_health(service, serving=serving)
        await asyncio.sleep(_HEALTH_SECONDS)


async def _set_health(service: HealthServicer, *, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.ServingStatus
    for name in ("", *_SERVICES):
        await service.set(name, status.Value("SERVING" if serving else "NOT_SERVING"))
