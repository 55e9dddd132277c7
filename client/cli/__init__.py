"""The `memshare` command line."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Entry point of the `memshare` script."""
    # An engine's install leaves these out, yet pip puts the script beside it.
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"memshare: the command line needs {' and '.join(missing)}: "
            "pip install 'memshare[cli]' (or 'memshare[agent]' to run the sidecar)",
            file=sys.stderr,
        )
        raise SystemExit(1)
    from memshare.client.cli.app import run

    raise SystemExit(run())
