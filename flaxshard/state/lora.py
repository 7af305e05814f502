"""LoRA: trains low-rank factors of a model's kernels, and freezes the rest.

A kernel `W` of shape `[*inputs, *outputs]` becomes

    W + alpha / rank * A @ B,    A: [*inputs, rank],  B: [rank, *outputs]

`W` is frozen; `A` starts random and `B` as zeros, so that the model starts as
it was. Any model will do: the sum is computed before the model is applied, and
the model sees plain kernels. For a kernel of more than two dimensions, inputs
and outputs are divided where the factors are smallest. Kernels that are stacked
over layers or experts (`batch_dims`) have factors for each of them.

The frozen parameters are no parameters of the state but a collection `frozen`:
they have no gradients, no optimizer slots and no copies in wrappers.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models"
(https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, TYPE_CHECKING

from flax import traverse_util
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees

if TYPE_CHECKING:
  from flaxshard.state.train_state import TrainState

PyTree = Any

# The collection of the parameters that are not trained.
FROZEN = "frozen"
# Keys of the factors, below the path of their kernel.
FACTORS = ("lora_a", "lora_b")

_Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoRA:
  """Which parameters are trained, and through factors of which rank.

  Pass it to `create_train_state(..., lora=LoRA(rank=8))`.

  Attributes:
    rank: The rank of the factors.
    alpha: The product of the factors is multiplied by `alpha / rank`.
    patterns: Regular expressions, searched in paths such as
      `block0/mlp_in/kernel`: the parameters that get factors. They need two
      dimensions at least.
    train: Patterns of parameters that are trained as they are, such as a new
      head. All others are frozen.
    batch_dims: `(pattern, number)` pairs: how many of the first dimensions of a
      parameter count layers, as those of `nn.scan` do, or experts. Each layer
      has factors of its own. The first match counts; without one, there are no
      such dimensions.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: `rank`, `alpha` or a number of dimensions is not positive, there
      are no patterns, or one is no regular expression.

  Example:
    >>> import flaxshard as fs, flax.linen as nn, jax.numpy as jnp, optax
    >>> state = fs.create_train_state(
    ...   nn.Dense(16), jax.random.key(0), jnp.ones((1, 32)), optax.adam(0.1),
    ...   lora=fs.LoRA(rank=2, patterns=("kernel",), train=("bias",)))
    >>> jax.tree.map(jnp.shape, state.params)["kernel"]
    {'lora_a': (32, 2), 'lora_b': (2, 16)}
    >>> sorted(state.params), sorted(state.frozen)
    (['bias', 'kernel'], ['kernel'])
    >>> variables = fs.merge_lora(state)
    >>> nn.Dense(16).apply(variables, jnp.ones((1, 32))).shape
    (1, 16)
  """

  rank: int
  alpha: float = 16.0
  patterns: Sequence[str] = ("kernel$",)
  train: Sequence[str] = ()
  batch_dims: Sequence[tuple[str, int]] = ()

  def __post_init__(self) -> None:
    checks.integer("LoRA: rank", self.rank, minimum=1)
    checks.number("LoRA: alpha", self.alpha, above=0)
    for field in ("patterns", "train"):
      checked = patterns_lib.check(f"LoRA: {field}", getattr(self, field))
      # Hashable, whatever sequence was given.
      object.__setattr__(self, field, checked)
    pairs = patterns_lib.check_pairs("LoRA: batch_dims", self.batch_dims)
    for i, (_, number) in enumerate(pairs):
      checks.integer(f"LoRA: batch_dims[{i}][1]", number, minimum=1)
    object.__setattr__(self, "batch_dims", pairs)
    if not self.patterns:
      raise ValueError("LoRA: patterns must name a parameter, got ().")


@dataclasses.dataclass(frozen=True)
class Apply:
  """Applies a model whose kernels have factors; see `LoRA`.

  Attributes:
    apply_fn: Applies the model itself.
    scale: What the product of the factors is multiplied by.
  """

  apply_fn: Any
  scale: float

  def __call__(
    self,
    variables: Mapping[str, Any],
    *args: Any,
    mutable: Any = False,
    **kwargs: Any,
  ) -> Any:
    """Merges the parameters, and applies the model to all arguments."""
    model_variables = dict(variables)
    model_variables["params"] = merge(
      variables["params"], model_variables.pop(FROZEN), self.scale
    )
    if isinstance(mutable, (tuple, list, set, frozenset)):
      # The model does not have this collection.
      mutable = [name for name in mutable if name != FROZEN]
    return self.apply_fn(model_variables, *args, mutable=mutable, **kwargs)


def model_apply(apply_fn: Any) -> Any:
  """Returns the apply function of the model itself."""
  return apply_fn.apply_fn if isinstance(apply_fn, Apply) else apply_fn


def merge(params: PyTree, frozen: PyTree, scale: float) -> PyTree:
  """Returns the parameters of the model.

  Args:
    params: The trained parameters, with factors in place of kernels.
    frozen: The frozen parameters.
    scale: What the product of the factors is multiplied by.
  """
  merged = dict(trees.leaves_by_path(frozen))
  factors: dict[_Path, dict[str, Any]] = {}
  for path, x in trees.leaves_by_path(params).items():
    if is_factor(path, frozen):
      factors.setdefault(path[:-1], {})[path[-1]] = x
    else:
      merged[path] = x
  for path, by_name in factors.items():
    a, b = (by_name[name] for name in FACTORS)
    kernel = merged[path]
    multiply = functools.partial(jnp.tensordot, axes=1)
    # Both factors have the batch dimensions, and one of `rank`.
    for _ in range(a.ndim + b.ndim - 2 - kernel.ndim):
      multiply = jax.vmap(multiply)
    product = multiply(a, b)
    merged[path] = kernel + (scale * product).astype(kernel.dtype)
  return traverse_util.unflatten_dict(merged)


def is_factor(path: Sequence[str], frozen: PyTree) -> bool:
  """Returns whether a path in `params` is that of a factor of a kernel.

  Args:
    path: The path. A model may have parameters with the names of factors.
    frozen: The frozen parameters.
  """
  if path[-1] not in FACTORS:
    return False
  node = frozen
  for key in path[:-1]:
    if not isinstance(node, Mapping) or key not in node:
      return False
    node = node[key]
  return not isinstance(node, Mapping)


def merge_lora(state: TrainState) -> dict[str, PyTree]:
  """Returns the variables of a state as its model has them, without factors.

  Use it to save, export or serve a model that was trained with `LoRA`. The
  arrays have the shardings of the frozen parameters.

  Args:
    state: A state, with `LoRA` or without.

  Returns:
    The collections by name, `params` among them: `model.apply(variables, x)`.

  Example:
    See `LoRA`.
  """
  from flaxshard.state import fields as fields_lib

  variables = fields_lib.variables(state)
  apply_fn = state.apply_fn
  if not isinstance(apply_fn, Apply):
    return variables
  frozen = variables.pop(FROZEN)
  params = variables["params"]
  leaves = {
    **trees.leaves_by_path(frozen),
    **{
      path: x
      for path, x in trees.leaves_by_path(params).items()
      if not is_factor(path, frozen)
    },
  }
  shardings = traverse_util.unflatten_dict(
    {path: x.sharding for path, x in leaves.items()}
  )
  merge_jitted = jax.jit(merge, static_argnums=2, out_shardings=shardings)
  variables["params"] = merge_jitted(params, frozen, apply_fn.scale)
  return variables
