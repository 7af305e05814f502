"""A train step that does not read the mask of a padded batch (mistake 34)."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.strategy.unread_inputs import reads_inputs

STRATEGY = fs.Strategy()
X = np.arange(9, dtype=np.float32)


@pytest.fixture(scope="module")
def state():
  return fs.TrainState.create(
    apply_fn=lambda params, x: params["w"] * x,
    params={"w": jnp.float32(1.0)},
    tx=optax.sgd(0.01),
    strategy=STRATEGY,
  )


def masked_mean(losses, mask):
  count = fs.get_replica_context().all_reduce("mean", mask.sum())
  return (losses * mask).sum() / count


def step(mean):
  """Returns a train step that takes the mean of its losses by `mean`."""

  def train_step(state, batch):
    def loss_fn(params):
      losses = state.apply_fn(params, batch["x"]) ** 2
      return mean(losses, batch["mask"])

    _, grads = state.value_and_grad(loss_fn)
    return state.apply_gradients(grads=grads)

  return train_step


def batches(sizes, **options):
  return STRATEGY.distribute_dataset([{"x": X[:n]} for n in sizes], **options)


@pytest.mark.parametrize("jit", [False, True])
def test_step_that_ignores_the_mask_of_a_padded_batch_warns_once(state, jit):
  train_step = step(lambda losses, mask: losses.mean())
  if jit:
    train_step = jax.jit(train_step)
  with warnings.catch_warnings(action="error"):
    for batch in batches([8, 8]):
      STRATEGY.run(train_step, args=(state, batch))
  with pytest.warns(UserWarning) as caught:
    for batch in batches([8, 5, 3]):
      STRATEGY.run(train_step, args=(state, batch))
  (warning,) = caught
  assert warning.filename == __file__
  for fact in ("1/mask", "drop_remainder", "all_reduce"):
    assert fact in str(warning.message)


def test_step_that_reads_the_mask_does_not_warn(state):
  train_step = step(masked_mean)
  (batch,) = batches([9])
  with warnings.catch_warnings(action="error"):
    new = STRATEGY.run(train_step, args=(state, batch))
  gradient = 2 * (X**2).mean()
  np.testing.assert_allclose(new.params["w"], 1 - 0.01 * gradient, rtol=1e-5)


def test_evaluation_that_ignores_the_mask_does_not_warn(state):
  # The caller may apply the mask to the results.
  predict = lambda state, batch: state.apply_fn(state.params, batch["x"])
  (batch,) = batches([9])
  with warnings.catch_warnings(action="error"):
    STRATEGY.run(predict, args=(state, batch))


def test_run_steps_that_ignore_the_mask_of_a_padded_batch_warn(state):
  ignores = step(lambda losses, mask: losses.mean())
  with warnings.catch_warnings(action="error"):
    STRATEGY.run_steps(step(masked_mean), state, list(batches([8, 5])))
    STRATEGY.run_steps(ignores, state, list(batches([8, 8])))
  with pytest.warns(UserWarning, match="padding.* argument 1/mask"):
    STRATEGY.run_steps(ignores, state, list(batches([8, 5])))


def test_masks_that_the_user_gives_do_not_warn_without_padding(state):
  train_step = step(lambda losses, mask: losses.mean())
  batch = {"x": X[:8], "mask": np.arange(8) < 5}
  (batch,) = STRATEGY.distribute_dataset([batch])
  with warnings.catch_warnings(action="error"):
    STRATEGY.run(train_step, args=(state, batch))


def test_inputs_that_inner_programs_read_are_read():
  def f(a, b, c, d):
    def body(carry, x):
      return carry + x[0], None

    total, _ = jax.lax.scan(body, 0.0, (a, b))
    return jax.jit(lambda x, y: x)(total, c), d

  args = jnp.ones((4, 3))
  assert reads_inputs(jax.make_jaxpr(f)(*args)) == [True, False, False, True]
