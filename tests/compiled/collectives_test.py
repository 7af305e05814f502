"""Collectives of programs that are compiled for virtual CPU devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.compiled import collectives


def _mesh(shape, names, devices=None):
  devices = np.array(devices or jax.devices()[:8])
  return jax.sharding.Mesh(devices.reshape(shape), names)


def _compile(function, mesh, spec, shape=(8, 4)):
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False
  )
  x = jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec)
  )
  return jax.jit(mapped).lower(x).compile()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_axes_and_bytes_of_an_all_reduce(order, axes):
  mesh = _mesh((4, 2), ("a", "b"), jax.devices()[:8][::order])
  compiled = _compile(lambda x: jax.lax.psum(x, axes), mesh, P(("a", "b")))
  (found,) = collectives(compiled, mesh)
  size = {("a",): 4, ("b",): 2, ("a", "b"): 8}[axes]
  assert (found.kind, found.dtype, found.axes) == ("all-reduce", "f32", axes)
  assert (found.operand_bytes, found.group_size) == (16, size)
  assert (found.network, found.executions) == ("ici", 1)
  assert found.link_bytes == pytest.approx(2 * (size - 1) / size * 16)
  assert not found.in_conditional


def test_a_loop_multiplies_the_executions():
  mesh = _mesh((8,), ("a",))

  def function(x):
    return jax.lax.fori_loop(0, 5, lambda _, y: jax.lax.psum(y, "a") * 0.1, x)

  (found,) = collectives(_compile(function, mesh, P("a")), mesh)
  assert (found.executions, found.trip_count_known) == (5, True)


def test_a_branch_is_conditional_unless_all_branches_have_it():
  mesh = _mesh((8,), ("a",))
  psum = lambda x: jax.lax.psum(x, "a")

  def function(x):
    yes = x[0, 0] > 0
    once = jax.lax.cond(yes, lambda x: psum(x * 2), lambda x: x, x)
    always = jax.lax.cond(
      yes, lambda x: psum(x[:, :2] * 3), lambda x: psum(x[:, :2] + 1), x
    )
    return once.sum() + always.sum()

  found = collectives(_compile(function, mesh, P("a")), mesh)
  by_bytes = {c.operand_bytes: c.in_conditional for c in found}
  assert by_bytes == {16: True, 8: False}
  assert len(found) == 2
  assert not any(c.in_commit for c in found)


def test_only_a_commit_runs_once_in_a_period():
  # LossScale's conditional, which decides whether to skip a step, is around
  # AGN's.
  strategy = fs.Strategy(devices=jax.devices()[:2])
  x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
  state = fs.create_train_state(
    nn.Dense(2),
    jax.random.key(0),
    x,
    optax.sgd(0.1),
    strategy=strategy,
    wrappers=[fs.LossScale(), fs.AGN(communication_period=4)],
    abstract=True,
  )

  def step(state, x):
    loss = lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)
    return state.minimize(loss)

  lowered = strategy.jit(step).lower(state, strategy.shard_batch(x))
  found = collectives(lowered.compile(), strategy.mesh)
  assert {c.in_conditional for c in found if c.in_commit} == {True}
  # Whether all gradients are finite is reduced in every step.
  assert {(c.in_commit, c.executions_per_step(4)) for c in found} == {
    (True, 0.25),
    (False, 1),
  }


def test_a_mesh_of_another_size_is_an_error():
  mesh = _mesh((8,), ("a",))
  compiled = _compile(lambda x: jax.lax.psum(x, "a"), mesh, P("a"))
  other = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("a",))
  with pytest.raises(ValueError, match=r"4 devices.*8 devices"):
    collectives(compiled, other)
  with pytest.raises(TypeError, match="mesh must be"):
    collectives(compiled, "data")
