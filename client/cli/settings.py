"""Settings of both processes, from one file with a table for each."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memshare.wire.errors import InvalidArgument

if TYPE_CHECKING:
    from memshare.gpu_agent.config import AgentSettings
    from memshare.manager.config import ManagerSettings

_TABLES: Final = ("agent", "manager")


def agent_settings(config: Path | None, **flags: Any) -> AgentSettings:
    """Settings of an agent. Raises `InvalidArgument` naming each wrong key and its value."""
    from memshare.gpu_agent.config import load_settings

    _check_tables(config)
    return load_settings(config, **flags)


def manager_settings(config: Path | None, **flags: Any) -> ManagerSettings:
    """Settings of a manager. Raises `InvalidArgument` naming each wrong key and its value."""
    from memshare.manager.config import load_settings

    _check_tables(config)
    return load_settings(config, **flags)


def _check_tables(config: Path | None) -> None:
    """Refuse what neither process reads, such as a misspelt table."""
    if config is None:
        return
    try:
        content = tomllib.loads(config.read_text())
    except OSError as error:
        raise InvalidArgument(f"cannot read {config}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{config} is not TOML: {error}") from None
    for key, value in content.items():
        if key not in _TABLES or not isinstance(value, dict):
            raise InvalidArgument(
                f"{key} = {value!r} ({config}): settings belong in the tables [agent] and "
                "[manager]",
                field=key,
            )
