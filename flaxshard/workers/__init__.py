"""Workers that commit to a center on the host, between steps.

With `AGN(transport="host")` each process is a JAX world of its own. A `Worker`
connects it with the others.
"""

from flaxshard.workers.commit_log import CommitRecord
from flaxshard.workers.worker import Worker

__all__ = ["CommitRecord", "Worker"]


def __dir__() -> list[str]:
  return sorted(__all__)
