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

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, TYPE_CHECKING
import zlib

from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.state import fields as fields_lib
from flaxshard.wrappers.stack import FROZEN

if TYPE_CHECKING:
  from flaxshard.state.create import Initializer
  from flaxshard.state.train_state import TrainState

PyTree = Any
NamedSharding = jax.sharding.NamedSharding

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
    >>> import flaxshard as fs, flax.linen as nn, jax, jax.numpy as jnp, optax
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
    patterns_lib.check("LoRA: patterns", self.patterns)
    patterns_lib.check("LoRA: train", self.train)
    pairs = patterns_lib.check_pairs("LoRA: batch_dims", self.batch_dims)
    for i, (_, number) in enumerate(pairs):
      checks.integer(f"LoRA: batch_dims[{i}][1]", number, minimum=1)
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
    if FROZEN not in variables:
      raise ValueError(
        f"apply_fn: variables lack {FROZEN!r}, the parameters that LoRA does "
        "not train: {'params': params, 'frozen': state.frozen, ...}."
      )
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
  trained, merged = trees.leaves_by_path(params), model_leaves(params, frozen)
  for path, kernel in merged.items():
    if (*path, FACTORS[0]) in trained:
      a, b = (trained[*path, name] for name in FACTORS)
      multiply = functools.partial(jnp.tensordot, axes=1)
      # Both factors have the batch dimensions, and one of `rank`.
      for _ in range(a.ndim + b.ndim - 2 - kernel.ndim):
        multiply = jax.vmap(multiply)
      merged[path] = kernel + (scale * multiply(a, b)).astype(kernel.dtype)
  return traverse_util.unflatten_dict(merged)


def model_leaves(params: PyTree, frozen: PyTree) -> dict[_Path, Any]:
  """Returns the leaves of the model by path: kernels, and no factors.

  Args:
    params: The trained parameters, with factors in place of kernels.
    frozen: The frozen parameters.
  """
  kernels = trees.leaves_by_path(frozen)
  trained = trees.leaves_by_path(params)
  # A model may have parameters with the names of factors.
  own = {path: x for path, x in trained.items() if path[:-1] not in kernels}
  return kernels | own


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
  variables = fields_lib.variables(state)
  apply_fn = state.apply_fn
  if not isinstance(apply_fn, Apply):
    return variables
  params, frozen = variables["params"], variables.pop(FROZEN)
  # In a trace arrays have no sharding: the compiler chooses it.
  shardings = {
    path: None if isinstance(x, jax.core.Tracer) else x.sharding
    for path, x in model_leaves(params, frozen).items()
  }
  out_shardings = traverse_util.unflatten_dict(shardings)
  merged = jax.jit(merge, static_argnums=2, out_shardings=out_shardings)
  variables["params"] = merged(params, frozen, apply_fn.scale)
  return variables


def add_factors(init: Initializer, lora: LoRA, rng: Any) -> Initializer:
  """Returns an initializer that divides the parameters of another one.

  Its `params` are the trained parameters, with factors in place of kernels, and
  its collection `frozen` has all others. On a mesh the factors are split as
  those dimensions of their kernel that they have.

  Args:
    init: The initializer of the model, of arrays without boxes.
    lora: The configuration.
    rng: The `rng` of the creation.

  Raises:
    PatternError: A pattern matches no parameter, or a parameter cannot have
      factors.
    ValueError: The model has a collection `frozen`.
  """
  if FROZEN in init.variables:
    raise ValueError(
      f"lora: the model has a collection {FROZEN!r} already, in which the "
      "frozen parameters would be."
    )
  factorized, trained = _choose(lora, init.variables["params"])

  def divide(
    variables: Mapping[str, PyTree], create_factors: Callable[..., list[Any]]
  ) -> dict[str, PyTree]:
    """Sorts the parameters, and adds factors to those that are trained."""
    params: dict[_Path, Any] = {}
    frozen: dict[_Path, Any] = {}
    for path, x in trees.leaves_by_path(variables["params"]).items():
      (params if path in trained else frozen)[path] = x
      if path in factorized:
        factors = create_factors(path, x, *factorized[path])
        for name, factor in zip(FACTORS, factors, strict=True):
          params[*path, name] = factor
    return {
      **variables,
      "params": traverse_util.unflatten_dict(params),
      FROZEN: traverse_util.unflatten_dict(frozen),
    }

  on_mesh = init.arg_specs is not None

  def describe(_: _Path, x: Any, first: int, last: int) -> list[Any]:
    spec = x.sharding.spec if on_mesh else jax.P()
    dims = list(zip(x.shape, mesh_lib.dims_of(spec, x.ndim), strict=True))
    factors = []
    for dims_of_factor in _of_factors(dims, (lora.rank, ()), first, last):
      shape, axes = zip(*dims_of_factor, strict=True)
      sharding = None
      if on_mesh:
        mesh = x.sharding.mesh
        sharding = NamedSharding(mesh, mesh_lib.shortest(jax.P(*axes), mesh))
      factors.append(jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding))
    return factors

  def initialize(*args: Any) -> dict[str, PyTree]:
    *init_args, key = args

    def create(path: _Path, x: Any, first: int, last: int) -> list[Any]:
      a, b = _of_factors(x.shape, lora.rank, first, last)
      # By path: further patterns do not change the other factors.
      path_key = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
      num_inputs = math.prod(x.shape[first:last])
      a = jax.random.normal(path_key, a, x.dtype) / math.sqrt(num_inputs)
      return [a, jnp.zeros(b, x.dtype)]

    return divide(init.initialize(*init_args), create)

  key = rng
  if isinstance(rng, Mapping) and rng:
    key = rng.get("params", next(iter(rng.values())))
  return dataclasses.replace(
    init,
    initialize=initialize,
    args=(*init.args, key),
    variables=divide(init.variables, describe),
    apply_fn=Apply(init.apply_fn, lora.alpha / lora.rank),
    arg_specs=(*init.arg_specs, jax.P()) if on_mesh else None,
  )


