"""Transformers on memshare's memory: a `Cache` and an attention function."""

from memshare.client.transformers.attention import EAGER, SDPA, register
from memshare.client.transformers.cache import MemShareCache
from memshare.client.transformers.model import describe_model

__all__ = ["EAGER", "SDPA", "MemShareCache", "describe_model", "register"]

register()
