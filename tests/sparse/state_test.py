"""States with row-sparse updates: checkpoints, NNX, configs and errors."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.core import indexed_slices
from flaxshard.train import config as config_lib

pytestmark = pytest.mark.slow

SHAPE = (12, 3)
RATE = optax.linear_schedule(0.1, 0.0, 10)
TX = optax.adam(RATE)


def create(semantics=None, tx=TX, **kwargs):
  params = {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}
  if semantics:
    kwargs |= {"sparse": ["table"], "sparse_semantics": semantics}
  return fs.TrainState.create(apply_fn=None, params=params, tx=tx, **kwargs)


def create_grads(ids):
  slices = fs.IndexedSlices(ids, jnp.ones((len(ids), 3)), SHAPE)
  return {"table": slices, "bias": jnp.ones(3)}


def assert_equal(new, wanted):
  assert jax.tree.structure(new) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  "saved,wanted",
  [
    ("lazy", None),
    (None, "catch_up"),
    pytest.param(None, "lazy", marks=pytest.mark.slow),
    pytest.param("catch_up", "catch_up", marks=pytest.mark.slow),
  ],
)
def test_checkpoint_is_restored_with_other_semantics(tmp_path, saved, wanted):
  state = create(saved)
  for ids in ([1, 2], [2, 5]):
    grads = create_grads(ids)
    if not saved:
      grads = indexed_slices.to_dense(grads)
    state = state.apply_gradients(grads=grads)
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(2, state)
    restored = checkpointer.restore(create(wanted))
  assert_equal(restored.params, state.params)
  if saved == wanted or wanted != "catch_up":
    assert_equal(restored.opt_state, state.opt_state)
    return
  assert_equal(restored.opt_state.inner, state.opt_state)
  # All rows are up to date.
  settled = restored.tx.settle(restored.params, restored.opt_state)
  assert_equal(settled, (restored.params, restored.opt_state))


def test_checkpoint_of_catch_up_needs_catch_up(tmp_path):
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(0, create("catch_up"))
    with pytest.raises(ValueError, match=r"catch_up.*not up to date.*settle"):
      checkpointer.restore(create("lazy"))


@pytest.mark.parametrize("wrappers", [(), (fs.LossScale(1.0),)])
def test_nnx_optimizer_updates_rows(wrappers):
  class Model(nnx.Module):
    def __init__(self):
      self.embed = nnx.Embed(*SHAPE, rngs=nnx.Rngs(0))

    def __call__(self, ids):
      return self.embed(ids).sum()

  def train(tx):
    model = Model()
    optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param, wrappers=wrappers)

    @nnx.jit
    def step(model, optimizer, ids):
      loss_fn = lambda model, ids: model(ids) ** 2
      _, grads = optimizer.value_and_grad(loss_fn)(model, ids)
      optimizer.update(model, grads)

    step(model, optimizer, jnp.array([1, 2, 1]))
    return model.embed.embedding[...]

  dense = train(optax.adam(0.1))
  rows = train(fs.sparse_rows(optax.adam(0.1), ["embedding"]))
  np.testing.assert_allclose(rows, dense, rtol=1e-6)


def test_nnx_eval_params_have_the_weight_decay_of_all_steps():
  model = nnx.Embed(*SHAPE, rngs=nnx.Rngs(0))
  tx = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.5))
  tx = fs.sparse_rows(tx, ["embedding"], "catch_up")
  optimizer = fs.nnx.Optimizer(model, tx, wrt=nnx.Param)
  before = np.asarray(model.embedding[...])
  _, grads = optimizer.value_and_grad(lambda m: 0 * m(jnp.array([1])).sum())(
    model
  )
  optimizer.update(model, grads)
  np.testing.assert_array_equal(model.embedding[...][0], before[0])
  average = nnx.clone(model)
  nnx.update(average, optimizer.eval_params(model))
  np.testing.assert_allclose(average.embedding[...], 0.75 * before, rtol=1e-6)


def test_config_names_tables_and_semantics():
  data = {
    "model": {"name": "cnn"},
    "data": {"name": "digits"},
    "batch_size": 8,
    "num_train_steps": 1,
    "learning_rate": 0.1,
  }
  config = config_lib.check(
    {**data, "sparse": ["embed/"], "sparse_semantics": "catch_up"}
  )
  assert config.sparse == ("embed/",)
  assert config.sparse_semantics == "catch_up"
  with pytest.raises(ValueError, match=r"sparse_semantics.*'lasy'.*lazy"):
    config_lib.check({**data, "sparse_semantics": "lasy"})


@pytest.mark.parametrize(
  "kwargs,message",
  [
    ({"sparse": ["tabel"]}, r"sparse\[0\]='tabel' matches no.*table.*mean"),
    ({"sparse": ["bias"]}, r"sparse\[0\]='bias'.*bias, float32\[3\].*two"),
    ({"sparse": ["ids"]}, r"sparse\[0\]='ids'.*ids, int32.*floating"),
    ({"sparse": ["table"], "sparse_semantics": "lasy"}, "'lasy'.*'lazy'"),
    ({"sparse_semantics": "tf"}, "sparse_semantics='tf' needs sparse"),
    (
      {"sparse": ["table"], "tx": fs.freeze(optax.sgd(1.0), ["table"])},
      r"sparse\[0\]='table' matches frozen",
    ),
    (
      {"sparse": ["table"], "tx": fs.sparse_rows(optax.sgd(1.0), ["t"])},
      "by rows already",
    ),
    (
      {
        "sparse": ["table"],
        "tx": optax.lookahead(optax.sgd(1.0), 2, 0.5),
        "params": optax.LookaheadParams.init_synced({"table": jnp.ones(SHAPE)}),
      },
      "optax.lookahead",
    ),
  ],
)
def test_invalid_tables_raise(kwargs, message):
  params = {"table": jnp.ones(SHAPE), "bias": jnp.ones(3)}
  given = {"params": params | {"ids": jnp.zeros(SHAPE, int)}, "tx": TX}
  with pytest.raises(ValueError, match=message):
    fs.TrainState.create(apply_fn=None, **given | kwargs)


@pytest.mark.parametrize("wrap", [fs.freeze, fs.scale_learning_rates])
def test_sparse_rows_goes_around_other_groups(wrap):
  tx = fs.sparse_rows(optax.sgd(1.0), ["table"])
  arguments = ["bias"] if wrap is fs.freeze else [("bias", 2.0)]
  with pytest.raises(ValueError, match="sparse_rows last"):
    wrap(tx, arguments)


def test_multi_steps_gets_whole_gradients():
  tx = optax.MultiSteps(optax.adam(0.1), 2)
  with pytest.warns(UserWarning, match=r"MultiStepsState.*whole"):
    state = create("lazy", tx)
  dense = create(None, tx)
  for ids in ([1, 2], [2, 5]):
    grads = create_grads(ids)
    state = state.apply_gradients(grads=grads)
    dense = dense.apply_gradients(grads=indexed_slices.to_dense(grads))
  assert_equal(state.params, dense.params)
  assert_equal(state.opt_state, dense.opt_state)


def test_tf_equals_whole_gradients_with_adam_bit_for_bit():
  step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  state, dense = create("tf"), create()
  for ids in ([1, 2, 1], [2, 5, 0]):
    grads = create_grads(ids)
    state = step(state, grads)
    dense = step(dense, indexed_slices.to_dense(grads))
  assert_equal(state.params, dense.params)
  assert_equal(state.opt_state, dense.opt_state)


@pytest.mark.parametrize("semantics", ["lazy", "catch_up"])
def test_update_has_no_temporary_array_of_the_size_of_a_table(semantics):
  shape, size = (100_000, 16), 256
  make = lambda: fs.TrainState.create(
    apply_fn=None,
    params={"table": jnp.zeros(shape)},
    tx=optax.adamw(RATE),
    wrappers=[fs.LossScale("dynamic")],
    sparse=["table"],
    sparse_semantics=semantics,
  )
  step = lambda state, ids, rows: state.apply_gradients(
    grads={"table": fs.IndexedSlices(ids, rows, shape)}
  )
  compiled = (
    jax.jit(step, donate_argnums=0)
    .lower(
      jax.eval_shape(make),
      jax.ShapeDtypeStruct((size,), jnp.int32),
      jax.ShapeDtypeStruct((size, shape[1]), jnp.float32),
    )
    .compile()
  )
  table = 4 * shape[0] * shape[1]
  assert compiled.memory_analysis().temp_size_in_bytes < table / 4
