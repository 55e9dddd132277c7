"""What the scheduler tells the worker with each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remap:
    """Entry `index` of a request's table in a group now names `block`.

    `group` counts the groups that are shared, `engine_group` all groups of vLLM.
    """

    request_id: str
    group: int
    engine_group: int
    index: int
    block: int
