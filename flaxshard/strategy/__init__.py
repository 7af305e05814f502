"""Strategy: functions that run once per replica, on one mesh of devices."""

from flaxshard.strategy.strategy import Strategy

__all__ = ["Strategy"]
