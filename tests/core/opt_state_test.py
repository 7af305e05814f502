"""Optimizer states: slots follow their parameters, step counts are found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees

P = jax.sharding.PartitionSpec
PARAMS = {
  "a": {"kernel": jnp.ones((256, 512)), "bias": jnp.ones(512)},
  "kernel": jnp.ones((4, 2)),
}
SPECS = {
  "a": {"kernel": P("replica", "model"), "bias": P("model")},
  "kernel": P(None, "model"),
}
A, BIAS, KERNEL = SPECS["a"]["kernel"], SPECS["a"]["bias"], SPECS["kernel"]


def matrices(params):
  return jax.tree.map(lambda p: p.ndim > 1, params)


def uses_the_parameters(params):
  first = jax.tree.leaves(params)[0]
  return {"m": jax.tree.map(jnp.zeros_like, params), "d": first.sum()}


OPTIMIZERS = {
  "momentum": (optax.sgd(0.1, momentum=0.9), 1),
  "schedule": (optax.adamw(optax.constant_schedule(0.1)), 2),
  "multi_steps": (optax.MultiSteps(optax.adam(0.1), 2), 3),
  "inject": (optax.inject_hyperparams(optax.adam)(0.1), 2),
  "schedule_free": (optax.contrib.schedule_free_adamw(0.1), 2),
  "custom": (optax.GradientTransformation(uses_the_parameters, None), 1),
}


def specs_of(tx):
  state = jax.eval_shape(tx.init, PARAMS)
  specs = opt_state_lib.specs(state, PARAMS, SPECS)
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  return state, specs


@pytest.mark.parametrize(("tx", "copies"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_follow_their_parameters(tx, copies):
  state, specs = specs_of(tx)
  split = [spec for spec in jax.tree.leaves(specs) if spec != P()]
  assert sorted(map(str, split)) == sorted(map(str, [A, BIAS, KERNEL] * copies))
  leaves = zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True)
  assert {leaf.shape for leaf, spec in leaves if spec == A} == {(256, 512)}


def test_slots_of_several_optimizers():
  label = lambda p: jax.tree.map(lambda m: "m" if m else "v", matrices(p))
  tx = optax.multi_transform(
    {"m": optax.adam(0.1), "v": optax.sgd(0.1, momentum=0.9)}, label
  )
  _, specs = specs_of(tx)
  assert specs.inner_states["m"].inner_state[0].nu["a"]["kernel"] == A
  assert specs.inner_states["v"].inner_state[0].trace["a"]["bias"] == BIAS


def test_factored_slots_are_replicated():
  state, specs = specs_of(optax.adafactor(0.1, min_dim_size_to_factor=128))
  assert state[0].v_row["a"]["kernel"].shape == (256,)
  assert specs[0].v_row["a"]["kernel"] == P()
  assert specs[0].v_col["a"]["kernel"] == P()
  # Slots that are not factored have the shape of the parameter.
  assert specs[0].v["a"]["bias"] == BIAS
  assert specs[0].v["kernel"] == KERNEL


def test_slots_with_leading_dimensions():
  state, specs = specs_of(optax.scale_by_lbfgs(memory_size=3))
  memory = "diff_params_memory"
  assert getattr(state, memory)["a"]["kernel"].shape == (3, 256, 512)
  assert getattr(specs, memory)["a"]["kernel"] == P(None, "replica", "model")
  assert getattr(specs, memory)["a"]["bias"] == P(None, "model")
  assert specs.params["a"]["kernel"] == A


def test_a_parameter_named_as_a_field_of_the_optimizer():
  # Adam's state has the fields `count` and `mu`.
  params = {
    "count": jnp.ones((4, 2)),
    "mu": {"count": jnp.ones((4, 2))},
    "w": jnp.ones((4, 2)),
  }
  state = optax.adam(optax.constant_schedule(0.1)).init(params)
  names = trees.names(state)
  found = [
    parameter and trees.path_string(parameter)
    for parameter in opt_state_lib.parameters_of(state, params)
  ]
  assert dict(zip(names, found, strict=True)) == {
    "0/count": None,
    "0/mu/count": "count",
    "0/mu/mu/count": "mu/count",
    "0/mu/w": "w",
    "0/nu/count": "count",
    "0/nu/mu/count": "mu/count",
    "0/nu/w": "w",
    "1/count": None,
  }


def test_counts_are_found_and_replaced():
  state = optax.adam(optax.constant_schedule(0.1)).init(PARAMS)
  assert sorted(opt_state_lib.counts(state)) == ["0/count", "1/count"]
  new = opt_state_lib.with_counts(state, {"0/count": jnp.int32(7)})
  assert (int(new[0].count), int(new[1].count)) == (7, 0)
  jax.tree.map(np.testing.assert_array_equal, new[0].mu, state[0].mu)
