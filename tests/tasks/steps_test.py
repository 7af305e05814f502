"""The train step and the eval step, on tiny models."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import scipy.special
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import tasks
from flaxshard.tasks import steps

X = np.array([[1.0, 2.0], [-0.5, 0.25], [3.0, -1.0], [0.0, 1.5]], np.float32)
LABELS = np.array([0, 2, 1, 2], np.int32)
BATCH = {"inputs": X, "labels": LABELS}
RNG = jax.random.key(0)

TASK = tasks.adapt(tasks.Classification(num_classes=5))
train_step = jax.jit(functools.partial(steps.train_step, TASK))
_eval_step = jax.jit(functools.partial(steps.eval_step, TASK))


class NormedDropped(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
    x = nn.Dense(32)(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(3)(x)


TX = optax.sgd(0.5)


@functools.cache
def create(model, tx=TX, wrappers=()):
  return fs.create_train_state(
    model, jax.random.key(1), X, tx, wrappers=wrappers
  )


def run(state, batches, first_step=1, progress=None, rng=RNG):
  if progress is None:
    progress = steps.init_progress(TASK, first_step - 1)
  for batch in batches:
    state, progress = train_step(state, progress, batch, rng)
  return state, progress


def linear(params, x=X):
  return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def assert_metrics(metrics, *batches):
  """Asserts the mean loss and accuracy over all (logits, labels) pairs."""
  logits, labels = (np.concatenate(x) for x in zip(*batches, strict=True))
  rows = scipy.special.log_softmax(logits, -1)
  wanted = {
    "loss": -rows[np.arange(len(labels)), labels].mean(),
    "accuracy": (np.argmax(logits, -1) == labels).mean(),
  }
  given = metrics.compute()
  assert given.keys() == wanted.keys()
  for key, value in wanted.items():
    np.testing.assert_allclose(given[key], value, rtol=1e-5, err_msg=key)


def with_inputs(value):
  inputs = X.copy()
  inputs[1, 0] = value
  return {**BATCH, "inputs": inputs}


def test_metrics_and_update_match_numpy():
  state = create(nn.Dense(3))
  before = jax.device_get(state.params)
  state, progress = run(state, [BATCH], 7)
  logits = linear(before)
  # Metrics are computed before the update.
  assert_metrics(progress.metrics, (logits, LABELS))
  assert int(progress.bad_step) == 0

  d_logits = (scipy.special.softmax(logits, -1) - np.eye(3)[LABELS]) / 4
  after = jax.device_get(state.params)
  for name, gradient in (("kernel", X.T @ d_logits), ("bias", d_logits.sum(0))):
    wanted = before[name] - 0.5 * gradient
    np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-6)

  # A batch of another size weighs by its labels.
  small = {"inputs": X[:1], "labels": LABELS[:1]}
  second = linear(after, X[:1]), LABELS[:1]
  state, progress = run(state, [small], progress=progress)
  assert_metrics(progress.metrics, (logits, LABELS), second)

  # Without a wrapper that skips it, a bad step is applied, and the first one
  # stays reported.
  state, progress = run(state, [with_inputs(np.inf)], progress=progress)
  assert int(state.step) == 3
  assert not np.all(np.isfinite(state.params["kernel"]))
  assert int(progress.bad_step) == 9
  _, progress = run(state, [BATCH, BATCH], progress=progress)
  assert int(progress.bad_step) == 9


def test_a_skipped_step_does_not_count_and_is_not_bad():
  scaled = (fs.LossScale("dynamic"),)
  state = create(NormedDropped(), optax.adam(0.1), scaled)
  state, progress = run(state, [BATCH])
  mean = jax.device_get(progress.metrics.compute())
  state_2, progress_2 = run(state, [with_inputs(np.inf)], progress=progress)

  assert int(state_2.step) == 1
  scale = state_2.wrapper_states["loss_scale"]
  assert (int(scale.skipped_steps), float(scale.scale)) == (1, 2.0**14)
  assert progress_2.metrics.compute() == mean
  assert int(progress_2.bad_step) == 0
  # Only the state of the loss scale has changed.
  for field in ("params", "opt_state", "batch_stats"):
    assert_trees_equal(getattr(state_2, field), getattr(state, field))

  # The next step is applied.
  state_3, progress_3 = run(state_2, [BATCH], progress=progress_2)
  assert int(state_3.step) == 2
  assert int(progress_3.metrics.loss.count) == 8
  assert np.isfinite(progress_3.metrics.compute()["loss"])


def test_dropout_depends_on_the_step_and_the_key():
  state = create(NormedDropped())

  def loss(step, rng=RNG):
    _, progress = run(state, [BATCH], step, rng=rng)
    return float(progress.metrics.compute()["loss"])

  assert loss(1) == loss(1)
  assert len({loss(1), loss(2), loss(3), loss(1, jax.random.key(9))}) == 4


def test_evaluation_takes_unmasked_examples_and_running_statistics():
  state, _ = jax.device_get(run(create(NormedDropped()), [BATCH]))
  stats, params = state.batch_stats["BatchNorm_0"], state.params
  x = (X - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
  x = x * params["BatchNorm_0"]["scale"] + params["BatchNorm_0"]["bias"]
  # Nothing is dropped.
  logits = linear(params["Dense_1"], linear(params["Dense_0"], x))

  def evaluate(metrics, mask, inputs=X):
    batch = {"inputs": inputs, "labels": LABELS, "mask": mask}
    return _eval_step(state, metrics, batch, RNG, 0)

  mask = np.array([True, True, False, True])
  # Padding may have any values.
  inputs = np.where(mask[:, None], X, np.nan)
  metrics = evaluate(TASK.metrics.empty(), mask, inputs)
  first = logits[mask], LABELS[mask]
  assert_metrics(metrics, first)
  # The mean is over the examples of all batches, not over batches.
  metrics = evaluate(metrics, ~mask)
  assert_metrics(metrics, first, (logits[~mask], LABELS[~mask]))
  metrics = evaluate(metrics, np.zeros(4, bool))
  assert int(metrics.loss.count) == 4


def test_each_replica_has_its_statistics_and_dropout_mask():
  """A step of two replicas is the mean of a step for each half of the batch."""
  state = create(NormedDropped())
  strategy = fs.Strategy(devices=jax.devices()[:2])
  progress = jax.tree.map(
    lambda x: fs.PerReplica(np.stack([x, x])), steps.init_progress(TASK, 4)
  )
  new_state, progress = strategy.run(
    functools.partial(steps.train_step, TASK),
    (state, progress, strategy.shard_batch(BATCH), RNG),
  )
  (first, progress_0), (second, progress_1) = (
    run(
      state,
      [{key: x[2 * i : 2 * i + 2] for key, x in BATCH.items()}],
      5,
      rng=jax.random.fold_in(RNG, i),
    )
    for i in (0, 1)
  )
  for field in ("params", "batch_stats"):
    found, *halves = (getattr(x, field) for x in (new_state, first, second))
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *jax.device_get(halves))
    assert_trees_close(found, mean)
  combine = jax.jit(steps.combine_replicas)
  together = combine(jax.device_get(progress))
  wanted = progress_0.metrics.merge(progress_1.metrics).compute()
  np.testing.assert_allclose(
    *([*x.values()] for x in (together.metrics.compute(), wanted)), rtol=1e-5
  )
  # The first bad step of all replicas is reported.
  for bad_steps, bad_step in (([0, 0], 0), ([9, 0], 9), ([9, 7], 7)):
    bad = progress._replace(bad_step=fs.PerReplica(np.array(bad_steps)))
    assert combine(jax.device_get(bad)).bad_step == bad_step
