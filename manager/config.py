"""The manager's settings: flags, then MEMSHARE_MANAGER_* variables, then a TOML file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from memshare.manager.policy import DEFAULT_POLICY, Adaptive, Mode, Policy, Stage, preset
from memshare.wire.errors import InvalidArgument
from memshare.wire.runtime import default_directory
from memshare.wire.settings import no_bool, read_table

ENV_PREFIX: Final = "MEMSHARE_MANAGER_"
TABLE: Final = "manager"
_Int = Annotated[int, BeforeValidator(no_bool)]
_Float = Annotated[float, BeforeValidator(no_bool)]


def _read_policy(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if isinstance(value, str):
        return preset(value)
    if not isinstance(value, Mapping):
        return value
    fields = {"name": "custom", **value}
    _require_fields("", fields, Policy)
    _require_fields("adaptive.", fields.get("adaptive"), Adaptive)
    stages = fields.get("stages")
    for number, stage in enumerate(stages if isinstance(stages, list | tuple) else ()):
        _require_fields(f"stages[{number}].", stage, Stage)
    mode = fields.get("mode")
    if isinstance(mode, str) and mode.upper() in Mode.__members__:
        fields["mode"] = Mode[mode.upper()]
    return TypeAdapter(Policy).validate_python(fields)


def _require_fields(where: str, value: Any, kind: type) -> None:
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if key not in kind.__annotations__:
            raise InvalidArgument(f"{where}{key} = {item!r}: no such setting")
        items = item if isinstance(item, list | tuple) else (item,)
        if kind.__annotations__[key] != "bool" and any(isinstance(one, bool) for one in items):
            raise InvalidArgument(f"{where}{key} = {item!r}: true and false are no values of it")


def _policy(value: Any) -> Any:
    try:
        return _read_policy(value)
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


class ManagerSettings(BaseSettings):
    """What a manager is told at start. Build it with `load_settings` for readable errors.

    `policy` is a preset's name, or the fields of a `Policy` as a table (as JSON in a variable).
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    runtime_dir: Path = Field(
        default_factory=default_directory, description="directory of the sockets"
    )
    policy: Annotated[Policy, NoDecode, BeforeValidator(_policy)] = Field(
        default_factory=lambda: preset(DEFAULT_POLICY),
        description="what sessions share unless they ask for something else",
    )
    batch_tokens: _Int = Field(
        16, ge=1, le=65536, description="newly aged tokens of a request that start a search"
    )
    candidates: _Int = Field(8, ge=1, le=64, description="donors verified for each target")
    hello_seconds: _Float = Field(
        5.0, gt=0, le=600, description="seconds an engine has to say Hello"
    )
    drain_seconds: _Float = Field(
        5.0, ge=0, le=600, description="seconds engines have to leave at a stop"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe event that is logged"
    )
    log_format: Literal["json", "console"] = Field("console", description="form of log events")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load_settings` gathers everything itself, to name the source of a wrong value."""
        return (init_settings,)


def load_settings(config: Path | None = None, **flags: Any) -> ManagerSettings:
    """Settings from `flags`, the environment and the `[manager]` table of the file `config`.

    The earlier named source wins. Flags that are None count as not given. Raises
    `InvalidArgument` naming each wrong key, its value and where it was set.
    """
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    table = read_table(config, TABLE) if config is not None else {}
    environment = {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in os.environ.items()
        if key.startswith(ENV_PREFIX)
    }
    given = {key: value for key, value in flags.items() if value is not None}
    for source, found in ((str(config), table), ("environment", environment), ("flag", given)):
        values.update(found)
        sources.update(dict.fromkeys(found, source))
    try:
        return ManagerSettings(**values)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            name = str(problem["loc"][0]) if problem["loc"] else ""
            source = sources.get(name, "default")
            if source == "environment":
                source = f"{ENV_PREFIX}{name.upper()}"
            key = ".".join(str(part) for part in problem["loc"])
            value = values.get(name) if name in values else problem["input"]
            reason = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{key} = {value!r} ({source}): {reason}")
        raise InvalidArgument("; ".join(problems), field=str(error.errors()[0]["loc"])) from None
