"""Averages the extra arguments of an optimizer over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.replicas import context as replica_context

PyTree = Any


def mean_over_replicas(extra: Mapping[str, Any]) -> dict[str, Any]:
  """Averages the loss, its gradients and its function over the replicas.

  Args:
    extra: Extra arguments by name: `value`, `grad`, `value_fn`, and others,
      which stay as they are.
  """
  reduced = dict(extra)
  if "value" in extra:
    value = jnp.asarray(extra["value"])
    reduced["value"] = replica_context.mean_collection(value)
  if "grad" in extra:
    reduced["grad"] = replica_context.reduce_gradients("mean", extra["grad"])
  if "value_fn" in extra:
    reduced["value_fn"] = _mean_of(extra["value_fn"])
  return reduced


def _mean_of(value_fn: Callable[..., Any]) -> Callable[..., jax.Array]:
  """Returns a function whose value and gradient are means over the replicas."""

  # optax looks at the signature for further arguments.
  @functools.wraps(value_fn)
  def mean_value(params: PyTree, *args: Any, **kwargs: Any) -> jax.Array:
    def local(params: PyTree) -> jax.Array:
      return jnp.asarray(value_fn(params, *args, **kwargs))

    # JAX differentiates a mean over replicas as if each had its own parameters.
    @jax.custom_vjp
    def mean(params: PyTree) -> jax.Array:
      return replica_context.mean_collection(local(params))

    def forward(params: PyTree) -> tuple[jax.Array, PyTree]:
      value, grads = jax.value_and_grad(local)(params)
      return (
        replica_context.mean_collection(value),
        replica_context.reduce_over_replicas("mean", grads),
      )

    def backward(grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
      return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), grads),)

    mean.defvjp(forward, backward)
    return mean(params)

  return mean_value
