"""Divides the parameters of a model into trained and frozen ones, for LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any
import zlib

from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp

from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.state import lora as lora_lib

PyTree = Any
P = jax.sharding.PartitionSpec

_Path = tuple[str, ...]


class LoRAError(ValueError):
  """A `LoRA` does not fit the parameters of a model."""


@dataclasses.dataclass(frozen=True)
class Split:
  """Division of a model's parameters into trained and frozen ones.

  Attributes:
    factorized: The kernels that get factors, each with the positions at which
      its input and its output dimensions begin.
    trained: The parameters that are trained as they are.
    rank: The rank of the factors.
  """

  factorized: Mapping[_Path, tuple[int, int]]
  trained: frozenset[_Path]
  rank: int

  def split_arrays(
    self, params: PyTree, key: jax.Array
  ) -> tuple[PyTree, PyTree]:
    """Returns the trained and the frozen parameters, with new factors.

    Args:
      params: The parameters of the model.
      key: The PRNG key of the factors.
    """
    trained: dict[_Path, Any] = {}
    frozen: dict[_Path, Any] = {}
    for path, x in trees.leaves_by_path(params).items():
      (trained if path in self.trained else frozen)[path] = x
      if path not in self.factorized:
        continue
      first_input, first_output = self.factorized[path]
      batch, outputs = x.shape[:first_input], x.shape[first_output:]
      inputs = x.shape[first_input:first_output]
      # By path: further patterns do not change the other factors.
      seed = zlib.crc32("/".join(path).encode())
      noise = jax.random.normal(
        jax.random.fold_in(key, seed), (*batch, *inputs, self.rank), x.dtype
      )
      trained[*path, lora_lib.FACTORS[0]] = noise / math.sqrt(math.prod(inputs))
      trained[*path, lora_lib.FACTORS[1]] = jnp.zeros(
        (*batch, self.rank, *outputs), x.dtype
      )
    return (
      traverse_util.unflatten_dict(trained),
      traverse_util.unflatten_dict(frozen),
    )

  def split_specs(self, specs: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the PartitionSpecs of the trained and the frozen parameters.

    The factors are split as those dimensions of their kernel that they have.

    Args:
      specs: The PartitionSpecs of the model's parameters.
    """
    trained: dict[_Path, P] = {}
    frozen: dict[_Path, P] = {}
    flat = jax.tree_util.tree_leaves_with_path(
      specs, is_leaf=lambda x: isinstance(x, P)
    )
    for key_path, spec in flat:
      path = trees.path_strings(key_path)
      (trained if path in self.trained else frozen)[path] = spec
      if path in self.factorized:
        first_input, first_output = self.factorized[path]
        # A spec may be shorter than the shape: missing entries are None.
        dims = (*spec, *[None] * (first_output - len(spec)))
        trained[*path, lora_lib.FACTORS[0]] = _shortest(
          (*dims[:first_output], None)
        )
        trained[*path, lora_lib.FACTORS[1]] = _shortest(
          (*dims[:first_input], None, *dims[first_output:])
        )
    return (
      traverse_util.unflatten_dict(trained),
      traverse_util.unflatten_dict(frozen),
    )


def plan_split(lora: lora_lib.LoRA, params: PyTree) -> Split:
  """Decides which parameters of a model are trained.

  Args:
    lora: The configuration.
    params: Shapes of the model's parameters.

  Raises:
    LoRAError: A pattern matches no parameter, or a kernel cannot have factors
      of that rank.
  """
  if OVERWRITE_WITH_GRADIENT in params:
    raise LoRAError(
      "the model has fp8 layers, whose scales are updated with gradients "
      "of the kernels. Use layers without fp8."
    )
  by_path = trees.leaves_by_path(params)
  names = {"/".join(path): path for path in by_path}
  trained = _find("train", lora.train, names)
  with_factors = _find("patterns", lora.patterns, names)
  batch_patterns = [pattern for pattern, _ in lora.batch_dims]
  _find("batch_dims", batch_patterns, with_factors)
  factorized: dict[_Path, tuple[int, int]] = {}
  for name in with_factors:
    if name in trained:
      raise LoRAError(
        f"{name} is found by patterns={lora.patterns!r} and by "
        f"train={lora.train!r}: a parameter is trained as it is or has factors."
      )
    x = by_path[names[name]]
    i = patterns_lib.first_match(batch_patterns, name)
    num_batch = 0 if i is None else lora.batch_dims[i][1]
    shape = x.shape[num_batch:]
    if len(shape) < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
      beside = "" if i is None else f" beside {num_batch} batch dimensions"
      raise LoRAError(
        f"patterns={lora.patterns!r} finds {name}, a {x.dtype} of shape "
        f"{tuple(x.shape)}; factors are for floating-point parameters with two "
        f"dimensions or more{beside}. train=... trains it as it is."
      )
    num_inputs = _num_inputs(shape)
    smaller = min(math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:]))
    if lora.rank > smaller:
      raise LoRAError(
        f"rank={lora.rank} is above {smaller}, the rank of {name} of "
        f"shape {tuple(x.shape)}. Use a lower rank, patterns without it, or "
        "train=... to train it as it is."
      )
    factorized[names[name]] = num_batch, num_batch + num_inputs
  return Split(factorized, frozenset(names[n] for n in trained), lora.rank)


def factor_key(rng: Any) -> Any:
  """Returns the PRNG key of the factors, from the `rng` of a creation.

  Raises:
    TypeError: There is no key.
  """
  if isinstance(rng, Mapping) and rng:
    return rng["params"] if "params" in rng else next(iter(rng.values()))
  if not jax.tree.leaves(rng):
    raise TypeError(
      f"rng must be a PRNG key or a dict of keys, got {rng!r}: lora=... "
      "initializes factors with it."
    )
  return rng


def _num_inputs(shape: Sequence[int]) -> int:
  """Returns how many dimensions are inputs: where the factors are smallest."""
  counts = range(1, len(shape))
  # The last of equals: kernels have their outputs last.
  return min(
    reversed(counts),
    key=lambda i: math.prod(shape[:i]) + math.prod(shape[i:]),
  )


def _find(
  field: str, patterns: Sequence[str], names: Iterable[str]
) -> list[str]:
  """Returns the names in which a pattern is found, in their order."""
  names = list(names)
  for i, pattern in enumerate(patterns):
    where = f"{field}[{i}]={pattern!r}"
    try:
      patterns_lib.find(where, pattern, "params", names)
    except patterns_lib.PatternError as e:
      raise LoRAError(str(e)) from e
  return [n for n in names if patterns_lib.first_match(patterns, n) is not None]


def _shortest(dims: Sequence[Any]) -> P:
  """Returns a PartitionSpec without Nones at its end."""
  dims = list(dims)
  while dims and dims[-1] is None:
    dims.pop()
  return P(*dims)
