"""A wrapper that changes nothing, for tests to build on."""

import dataclasses

import jax

P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True)
class Plain:
  """Changes nothing; the others override what they are about."""

  def init(self, params, tx):
    return ()

  def working_params(self, state, params):
    return params

  def scale_loss(self, state, loss):
    return loss

  def unscale_gradients(self, state, grads):
    return grads

  def apply(self, state, target, grads, next):
    return next(target, grads), state

  def partition_specs(self, state):
    return jax.tree.map(lambda _: P(), state)
