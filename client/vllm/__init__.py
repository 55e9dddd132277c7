"""vLLM on memshare's memory.

`engine_arguments` gives what `vllm.LLM` needs to attach to a running sidecar, `memshare
vllm-flags` the same for `vllm serve`. Nothing of vLLM is imported until it loads this plugin.
"""

from __future__ import annotations

from contextlib import suppress

from memshare.client.vllm.settings import CONNECTOR, Settings, engine_arguments, serve_flags
from memshare.client.vllm.versions import SUPPORTED_VERSIONS

__all__ = [
    "SUPPORTED_VERSIONS",
    "Settings",
    "engine_arguments",
    "register",
    "serve_flags",
]


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: make the connector known by its name.

    vLLM calls it in every process and may do so twice. In a version that is not supported it
    does nothing but for the name: the connector then refuses to start.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # It refuses a name that is registered already.
    with suppress(ValueError):
        KVConnectorFactory.register_connector(
            CONNECTOR, "memshare.client.vllm.connector", CONNECTOR
        )
