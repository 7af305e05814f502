"""The train step and the eval step, on tiny models."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import tasks
from flaxshard.train import steps

X = np.array([[1.0, 2.0], [-0.5, 0.25], [3.0, -1.0], [0.0, 1.5]], np.float32)
LABELS = np.array([0, 2, 1, 2], np.int32)
BATCH = {"inputs": X, "labels": LABELS}
RNG = jax.random.key(0)

TASK = tasks.adapt(tasks.Classification(num_classes=5))
Metrics = TASK.metrics
train_step = jax.jit(functools.partial(steps.train_step, TASK))
_eval_step = jax.jit(functools.partial(steps.eval_step, TASK))


def eval_step(state, metrics, batch):
  return _eval_step(state, metrics, batch, RNG, 0)


class NormedDropped(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
    x = nn.Dense(32)(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(3)(x)


SGD = optax.sgd(0.5)
DYNAMIC = (fs.LossScale("dynamic"),)


# Cached: the step of one state is compiled once.
@functools.cache
def create(model=nn.Dense(3), tx=SGD, wrappers=()):  # noqa: B008
  return fs.create_train_state(
    model, jax.random.key(1), X, tx, wrappers=wrappers
  )


def run(state, batches, first_step=1, progress=None):
  if progress is None:
    progress = steps.init_progress(TASK, first_step - 1)
  for batch in batches:
    state, progress = train_step(state, progress, batch, RNG)
  return state, progress


def linear(params, x=X):
  return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def mean_metrics(batches_logits):
  """The mean loss and accuracy over all labels of (logits, labels) pairs."""
  losses = [
    -np.log(scipy.special.softmax(logits, -1))[np.arange(len(labels)), labels]
    for logits, labels in batches_logits
  ]
  correct = [
    np.argmax(logits, -1) == labels for logits, labels in batches_logits
  ]
  mean = lambda parts: np.concatenate([p.ravel() for p in parts]).mean()
  return {"loss": mean(losses), "accuracy": mean(correct)}


def assert_metrics(metrics, wanted, rtol=1e-5):
  given = metrics.compute()
  assert sorted(given) == ["accuracy", "loss"]
  for key, value in wanted.items():
    np.testing.assert_allclose(given[key], value, rtol=rtol, err_msg=key)


def with_inputs(value):
  inputs = X.copy()
  inputs[1, 0] = value
  return {**BATCH, "inputs": inputs}


# Training.


def test_metrics_and_update_match_numpy():
  state = create()
  before = jax.device_get(state.params)
  new_state, progress = run(state, [BATCH])
  logits = linear(before)
  # Metrics are computed before the update.
  assert_metrics(progress.metrics, mean_metrics([(logits, LABELS)]))
  assert int(progress.bad_step) == 0

  d_logits = (scipy.special.softmax(logits, -1) - np.eye(3)[LABELS]) / 4
  assert int(new_state.step) == 1
  after = jax.device_get(new_state.params)
  for name, gradient in (("kernel", X.T @ d_logits), ("bias", d_logits.sum(0))):
    wanted = before[name] - 0.5 * gradient
    np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-6)

  # A batch of another size weighs by its labels.
  small = {"inputs": X[:1], "labels": LABELS[:1]}
  _, progress = run(new_state, [small], progress=progress)
  second = linear(after, X[:1]), LABELS[:1]
  assert_metrics(progress.metrics, mean_metrics([(logits, LABELS), second]))


def test_a_skipped_step_does_not_count_and_is_not_bad():
  state = create(NormedDropped(), optax.adam(0.1), DYNAMIC)
  state, progress = run(state, [BATCH])
  mean = jax.device_get(progress.metrics.compute())
  state_2, progress_2 = run(state, [with_inputs(np.inf)], progress=progress)

  assert int(state_2.step) == 1
  scale = state_2.wrapper_states["loss_scale"]
  assert (int(scale.skipped_steps), float(scale.scale)) == (1, 2.0**14)
  assert progress_2.metrics.compute() == mean
  assert int(progress_2.metrics.loss.count) == 4
  assert int(progress_2.bad_step) == 0
  # Only the state of the loss scale has changed.
  for field in ("params", "opt_state", "batch_stats"):
    assert_trees_equal(getattr(state_2, field), getattr(state, field))

  # The next step is applied.
  state_3, progress_3 = run(state_2, [BATCH], progress=progress_2)
  assert int(state_3.step) == 2
  assert int(progress_3.metrics.loss.count) == 8
  assert np.isfinite(progress_3.metrics.compute()["loss"])


def test_the_first_bad_step_is_reported():
  state, progress = run(create(), [BATCH], 7)
  assert int(progress.bad_step) == 0
  state, progress = run(state, [with_inputs(np.inf)], progress=progress)
  # Without a wrapper that skips it, the step is applied.
  assert int(state.step) == 2
  assert not np.all(np.isfinite(state.params["kernel"]))
  assert int(progress.bad_step) == 8
  # Of later bad steps, the first one stays reported.
  _, progress = run(state, [BATCH, BATCH], progress=progress)
  assert int(progress.bad_step) == 8


def test_dropout_depends_on_the_step_and_the_key():
  state = create(NormedDropped())

  def loss(step, rng=RNG):
    progress = steps.init_progress(TASK, step - 1)
    _, progress = train_step(state, progress, BATCH, rng)
    return float(progress.metrics.compute()["loss"])

  assert loss(1) == loss(1)
  assert len({loss(1), loss(2), loss(3), loss(1, jax.random.key(9))}) == 4


# Evaluation.


def test_evaluation_ignores_masked_examples():
  state = create()
  metrics = Metrics.empty()
  mask = np.array([True, True, False, True])
  # Padding may have any values.
  inputs = X.copy()
  inputs[2] = np.nan
  batch = {"inputs": inputs, "labels": LABELS, "mask": mask}
  metrics = eval_step(state, metrics, batch)
  logits = linear(state.params)
  wanted = [(logits[mask], LABELS[mask])]
  assert_metrics(metrics, mean_metrics(wanted))

  # The mean is over the examples of all batches, not over batches.
  last = np.array([False, False, True, False])
  metrics = eval_step(state, metrics, {**BATCH, "mask": last})
  wanted += [(logits[last], LABELS[last])]
  assert_metrics(metrics, mean_metrics(wanted))
  assert int(metrics.loss.count) == 4
  nothing = np.zeros(4, bool)
  metrics = eval_step(state, metrics, {**BATCH, "mask": nothing})
  assert_metrics(metrics, mean_metrics(wanted))


def test_evaluation_uses_running_statistics_and_no_dropout():
  batch = {**BATCH, "mask": np.ones(4, bool)}
  state, _ = run(create(NormedDropped()), [BATCH])
  metrics = eval_step(state, Metrics.empty(), batch)
  stats, params = state.batch_stats["BatchNorm_0"], state.params
  x = (X - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
  x = x * params["BatchNorm_0"]["scale"] + params["BatchNorm_0"]["bias"]
  x = linear(params["Dense_1"], linear(params["Dense_0"], x))
  assert_metrics(metrics, mean_metrics([(x, LABELS)]))


# Replicas.


def each_replica(state, batch, step=1):
  """Takes a step on two replicas; returns state and progress."""
  strategy = fs.Strategy(devices=jax.devices()[:2])
  progress = strategy.distribute_values_from_function(
    lambda context: steps.init_progress(TASK, step - 1)
  )
  return strategy.run(
    functools.partial(steps.train_step, TASK),
    (state, progress, strategy.shard_batch(batch), RNG),
  )


def test_each_replica_has_its_statistics_and_dropout_mask():
  """Compares with two halves of the batch, averaged."""
  state = create(NormedDropped())
  new_state, progress = each_replica(state, BATCH, step=5)

  @jax.jit
  def replica(index, x, labels):
    key = jax.random.fold_in(jax.random.fold_in(RNG, index), 5)

    def loss_fn(params):
      logits, new = state.apply_fn(
        {"params": params, "batch_stats": state.batch_stats},
        x,
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": key},
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return losses.mean(), (logits, new["batch_stats"])

    return jax.value_and_grad(loss_fn, has_aux=True)(state.params)

  (first, grads_0), (second, grads_1) = (
    replica(i, X[2 * i : 2 * i + 2], LABELS[2 * i : 2 * i + 2]) for i in (0, 1)
  )
  mean = lambda a, b: jax.tree.map(lambda x, y: (x + y) / 2, a, b)
  wanted = jax.tree.map(
    lambda p, g: p - 0.5 * g, state.params, mean(grads_0, grads_1)
  )
  assert_trees_close(new_state.params, wanted)
  wanted_stats = mean(first[1][1], second[1][1])
  assert_trees_close(new_state.batch_stats, wanted_stats)
  logits = np.concatenate([first[1][0], second[1][0]])
  together = steps.combine_replicas(jax.device_get(progress))
  assert_metrics(together.metrics, mean_metrics([(logits, LABELS)]))
  assert int(together.bad_step) == 0


def test_combine_replicas_reports_the_first_bad_step():
  metrics = Metrics.single_from_model_output(
    loss=jnp.array([1.0, 2.0]), correct=jnp.array([1.0, 0.0])
  )
  progress = steps.Progress(
    step=fs.PerReplica(np.array([9] * 4, np.int32)),
    metrics=jax.tree.map(
      lambda x: fs.PerReplica(np.broadcast_to(x, (4,))), metrics
    ),
    bad_step=fs.PerReplica(np.array([9, 0, 7, 7], np.int32)),
  )
  together = steps.combine_replicas(progress)
  assert together.bad_step == 7
  assert_metrics(together.metrics, {"loss": 1.5, "accuracy": 0.5})
  assert int(together.metrics.loss.count) == 8