def _of_factors(dims: Sequence[Any], rank: Any, first: int, last: int) -> Any:
  """Returns what describes the dimensions of both factors of a kernel.

  Args:
    dims: What describes each dimension of the kernel, such as its size.
    rank: What describes the dimension that the factors have in common.
    first: Position at which the input dimensions begin.
    last: Position at which the output dimensions begin.
  """
  return (*dims[:last], rank), (*dims[:first], rank, *dims[last:])


def _choose(
  lora: LoRA, params: PyTree
) -> tuple[dict[_Path, tuple[int, int]], set[_Path]]:
  """Decides which parameters of a model are trained.

  Args:
    lora: The configuration.
    params: Shapes of the model's parameters.

  Returns:
    The kernels that get factors, each with the positions at which its input and
    its output dimensions begin; and the parameters that are trained as they
    are.
  """
  if OVERWRITE_WITH_GRADIENT in params:
    raise patterns_lib.PatternError(
      "lora: the model has fp8 layers, whose scales are updated with gradients "
      "of the kernels. Use layers without fp8."
    )
  by_path = trees.leaves_by_path(params)
  leaves = {"/".join(path): path for path in by_path}
  trained = _find("train", lora.train, leaves)
  with_factors = _find("patterns", lora.patterns, leaves)
  batch_patterns = [pattern for pattern, _ in lora.batch_dims]
  _find("batch_dims", batch_patterns, with_factors)
  factorized: dict[_Path, tuple[int, int]] = {}
  for name in with_factors:
    if name in trained:
      raise patterns_lib.PatternError(
        f"lora: {name} is found by patterns={lora.patterns!r} and by "
        f"train={lora.train!r}: a parameter is trained as it is or has factors."
      )
    x = by_path[leaves[name]]
    i = patterns_lib.first_match(batch_patterns, name)
    num_batch = 0 if i is None else lora.batch_dims[i][1]
    shape = x.shape[num_batch:]
    if len(shape) < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
      raise patterns_lib.PatternError(
        f"lora: patterns={lora.patterns!r} finds {name}, {x.dtype} "
        f"{tuple(x.shape)}; factors are for floating-point parameters with two "
        f"dimensions or more beside {num_batch} batch dimensions. train=... "
        "trains it as it is."
      )
    # Inputs and outputs are divided where the factors are smallest; of equals
    # at the last place, because kernels have their outputs last.
    num_inputs = min(
      range(len(shape) - 1, 0, -1),
      key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]),
    )
    factorized[leaves[name]] = num_batch, num_batch + num_inputs
  return factorized, {leaves[name] for name in trained}


def _find(
  field: str, patterns: Sequence[str], names: Iterable[str]
) -> list[str]:
  """Returns the names in which a pattern is found, in their order."""
  names, found = list(names), set()
  for i, pattern in enumerate(patterns):
    where = f"lora: {field}[{i}]={pattern!r}"
    found.update(patterns_lib.find(where, pattern, "params", names))
  return [name for name in names if name in found]
