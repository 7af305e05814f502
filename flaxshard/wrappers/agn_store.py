"""AGN's local steps for a center in a store: `transport="store"`.

The compiled step takes local steps and adds their gradients up, the same on all
replicas of a process. `flaxshard.Worker` commits between steps.

The parameters are divided into fragments, which are committed in turn: the last
one at the multiples of the period, each other one `period // fragments` local
steps before the next.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import trees

PyTree = Any

COMMIT_DTYPES = ("bfloat16", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class Store:
  """The options of `AGN(transport=Store(...))`: a center in a store.

  Args:
    fragments: Number of groups of parameters that are committed in turn, each
      once per period. They have about the same number of bytes, and never split
      a parameter. So the bytes of one commit are 1/fragments of those of all.
    delay: Number of local steps from a commit to when the local parameters are
      replaced by the center, below the period. Meanwhile the commit travels.
      What these steps accumulate belongs to the next commit.
    blend: Weight of the local parameters when they are replaced:
      `local = blend * local + (1 - blend) * center`, at least 0 and below 1.
    commit_dtype: `"bfloat16"`, `"int8"` or `"int4"`: send commits, and changes
      of the center, in this dtype; integers with a float32 scale for each 256.
      What is cut off goes into the next ones. None: the dtype as it is.
    quorum: With commits by mean or sum, least number of workers in an update of
      the center. Workers that have finished count.
    grace: Seconds that an update by mean or sum waits for more workers than
      `quorum`, from the first commit on.
    deadline: Seconds that a worker waits for the result of its commit before it
      goes on alone, and after which a worker that gives no sign of life counts
      as gone.

  Raises:
    TypeError: An argument is of a wrong type.
    ValueError: A number is out of range, or `commit_dtype` is unknown.

  Example:
    >>> import flaxshard as fs
    >>> agn = fs.AGN(10, "mean", transport=fs.Store(commit_dtype="int8"))
    >>> agn.transport.commit_dtype, agn.transport.quorum
    ('int8', 1)

  References:
    Fragments, delay and blend: Douillard et al., Streaming DiLoCo, 2025
    (arXiv:2501.18512). Quorum and grace: Decoupled DiLoCo, 2026
    (arXiv:2604.21428).
  """

  fragments: int = 1
  delay: int = 0
  blend: float = 0.0
  commit_dtype: str | None = None
  quorum: int = 1
  grace: float = 10.0
  deadline: float = 60.0

  def __post_init__(self) -> None:
    checks.fields(self, checks.integer, "fragments", "quorum", minimum=1)
    checks.fields(self, checks.integer, "delay", minimum=0)
    checks.fields(self, checks.number, "blend", minimum=0, below=1)
    checks.fields(self, checks.number, "grace", minimum=0)
    checks.fields(self, checks.number, "deadline", above=0)
    allowed = (None, *COMMIT_DTYPES)
    checks.fields(self, checks.one_of, "commit_dtype", allowed=allowed)

  def check(self, period: int, commit: str) -> None:
    """Raises a ValueError if the options do not fit the arguments of AGN."""
    for name, most in (("fragments", period), ("delay", period - 1)):
      checks.integer(
        f"AGN: communication_period={period}: transport: {name}",
        getattr(self, name),
        maximum=most,
      )
    if commit == "sequential" and self.quorum > 1:
      raise ValueError(
        f"AGN: transport: quorum={self.quorum} needs commit='mean' or 'sum': "
        "sequential commits are applied one by one."
      )

  def last_due(self, period: int, fragment: int, local_step: int) -> int:
    """Returns the last local step after which a fragment was to be committed.

    Before the first one it is 0 or less.

    Args:
      period: The period of AGN.
      fragment: The number of the fragment.
      local_step: The number of local steps that have been taken.

    Example:
      >>> import flaxshard as fs
      >>> options = fs.Store(fragments=2)
      >>> [options.last_due(4, 0, step) for step in range(2, 7)]
      [2, 2, 2, 2, 6]
    """
    first = (fragment + 1 - self.fragments) * (period // self.fragments)
    return local_step - (local_step - first) % period


def parse(argument: str, transport: Any) -> Any:
  """Returns the transport that an argument names: `"compiled"` or a `Store`."""
  if isinstance(transport, Store):
    return transport
  checks.one_of(argument, transport, ("compiled", "store"))
  return Store() if transport == "store" else transport


# -- Fragments.


def divide(accumulators: PyTree, fragments: int) -> dict[str, int]:
  """Returns the fragment of each parameter with a gradient, by its path.

  Args:
    accumulators: `AGNState.grad_accum`. None is no leaf.
    fragments: The number of fragments.

  Raises:
    ValueError: There are more fragments than leaves.

  Example:
    >>> import jax.numpy as jnp
    >>> tree = {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}
    >>> divide(tree, 2)
    {'a': 1, 'b': 0, 'c': 1}
  """
  leaves = {
    trees.path_string(path): x.size * x.dtype.itemsize
    for path, x in jax.tree_util.tree_leaves_with_path(accumulators)
  }
  if fragments > max(len(leaves), 1):
    raise ValueError(
      f"AGN: transport: fragments={fragments} must be at most the number of "
      f"parameters with a gradient, {len(leaves)}: a parameter is never split."
    )
  loads = [0] * fragments
  found = {}
  # The largest first, each to the fragment that has the fewest bytes.
  for path in sorted(leaves, key=lambda path: (-leaves[path], path)):
    number = loads.index(min(loads))
    # An empty parameter counts as well: no fragment is left without one.
    loads[number] += max(leaves[path], 1)
    found[path] = number
  return {path: found[path] for path in leaves}
