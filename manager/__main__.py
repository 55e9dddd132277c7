"""`python -m memshare.manager`: run the manager in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from memshare.manager.config import ManagerSettings, load_settings
from memshare.manager.server import run_manager
from memshare.wire.errors import InvalidArgument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the manager with settings from the command line; the exit status (2: bad settings)."""
    parser = argparse.ArgumentParser(prog="memshare manager", description=run_manager.__doc__)
    parser.add_argument("--config", type=Path, help="TOML file with a [manager] table")
    for name, field in ManagerSettings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=field.description)
    try:
        settings = load_settings(**vars(parser.parse_args(arguments)))
    except InvalidArgument as error:
        print(f"memshare manager: {error}", file=sys.stderr)
        return 2
    return run_manager(settings)


if __name__ == "__main__":
    sys.exit(main())
