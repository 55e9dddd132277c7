"""Logging of the sidecar's processes: structured, to standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog


def configure_logging(
    log_format: Literal["json", "console"], level: str, **context: object
) -> None:
    """Send events as JSON lines or as text to standard error; `context` goes into every event."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**context)
