"""Optimizer states: slots are split as their parameters are."""

import jax
import jax.numpy as jnp
import optax
import pytest
import quadratic_states

import flaxshard as fs

P = jax.sharding.PartitionSpec
STRATEGY = fs.Strategy(mesh_shape={"replica": 4, "model": 2})


def shape(size, *spec):
  sharding = jax.sharding.NamedSharding(STRATEGY.mesh, P(*spec))
  return jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding)


# Adam's state has fields of these names. Each parameter has another spec.
PARAMS = {
  "count": shape((256, 512), "replica", "model"),
  "mu": {"count": shape((512,), "model"), "w": shape((4, 2), None, "model")},
}


def uses_the_parameters(params):
  first = jax.tree.leaves(params)[0]
  return {"m": jax.tree.map(jnp.zeros_like, params), "d": first.sum()}


CUSTOM = optax.GradientTransformation(
  uses_the_parameters, optax.identity().update
)


def label(params):
  return jax.tree.map(lambda p: "ab"[p.ndim - 1], params)


def slots(*fields, paths=("count", "mu/count", "mu/w"), before=()):
  """Returns the specs of parameters' slots by path."""
  specs = {
    "count": P(*before, "replica", "model"),
    "mu/count": P(*before, "model"),
    "mu/w": P(*before, None, "model"),
  }
  return {f"{field}/{path}": specs[path] for field in fields for path in paths}


OF_A, OF_B = (f"inner_states/{x}/inner_state/0" for x in "ab")


@pytest.mark.parametrize(
  ("tx", "wanted"),
  [
    (optax.sgd(0.1, momentum=0.9), slots("0/trace")),
    (optax.adamw(optax.constant_schedule(0.1)), slots("0/mu", "0/nu")),
    (
      optax.MultiSteps(optax.adam(0.1), 2),
      slots("inner_opt_state/0/mu", "inner_opt_state/0/nu", "acc_grads"),
    ),
    (
      optax.inject_hyperparams(optax.adam)(0.1),
      slots("inner_state/0/mu", "inner_state/0/nu"),
    ),
    (CUSTOM, slots("m")),
    (
      optax.multi_transform(
        {"a": optax.sgd(0.1, momentum=0.9), "b": optax.adam(0.1)}, label
      ),
      slots(f"{OF_A}/trace", paths=["mu/count"])
      | slots(f"{OF_B}/mu", f"{OF_B}/nu", paths=["count", "mu/w"]),
    ),
    # Statistics of rows and columns are not split.
    (optax.adafactor(0.1), slots("0/v", paths=["mu/count", "mu/w"])),
    # Several slots of a parameter are one array.
    (
      optax.scale_by_lbfgs(memory_size=3),
      slots("params", "updates")
      | slots("diff_params_memory", "diff_updates_memory", before=[None]),
    ),
  ],
)
def test_slots_are_split_as_their_parameters(tx, wanted):
  state = quadratic_states.create((), tx, PARAMS, strategy=STRATEGY)
  found = {
    jax.tree_util.keystr(path, simple=True, separator="/"): x.sharding.spec
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
  }
  assert {path: spec for path, spec in found.items() if spec != P()} == wanted
