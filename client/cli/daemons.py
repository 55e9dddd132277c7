"""`memshare agent` and `memshare manager`: one process in the foreground."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memshare.client.cli import output
from memshare.client.cli.options import (
    ConfigOption,
    JsonOption,
    LogFormatOption,
    LogLevelOption,
    PolicyOption,
    PoolBytesOption,
    RuntimeOption,
)
from memshare.client.cli.processes import follow
from memshare.client.cli.settings import agent_settings, manager_settings
from memshare.wire.runtime import RuntimeDirectory

ShowOption = Annotated[
    bool, typer.Option("--show-settings", help="Show the settings in force instead of running.")
]
FollowOption = Annotated[
    int | None, typer.Option("--follow", hidden=True, help="Stop when this parent process ends.")
]


def agent(
    pool_bytes: PoolBytesOption = None,
    runtime_dir: RuntimeOption = None,
    config: ConfigOption = None,
    allowed_uids: Annotated[
        list[int] | None,
        typer.Option(min=0, metavar="UID", help="Another user whose engines may map the pool."),
    ] = None,
    allowed_gids: Annotated[
        list[int] | None,
        typer.Option(min=0, metavar="GID", help="A group whose engines may map the pool."),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    show_settings: ShowOption = False,
    json: JsonOption = False,
    follow_pid: FollowOption = None,
) -> None:
    """Run the agent: it owns the memory and finds what repeats in it.

    Settings come from flags, then MEMSHARE_AGENT_* variables, then the \\[agent] table of the file.
    """
    settings = agent_settings(
        config,
        pool_bytes=pool_bytes,
        runtime_dir=_path(runtime_dir),
        allowed_uids=allowed_uids or None,
        allowed_gids=allowed_gids or None,
        log_level=log_level,
        log_format=log_format,
    )
    if show_settings:
        _show(settings.model_dump(mode="json"), json)
        return
    if follow_pid is not None:
        follow(follow_pid)
    from memshare.gpu_agent.owner import run_agent

    raise typer.Exit(run_agent(settings))


def manager(
    policy: PolicyOption = None,
    runtime_dir: RuntimeOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    show_settings: ShowOption = False,
    json: JsonOption = False,
    follow_pid: FollowOption = None,
) -> None:
    """Run the manager: it counts references and decides what is shared.

    Settings come from flags, then MEMSHARE_MANAGER_* variables, then the \\[manager] table of the
    file.
    """
    settings = manager_settings(
        config,
        policy=policy,
        runtime_dir=_path(runtime_dir),
        log_level=log_level,
        log_format=log_format,
    )
    if show_settings:
        _show(settings.model_dump(mode="json"), json)
        return
    if follow_pid is not None:
        follow(follow_pid)
    from memshare.manager.server import run_manager

    raise typer.Exit(run_manager(settings))


def _path(runtime: RuntimeDirectory | None) -> Any:
    return None if runtime is None else runtime.path


def _show(settings: dict[str, Any], json: bool) -> None:
    if json:
        output.print_json(settings)
    else:
        output.print_fields(settings.items())
