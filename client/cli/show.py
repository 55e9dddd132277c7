"""`memshare status`, `engines` and `requests`."""

from __future__ import annotations

from memshare.client.cli import output
from memshare.client.cli.admin import AdminClient
from memshare.client.cli.options import JsonOption, RuntimeOption, SessionOption, chosen
from memshare.client.cli.units import format_bytes, format_duration, format_percent
from memshare.v1 import admin_pb2, common_pb2

MODES = common_pb2.DESCRIPTOR.enum_types_by_name["SharingMode"]
DTYPES = common_pb2.DESCRIPTOR.enum_types_by_name["RowDtype"]


def status(runtime_dir: RuntimeOption = None, json: JsonOption = False) -> None:
    """Show the manager, the pool and what sharing saves."""
    with AdminClient(chosen(runtime_dir)) as admin:
        answer = admin.status()
    if json:
        output.print_json(output.to_document(answer))
    else:
        output.print_fields(_status_fields(answer))


def engines(runtime_dir: RuntimeOption = None, json: JsonOption = False) -> None:
    """List the attached engines."""
    with AdminClient(chosen(runtime_dir)) as admin:
        answer = admin.engines()
    if json:
        output.print_json([output.to_document(engine) for engine in answer])
        return
    headings = ("session", "engine", "pid", "tenant", "layout", "policy", "rows", "shared K", "V")
    output.print_table(headings, [_engine_row(engine) for engine in answer])
    for engine in answer:
        if engine.mode_reason:
            output.say(f"session {engine.session_id}: {engine.mode_reason}")
    if not answer:
        output.say("no engine is attached")


def requests(
    session: SessionOption = 0, runtime_dir: RuntimeOption = None, json: JsonOption = False
) -> None:
    """List open requests and how much of each is shared."""
    with AdminClient(chosen(runtime_dir)) as admin:
        answer = admin.requests(session)
        layers = {e.session_id: e.layout.num_layers for e in admin.engines()}
    if json:
        output.print_json([output.to_document(request) for request in answer])
        return
    headings = ("session", "request", "gen", "tokens", "shared K", "shared V", "from", "error")
    rows = []
    for request in answer:
        entries = request.sealed_tokens * layers.get(request.session_id, 0)
        rows.append(
            (
                request.session_id,
                request.request_id,
                request.generation,
                request.sealed_tokens,
                format_percent(request.shared_keys, entries),
                format_percent(request.shared_values, entries),
                request.taint if request.taint >= 0 else "-",
                f"{request.accumulated_error:.2f}",
            )
        )
    output.print_table(headings, rows)
    if not answer:
        output.say("no request is open")


def _status_fields(answer: admin_pb2.GetStatusResponse) -> list[tuple[str, object]]:
    pool, rows, counters = answer.pool, answer.rows, answer.counters
    shared = counters.shared_keys + counters.shared_values
    fields: list[tuple[str, object]] = [
        (
            "manager",
            f"{answer.state}, version {answer.server_version}, protocol "
            f"{answer.protocol}, pid {answer.pid}, up "
            f"{format_duration(answer.uptime_seconds)}, CPU "
            f"{format_duration(answer.cpu_seconds)}",
        ),
        (
            "agent",
            f"{answer.agent_state}, worker pid {answer.worker_pid}, "
            f"{answer.worker_restarts} restarts, CPU "
            f"{format_duration(answer.worker_cpu_seconds)}",
        ),
        ("engines", f"{answer.sessions} attached, {answer.requests} open requests"),
    ]
    if pool.row_bytes:
        fields += [
            (
                "pool",
                f"{format_bytes(pool.pool_bytes)}, {pool.num_rows:,} rows of "
                f"{format_bytes(pool.row_bytes)}, "
                f"{format_percent(rows.total - rows.free, rows.total)} used",
            ),
            (
                "rows",
                f"{rows.free:,} free, {rows.leased:,} leased, {rows.live:,} live, "
                f"{rows.quarantined:,} quarantined",
            ),
        ]
    else:
        fields.append(
            ("pool", f"{format_bytes(pool.pool_bytes)}; the first engine sets the row's size")
        )
    fields += [
        (
            "sealed",
            f"{counters.sealed_tokens:,} tokens, {counters.examined_entries:,} entries examined",
        ),
        (
            "shared",
            f"{counters.shared_keys:,} keys, {counters.shared_values:,} values: "
            f"{format_bytes(shared * pool.row_bytes)} that need no memory of their own",
        ),
        (
            "decisions",
            f"{counters.proposed:,} proposed, {counters.applied:,} applied, "
            f"{counters.missed:,} stale, {counters.over_budget:,} over budget",
        ),
    ]
    if counters.shareable_keys or counters.shareable_values:
        fields.append(
            (
                "observed",
                f"{counters.shareable_keys:,} keys and "
                f"{counters.shareable_values:,} values could be shared",
            )
        )
    if counters.nonfinite:
        fields.append(("not finite", f"{counters.nonfinite:,} rows with NaN or Inf, not shared"))
    if answer.awaited_pids:
        awaited = ", ".join(str(pid) for pid in answer.awaited_pids)
        fields.append(("awaited", f"engines that have not come back: pid {awaited}"))
    return fields


def _engine_row(engine: admin_pb2.EngineInfo) -> tuple[object, ...]:
    layout, counters = engine.layout, engine.counters
    entries = counters.sealed_tokens * layout.num_layers
    mode = output.enum_name(MODES, engine.policy.mode)
    return (
        engine.session_id,
        f"{engine.engine} {engine.client_version}".strip(),
        engine.pid,
        engine.tenant or "-",
        f"{layout.num_layers} layers, {layout.num_kv_heads}×{layout.key_head_dim} "
        f"{output.enum_name(DTYPES, layout.dtype)}",
        f"{engine.policy.name} ({mode})",
        f"{engine.leased_rows + engine.live_rows:,}",
        format_percent(counters.shared_keys, entries),
        format_percent(counters.shared_values, entries),
    )
