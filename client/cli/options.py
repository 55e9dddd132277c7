"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from memshare.client.cli.units import parse_bytes
from memshare.wire.runtime import ENVIRONMENT, RuntimeDirectory

# What the protocol's numbers hold.
UINT32_MAX: Final = (1 << 32) - 1
UINT64_MAX: Final = (1 << 64) - 1


def parse_runtime(text: str) -> RuntimeDirectory:
    """The runtime directory that an option names."""
    return RuntimeDirectory(Path(text).absolute())


def parse_size(text: str) -> int:
    """The bytes that an option names, as a usage error where it names none."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RuntimeOption = Annotated[
    RuntimeDirectory | None,
    typer.Option(
        "--runtime-dir",
        "-d",
        parser=parse_runtime,
        metavar="DIRECTORY",
        help=f"Directory of the sockets. Default: ${ENVIRONMENT}, else the user's own.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")
]
SessionOption = Annotated[
    int,
    typer.Option(
        "--session",
        "-s",
        min=0,
        max=UINT64_MAX,
        metavar="ID",
        help="A session's id; 0 is all, or the default.",
    ),
]
PoolBytesOption = Annotated[
    int | None,
    typer.Option(
        "--pool-bytes",
        parser=parse_size,
        metavar="SIZE",
        help="Size of the pool, such as 8GiB.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="A TOML file.", show_default=False),
]
LogLevelOption = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
]
LogFormatOption = Annotated[
    str | None, typer.Option("--log-format", metavar="FORMAT", help="console or json.")
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="PRESET", help="Default policy of engines.", show_default=False
    ),
]


def chosen(runtime: RuntimeDirectory | None) -> RuntimeDirectory:
    """The directory that was named, or the default."""
    return runtime if runtime is not None else RuntimeDirectory.default()
