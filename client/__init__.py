"""The shim an engine attaches with: `memshare.client.attach`."""

from memshare.client.options import SessionOptions, SessionStatistics
from memshare.client.session import Session, attach

__all__ = ["Session", "SessionOptions", "SessionStatistics", "attach"]
