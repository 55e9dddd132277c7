"""Settings of the agent: flags, then MEMSHARE_AGENT_* variables, then a TOML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ByteSize, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from memshare.wire.errors import InvalidArgument
from memshare.wire.runtime import default_directory
from memshare.wire.settings import no_bool, read_table

ENV_PREFIX: Final = "MEMSHARE_AGENT_"
TABLE: Final = "agent"
_MIN_POOL_BYTES: Final = 1 << 16
_Int = Annotated[int, BeforeValidator(no_bool)]
_Float = Annotated[float, BeforeValidator(no_bool)]
_Id = Annotated[_Int, Field(ge=0, lt=1 << 32)]


class AgentSettings(BaseSettings):
    """What an agent is told at start. Build it with `load_settings` for readable errors."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    pool_bytes: Annotated[ByteSize, BeforeValidator(no_bool)] = Field(
        ByteSize(1 << 30), ge=_MIN_POOL_BYTES, description="size of the pool, such as 2GiB"
    )
    runtime_dir: Path = Field(
        default_factory=default_directory, description="directory of the sockets"
    )
    kernels: Literal["numba", "numpy"] = Field("numba", description="implementation of the kernels")
    search: Literal["popcount", "faiss"] = Field(
        "popcount", description="how candidates are found among signatures"
    )
    threads: _Int = Field(2, ge=1, le=256, description="calls that the worker serves at once")
    weigh_heads: bool = Field(
        False, description="give every KV head the same say in the distance of two rows"
    )
    allowed_uids: tuple[_Id, ...] = Field(
        (),
        description="users besides the agent's own and root whose engines may map the pool; they "
        "must also be able to enter the runtime directory",
    )
    allowed_gids: tuple[_Id, ...] = Field(
        (), description="groups whose engines may map the pool, as for users"
    )
    max_connections: _Int = Field(
        1024, ge=1, le=16384, description="connections to the owner at once"
    )
    request_timeout: _Float = Field(
        5.0, gt=0, le=3600, description="seconds a new connection has to say what it wants"
    )
    stop_timeout: _Float = Field(
        5.0, gt=0, le=3600, description="seconds the worker has to finish its calls at a stop"
    )
    worker_timeout: _Float = Field(
        15.0,
        ge=0,
        le=3600,
        description="seconds without a sign of life after which the worker is killed and started "
        "again, 0 for never",
    )
    log_format: Literal["json", "console"] = Field("console", description="form of log events")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe event that is logged"
    )


def pulse_seconds(worker_timeout: float) -> float:
    """How often the worker gives its owner a sign of life."""
    return min(1.0, worker_timeout / 4)


def load_settings(config: Path | None = None, **flags: Any) -> AgentSettings:
    """Settings from `flags`, the environment and the `[agent]` table of the file `config`.

    The earlier named source wins. Flags that are None count as not given. Raises
    `InvalidArgument` naming each wrong key, its value and where it was set.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    table = read_table(config, TABLE) if config is not None else {}
    known = {name.upper() for name in AgentSettings.model_fields}
    variables = {
        name.removeprefix(ENV_PREFIX).lower() for name in os.environ if name.startswith(ENV_PREFIX)
    }
    if unknown := sorted(name for name in variables if name.upper() not in known):
        raise InvalidArgument(
            "; ".join(f"{ENV_PREFIX}{name.upper()}: no such setting" for name in unknown),
            field=unknown[0],
        )
    # Arguments rank above the environment, so the file's share must not hide a variable.
    below = {key: value for key, value in table.items() if key not in variables}
    try:
        return AgentSettings(**{**below, **given})
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            name = str(problem["loc"][0]) if problem["loc"] else ""
            source = _source(name, given, variables, config)
            reason = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{key} = {problem['input']!r} ({source}): {reason}")
        raise InvalidArgument("; ".join(problems), field=str(error.errors()[0]["loc"][0])) from None
    except SettingsError as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise InvalidArgument(f"{error}{cause}: {_environment(variables)}") from None


def _source(name: str, given: dict[str, Any], variables: set[str], config: Path | None) -> str:
    if name in given:
        return "flag"
    return f"{ENV_PREFIX}{name.upper()}" if name in variables else str(config)


def _environment(variables: set[str]) -> str:
    names = sorted(ENV_PREFIX + name.upper() for name in variables)
    return ", ".join(f"{name}={os.environ.get(name)!r}" for name in names)
