"""AGN across machines: a center in a store, and its workers."""

from flaxshard.center.encoding import DamagedError
from flaxshard.center.store import StoreError
from flaxshard.center.worker import Worker

__all__ = ["DamagedError", "StoreError", "Worker"]
