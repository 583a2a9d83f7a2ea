"""Schedules of conf/schedule, under the names that settings have."""

from trainer.core.schedule import constant, cosine, linear, multistep, one_cycle

__all__ = ["constant", "cosine", "linear", "multistep", "one_cycle"]
