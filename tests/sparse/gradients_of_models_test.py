"""Sparse gradients of whole models, through `TrainState` and `Optimizer`."""

from typing import Any
import warnings

from flax import linen as nn
from flax import nnx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.core import indexed_slices

pytestmark = pytest.mark.slow

IDS = jnp.array([[1, 2, 1], [5, 0, 2]])


class Embedded(nn.Module):
  """An embedding and a layer."""

  dtype: Any = None

  @nn.compact
  def __call__(self, ids):
    x = nn.Embed(7, 3, dtype=self.dtype, name="embed")(ids)
    return nn.Dense(2, dtype=self.dtype)(x)


class Cell(nn.Module):
  """A cell with an embedding in it."""

  @nn.compact
  def __call__(self, carry, ids):
    x = nn.Embed(7, 3, name="embed")(ids)
    carry = nn.tanh(nn.Dense(3)(carry) + x)
    return carry, carry


class Scanned(nn.Module):
  """A scan over time whose turns share an embedding."""

  @nn.compact
  def __call__(self, ids):
    cell = nn.scan(
      nn.remat(Cell, prevent_cse=False),
      variable_broadcast="params",
      split_rngs={"params": False},
      in_axes=1,
      out_axes=1,
    )(name="cell")
    return cell(jnp.zeros((2, 3)), ids)[1]


class Layer(nn.Module):
  """A layer that looks up rows of a table of the whole model."""

  @nn.compact
  def __call__(self, carry):
    x, table = carry
    return nn.Dense(3)(x) + table[IDS], table


class Layers(nn.Module):
  """Layers in a `remat_scan`."""

  @nn.compact
  def __call__(self, ids):
    table = self.param("embed", nn.initializers.normal(), (7, 3))
    return nn.remat_scan(Layer, lengths=(2,))()((table[ids], table))[0]


class Tied(nn.Module):
  """An output layer with the weights of the embedding."""

  dtype: Any = None

  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(7, 3, dtype=self.dtype, name="embed")
    return embed.attend(embed(ids))


def states(model, tx=None, wrappers=()):
  """Returns a state with sparse gradients, and one without."""
  params = model.init(jax.random.key(0), IDS)["params"]
  tx = tx or optax.sgd(0.1)
  return [
    fs.TrainState.create(
      apply_fn=model.apply, params=params, tx=x, wrappers=wrappers
    )
    for x in (fs.sparse_rows(tx, ["embed"]), tx)
  ]


def gradients(state):
  def loss_fn(params):
    y = state.apply_fn({"params": params}, IDS)
    return (y.astype(jnp.float32) ** 2).mean()

  return state.value_and_grad(loss_fn)


MODELS = {
  "float16 with LossScale": (Embedded(jnp.float16), (fs.LossScale(256.0),)),
  "scan over time": (Scanned(), ()),
  "remat_scan over layers": (Layers(), ()),
}


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=[pytest.mark.slow] * ("scan" in x)) for x in MODELS],
)
def test_gradients_of_a_model_equal_those_of_jax(name):
  model, wrappers = MODELS[name]
  sparse, dense = states(model, wrappers=wrappers)
  (loss, grads), (want_loss, want) = jax.jit(
    lambda a, b: (gradients(a), gradients(b))
  )(sparse, dense)
  assert any(
    map(
      fs.is_indexed_slices, jax.tree.leaves(grads, is_leaf=fs.is_indexed_slices)
    )
  )
  np.testing.assert_array_equal(loss, want_loss)
  # jax.grad sums rows in 16 bits.
  rtol = 1e-6 if "16" not in name else 1e-2
  for got, wanted in zip(
    jax.tree.leaves(indexed_slices.to_dense(grads)),
    jax.tree.leaves(want),
    strict=True,
  ):
    assert got.dtype == wanted.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=1e-7)


def gathered(model, patterns):
  """Returns rows and dtypes of the arrays from which a step gathers rows."""
  state = fs.TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), IDS)["params"],
    tx=fs.sparse_rows(optax.sgd(0.1), patterns),
  )
  found = set()

  def visit(program):
    for eqn in program.eqns:
      if eqn.primitive.name == "gather":
        table = eqn.invars[0].aval
        found.add((table.shape[0], str(table.dtype)))
      for inner in jax.extend.core.jaxprs_in_params(eqn.params):
        visit(inner)

  visit(jax.make_jaxpr(lambda s: gradients(s)[1])(state).jaxpr)
  return found


def test_rows_are_cast_rather_than_the_table():
  assert gathered(Embedded(jnp.bfloat16), ["embed/"]) == {(7, "float32")}


def test_tied_output_layer_is_dense_with_one_warning():
  sparse, dense = states(Tied(jnp.bfloat16))
  with pytest.warns(UserWarning, match="embed/embedding") as caught:
    (_, grads), (_, want) = jax.jit(lambda a, b: (gradients(a), gradients(b)))(
      sparse, dense
    )
  (message,) = [str(w.message) for w in caught]
  assert "dot_general" in message and "gradients_of_models_test.py" in message
  # The gradient sums equal rows in bfloat16, as without patterns.
  np.testing.assert_array_equal(
    grads["embed"]["embedding"], want["embed"]["embedding"]
  )


def test_frozen_and_integer_parameters_have_no_gradient():
  params = {
    "table": jnp.ones((7, 3)),
    "frozen": jnp.ones((7, 3)),
    "count": jnp.int32(2),
  }
  tx = fs.sparse_rows(fs.freeze(optax.sgd(0.1), ["frozen"]), ["table"])
  state = fs.TrainState.create(apply_fn=None, params=params, tx=tx)
  (_, aux), grads = state.value_and_grad(
    lambda p: (
      (p["table"][IDS] * p["frozen"][IDS]).sum() * p["count"],
      p["count"],
    ),
    has_aux=True,
  )
  assert grads["frozen"] is None and grads["count"] is None
  assert int(aux) == 2
  assert grads["table"].indices.tolist() == IDS.ravel().tolist()
  assert grads["table"].values.tolist() == [[2.0] * 3] * 6


class Model(nnx.Module):
  """An embedding, a layer, and a count of calls."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 3, rngs=rngs)
    self.out = nnx.Linear(3, 2, rngs=rngs)
    self.calls = nnx.Variable(jnp.int32(0))

  def __call__(self, ids):
    self.calls[...] += 1
    return self.out(self.embed(ids))


def test_nnx_optimizer_updates_rows_of_embed():
  models, kinds = [], []
  wrappers = [fs.LossScale(8.0)]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for tx in (fs.sparse_rows(optax.sgd(0.1), ["embed"]), optax.sgd(0.1)):
      model = Model(nnx.Rngs(0))
      optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param, wrappers=wrappers)

      @nnx.jit
      def step(model, optimizer):
        loss_fn = lambda model: (model(IDS) ** 2).sum()
        _, grads = optimizer.value_and_grad(loss_fn)(model)
        kinds.append(type(grads["embed"]["embedding"].get_value()))
        optimizer.update(model, grads)

      step(model, optimizer)
      models.append(nnx.as_pure(nnx.state(model)))
  assert kinds[0] is fs.IndexedSlices and kinds[1] is not fs.IndexedSlices
  assert int(models[0]["calls"]) == 1
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *models
  )
