"""Purposes of collectives, read off programs for virtual CPU devices."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from flaxshard.compiled import collectives

MESH = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",))


def _loss(params, x):
  for w in params:
    x = jnp.tanh(x @ w)
  return (x**2).mean()


def _step(tx, state, batch):
  loss, grads = jax.value_and_grad(_loss)(state["params"], batch)
  updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
  params = optax.apply_updates(state["params"], updates)
  return {"params": params, "opt_state": opt_state}, {"loss": loss}


def _compile(params_spec, slots_spec, donate=True):
  tx = optax.adam(1e-3)
  params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
  state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
  specs = {"params": params_spec, "opt_state": slots_spec}

  def place(path, leaf):
    spec = specs[path[0].key] if leaf.ndim else P()
    sharding = jax.NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  state = jax.tree_util.tree_map_with_path(place, state)
  batch = jax.ShapeDtypeStruct(
    (2048, 64), jnp.float32, sharding=jax.NamedSharding(MESH, P("data"))
  )
  step = jax.jit(
    lambda state, batch: _step(tx, state, batch),
    donate_argnums=0 if donate else (),
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), None),
  )
  return step.lower(state, batch).compile()


@pytest.mark.parametrize("donate", [True, False])
def test_data_parallel_gradients(donate):
  # The loss is summed in the same all-reduce: most of its bytes are gradients.
  found = collectives(_compile(P(), P(), donate), MESH)
  assert [(c.kind, c.purpose) for c in found] == [("all-reduce", "gradients")]
  assert sorted(found[0].parameters) == ["0", "1"]
  assert found[0].operand_bytes == 2 * 64 * 64 * 4 + 4
  assert found[0].source.startswith("tests/compiled/purposes_test.py:")


def test_parameters_that_are_gathered():
  found = collectives(_compile(P("data"), P("data")), MESH)
  gathered = {
    c.parameters: c.result_bytes
    for c in found
    if (c.kind, c.purpose) == ("all-gather", "parameter")
  }
  assert gathered[("0",)] == 64 * 64 * 4
  reduced = [c for c in found if c.purpose == "gradients"]
  assert {name for c in reduced for name in c.parameters} == {"0", "1"}
  assert [c.operand_bytes for c in found if c.purpose == "metrics"] in ([4], [])


def test_updated_parameters_are_gathered_from_sharded_slots():
  found = collectives(_compile(P(), P("data")), MESH)
  gathered = [c for c in found if c.kind == "all-gather"]
  assert {c.purpose for c in gathered} == {"parameter"}
  assert {name for c in gathered for name in c.parameters} == {"0", "1"}
  reduced = [c for c in found if c.kind == "all-reduce"]
  assert {c.purpose for c in reduced} <= {"gradients", "metrics"}


def test_a_forward_pass_reduces_activations():
  def function(params, x):
    return x @ params["w"]

  params = {
    "w": jax.ShapeDtypeStruct(
      (64, 32), jnp.float32, sharding=jax.NamedSharding(MESH, P("data"))
    )
  }
  x = jax.ShapeDtypeStruct(
    (16, 64),
    jnp.float32,
    sharding=jax.NamedSharding(MESH, P(None, "data")),
  )
  out = jax.NamedSharding(MESH, P())
  compiled = jax.jit(function, out_shardings=out).lower(params, x).compile()
  (found,) = collectives(compiled, MESH)
  assert (found.purpose, found.parameters) == ("activations", ())
