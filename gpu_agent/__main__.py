"""`python -m memshare.gpu_agent`: run the agent in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from memshare.gpu_agent.config import AgentSettings, load_settings
from memshare.gpu_agent.owner import run_agent
from memshare.wire.errors import InvalidArgument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent with settings from the command line; the exit status (2: bad settings)."""
    parser = argparse.ArgumentParser(prog="memshare agent", description=run_agent.__doc__)
    parser.add_argument("--config", type=Path, help="TOML file with an [agent] table")
    for name, field in AgentSettings.model_fields.items():
        several = "*" if name in ("allowed_uids", "allowed_gids") else None
        parser.add_argument(f"--{name.replace('_', '-')}", nargs=several, help=field.description)
    flags = vars(parser.parse_args(arguments))
    try:
        settings = load_settings(**flags)
    except InvalidArgument as error:
        print(f"memshare agent: {error}", file=sys.stderr)
        return 2
    return run_agent(settings)


if __name__ == "__main__":
    sys.exit(main())
