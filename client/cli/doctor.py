"""`memshare doctor`: is this host's sidecar sound, and if not, what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Final

import grpc
import typer

from memshare.client.cli import output
from memshare.client.cli.admin import AdminClient
from memshare.client.cli.checks import (
    Finding,
    check_directory,
    check_handoff,
    check_memory,
    check_socket,
    serving_uid,
)
from memshare.client.cli.options import JsonOption, RuntimeOption, chosen
from memshare.client.cli.units import format_percent
from memshare.v1 import admin_pb2, agent_pb2, agent_pb2_grpc
from memshare.wire.errors import AgentUnavailable, MemshareError
from memshare.wire.runtime import RuntimeDirectory
from memshare.wire.status import from_rpc_error
from memshare.wire.version import MAX_PROTOCOL, MIN_PROTOCOL, VERSION

_FULL: Final = 0.95
_MARKS: Final = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}


def doctor(
    engine_uid: Annotated[
        int | None,
        typer.Option(min=0, help="As root: check what an engine of this user would meet."),
    ] = None,
    runtime_dir: RuntimeOption = None,
    json: JsonOption = False,
) -> None:
    """Check the sidecar and say what to do. The exit code is 1 if there is a problem."""
    if engine_uid is not None and os.geteuid() not in (0, engine_uid):
        raise typer.BadParameter(
            f"only root can act as uid {engine_uid}, this is uid {os.geteuid()}",
            param_hint="--engine-uid",
        )
    findings = list(examine(chosen(runtime_dir), engine_uid))
    problems = sum(finding.state == "problem" for finding in findings)
    if json:
        output.print_json({"ok": not problems, "findings": [asdict(f) for f in findings]})
    else:
        rows = [
            (_MARKS[f.state], f.check, f"{f.message}. To do: {f.fix}" if f.fix else f.message)
            for f in findings
        ]
        output.print_table(("", "check", "found"), rows)
        output.say(f"{problems} problem(s)" if problems else "all is well")
    if problems:
        raise typer.Exit(1)


def examine(runtime: RuntimeDirectory, engine_uid: int | None = None) -> Iterator[Finding]:
    """Every check that makes sense, given what the ones before it found."""
    directory = check_directory(runtime, serving_uid(runtime.owner_socket))
    yield directory
    yield check_memory()
    if not runtime.path.exists():
        return
    sockets = {
        path: check_socket(path, owner)
        for path, owner in (
            (runtime.owner_socket, "the memory owner"),
            (runtime.worker_socket, "the agent's worker"),
            (runtime.manager_socket, "the manager"),
        )
    }
    yield from sockets.values()
    if runtime.owner_socket.exists():
        yield check_handoff(runtime, engine_uid)
    worker = manager = None
    if runtime.worker_socket.exists():
        worker, finding = _ask_worker(runtime)
        yield finding
    if runtime.manager_socket.exists():
        manager, findings = _ask_manager(runtime)
        yield from findings
    if worker is not None and manager is not None:
        yield _same_worker(worker, manager)


def _ask_worker(
    runtime: RuntimeDirectory,
) -> tuple[agent_pb2.GetAgentInfoResponse | None, Finding]:
    with grpc.insecure_channel(f"unix:{runtime.worker_socket}") as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        try:
            info = stub.GetAgentInfo(agent_pb2.GetAgentInfoRequest(), timeout=5.0)
        except grpc.RpcError as error:
            cause = from_rpc_error(error, AgentUnavailable)
            return None, Finding(
                "worker",
                "problem",
                f"the agent's worker does not answer: {cause}",
                "engines go on without new sharing; the agent restarts it, see its log",
            )
    if info.version != VERSION:
        return info, _other_version("worker", "the agent", info.version)
    return info, Finding(
        "worker",
        "ok",
        f"version {info.version}, pid {info.worker_pid}, {info.backend}, "
        f"{info.indexed_rows:,} rows indexed",
    )


def _ask_manager(
    runtime: RuntimeDirectory,
) -> tuple[admin_pb2.GetStatusResponse | None, list[Finding]]:
    with AdminClient(runtime) as admin:
        try:
            status = admin.status()
            integrity = admin.check_integrity()
        except MemshareError as error:
            return None, [Finding("manager", "problem", str(error), "see the manager's log")]
    findings = [_manager(status), _agent_state(status), _integrity(integrity)]
    rows = status.rows
    if rows.total and rows.free < (1 - _FULL) * rows.total:
        findings.append(
            Finding(
                "pool",
                "warning",
                f"{format_percent(rows.total - rows.free, rows.total)} of the rows are in use",
                "share more (`memshare policy set`), or start with a larger --pool-bytes",
            )
        )
    return status, findings


def _manager(status: admin_pb2.GetStatusResponse) -> Finding:
    name = "manager"
    if not MIN_PROTOCOL <= status.protocol <= MAX_PROTOCOL:
        return Finding(
            name,
            "problem",
            f"the manager ({status.server_version}) speaks protocol {status.protocol}, this "
            f"command ({VERSION}) speaks {MIN_PROTOCOL} to {MAX_PROTOCOL}",
            "install one release everywhere and restart the older side",
        )
    if status.state == "recovering":
        awaited = ", ".join(str(pid) for pid in status.awaited_pids)
        return Finding(
            name,
            "warning",
            f"waits for engines to come back: pid {awaited or '-'}",
            "wait, or end those processes: their memory is then freed",
        )
    if status.state != "serving":
        return Finding(
            name,
            "problem",
            f"the manager's state is {status.state!r}",
            "see the manager's log, and restart it if it stays so",
        )
    if status.server_version != VERSION:
        return _other_version(name, "the manager", status.server_version)
    return Finding(
        name,
        "ok",
        f"version {status.server_version}, protocol {status.protocol}, "
        f"pid {status.pid}, {status.sessions} engine(s)",
    )


def _agent_state(status: admin_pb2.GetStatusResponse) -> Finding:
    if status.agent_state == "ready":
        restarts = status.worker_restarts
        if restarts:
            return Finding(
                "agent",
                "warning",
                f"its worker was restarted {restarts} time(s)",
                "see the agent's log for what ended it",
            )
        return Finding("agent", "ok", "serves the manager")
    return Finding(
        "agent",
        "problem",
        f"the manager sees the agent as {status.agent_state!r}",
        "see the agent's log; nothing new is shared meanwhile",
    )


def _integrity(answer: admin_pb2.CheckIntegrityResponse) -> Finding:
    if answer.errors:
        return Finding(
            "integrity",
            "problem",
            f"{len(answer.errors)} broken invariant(s): {'; '.join(answer.errors[:3])}",
            "restart the manager, which recounts from its engines, and report this as a bug",
        )
    return Finding("integrity", "ok", f"all counts are right ({answer.rows.total:,} rows)")


def _same_worker(
    worker: agent_pb2.GetAgentInfoResponse, manager: admin_pb2.GetStatusResponse
) -> Finding:
    if worker.pool.pool_id != manager.pool.pool_id:
        return Finding(
            "pool identity",
            "problem",
            "manager and agent hold different pools: the agent was restarted",
            "restart the manager; engines must attach again",
        )
    return Finding("pool identity", "ok", "manager and agent hold the same pool")


def _other_version(check: str, peer: str, version: str) -> Finding:
    return Finding(
        check,
        "warning",
        f"{peer} is release {version}, this command {VERSION}",
        "install one release everywhere and restart the older side",
    )
