"""The package list of pyproject.toml against the repository."""

from __future__ import annotations

import tomllib
from pathlib import Path

from memshare.wire.version import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOPS = {"gpu_agent": "gpu_agent", "manager": "manager", "client": "client", "kernels": "kernels"}
TOPS |= {"v1": "proto/memshare/v1", "wire": "proto/memshare/wire"}


def packages() -> dict[str, str]:
    found = {}
    for name, top in TOPS.items():
        for init in (ROOT / top).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / top).parts
            found[".".join(("memshare", name, *below))] = str(init.parent.relative_to(ROOT))
    return found


def test_every_package_is_listed_with_its_directory() -> None:
    expected = packages()
    tool = PROJECT["tool"]["setuptools"]
    # Without an __init__.py a package is a namespace, which setuptools must be told all the same.
    assert set(tool["packages"]) >= set(expected)
    assert {name: tool["package-dir"].get(name) for name in expected} == expected


def test_every_top_package_is_typed() -> None:
    assert [top for top in TOPS.values() if not (ROOT / top / "py.typed").is_file()] == []


def test_the_release_is_one() -> None:
    assert PROJECT["project"]["version"] == VERSION
