"""Commits on the host beside compiled commits, and the original's numbers."""

import functools
import json
import pathlib

import host_workers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

FIGURES = pathlib.Path(__file__).parents[1] / "testdata" / "agn.json"
CASES = json.loads(FIGURES.read_text())["cases"]

PARAMS = {
  "a": np.arange(6, dtype=np.float32) / 4,
  "b": {"c": np.ones((2, 3), np.float32), "d": np.float32(0.5)},
}
ADAM = optax.adamw(0.1, weight_decay=0.01)
# Powers of two: the same bits, whatever XLA fuses.
MOMENTUM = optax.sgd(0.25, momentum=0.5)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
OUTER = optax.sgd(0.75, momentum=0.5, nesterov=True)


def loss_fn(params, x):
  # Its gradients do not depend on the parameters: local steps of another
  # program may round otherwise.
  return (
    (params["a"] * x).sum()
    + (params["b"]["c"] * jnp.array([1.0, 2.0, 4.0]) * x).sum()
    - params["b"]["d"] * x
  )


def train_step(state, x):
  return state.minimize(loss_fn, x)[0]


STEP = jax.jit(train_step, donate_argnums=0)


def create(tx, wrappers, strategy=None, params=PARAMS, **collections):
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=tx,
    wrappers=wrappers,
    strategy=strategy,
    **collections,
  )


def inputs(count, steps):
  return np.random.default_rng(0).integers(-8, 9, (steps, count)) / np.float32(
    8
  )


def run_both(tx, count, steps, around=lambda agn: [agn], parts=None, **kwargs):
  """Returns the train state of compiled commits, and the workers."""
  strategy = fs.Strategy(devices=jax.devices()[:count])
  state = create(tx, around(fs.AGN(**kwargs)), strategy)
  wrappers = around(fs.AGN(**kwargs, transport="host"))
  workers = host_workers.Workers(
    lambda: create(tx, wrappers), count, STEP, parts
  )
  run = strategy.jit(lambda state, x: train_step(state, x[0]), donate_argnums=0)
  for xs in inputs(count, steps):
    state = run(state, strategy.shard_batch(xs))
    workers.step(xs)
  return state, workers


def assert_equal_runs(state, workers, exact=True):
  compare = np.testing.assert_array_equal
  if not exact:
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-6)
  agn = state.wrapper_states["agn"]
  center = workers.center()
  jax.tree.map(
    compare,
    (center.params, center.opt_state, center.outer_opt_state),
    (state.params, state.opt_state, agn.outer_opt_state),
  )
  assert {k: x.tolist() for k, x in center.fragment_counts.items()} == {
    k: x.tolist() for k, x in agn.fragment_counts.items()
  }
  compare = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7)
  for k, worker in enumerate(workers.states):
    own = worker.wrapper_states["agn"]
    assert int(own.local_step) == int(agn.local_step) == int(worker.step)
    assert int(own.commits) == int(agn.commits)
    jax.tree.map(
      lambda mine, all_replicas, k=k: compare(mine, all_replicas[k]),
      (own.local_params, own.local_opt_state, own.grad_accum),
      (agn.local_params, agn.local_opt_state, agn.grad_accum),
    )


@pytest.mark.parametrize(
  ("tx", "count", "kwargs"),
  [
    (MOMENTUM, 2, {"commit": "mean"}),
    pytest.param(MOMENTUM, 2, {"commit": "sum"}, marks=pytest.mark.slow),
    pytest.param(
      ADAM,
      2,
      {"commit": "sum", "share_step_count": True},
      marks=pytest.mark.slow,
    ),
    pytest.param(CLIPPED, 4, {"commit": "mean"}, marks=pytest.mark.slow),
    pytest.param(
      MOMENTUM,
      2,
      {"commit": "mean", "commit_delta": True, "outer_tx": OUTER},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      MOMENTUM, 2, {"commit": "mean", "fragments": 3}, marks=pytest.mark.slow
    ),
    pytest.param(
      ADAM, 4, {"commit": "mean", "fragments": 3}, marks=pytest.mark.slow
    ),
    pytest.param(
      ADAM,
      4,
      {"commit": "mean", "fragments": 2, "share_step_count": True},
      marks=pytest.mark.slow,
    ),
    (MOMENTUM, 2, {"commit": "mean", "fragments": 2, "delay": 1, "blend": 0.5}),
    pytest.param(
      ADAM,
      4,
      {"commit": "sum", "fragments": 3, "fragment_offset": 0},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      ADAM,
      4,
      {"commit": "mean", "delay": 2, "share_step_count": True},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_mean_and_sum_equal_compiled_commits(tx, count, kwargs):
  # With a delay the last commit arrives later.
  steps = 12 + kwargs.get("delay", 0)
  state, workers = run_both(tx, count, steps, communication_period=4, **kwargs)
  # XLA may fuse Adam otherwise in another program.
  assert_equal_runs(state, workers, exact=tx is MOMENTUM)


def halves(keys):
  return [keys[::2], keys[1::2]]


@pytest.mark.parametrize(
  ("tx", "parts", "kwargs"),
  [
    pytest.param(ADAM, None, {}, marks=pytest.mark.slow),
    pytest.param(ADAM, halves, {}, marks=pytest.mark.slow),
    pytest.param(
      ADAM, halves, {"share_step_count": True}, marks=pytest.mark.slow
    ),
    pytest.param(
      CLIPPED, None, {"share_step_count": True}, marks=pytest.mark.slow
    ),
    pytest.param(
      ADAM,
      halves,
      {"commit_delta": True, "outer_tx": OUTER},
      marks=pytest.mark.slow,
    ),
    (ADAM, halves, {"fragments": 3}),
    pytest.param(
      ADAM, None, {"fragments": 3, "blend": 0.25}, marks=pytest.mark.slow
    ),
    pytest.param(
      ADAM,
      None,
      {"fragments": 2, "share_step_count": True},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_sequential_equals_compiled_commits(tx, parts, kwargs):
  state, workers = run_both(
    tx, 3, 9, parts=parts, communication_period=3, **kwargs
  )
  assert_equal_runs(state, workers, exact=False)


def original_optimizer(name, hyper):
  if name == "sgd":
    return optax.sgd(hyper["lr"])
  if name == "momentum":
    return optax.sgd(hyper["lr"], momentum=hyper["momentum"])
  return optax.adam(
    hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["epsilon"]
  )


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_every_step_equals_that_of_the_original(case):
  config = case["config"]
  num_workers, is_constant = (
    config["num_workers"],
    config["gradient_kind"] == "constant",
  )
  tx = original_optimizer(config["optimizer"], config["hyper"])
  agn = fs.AGN(
    config["period"],
    commit="sequential",
    share_step_count=config["optimizer"] == "adam",
    transport="host",
  )
  start = {k: np.float32(v) for k, v in config["init"].items()}

  @jax.jit
  def step(state, problem):
    def loss_fn(params):
      grads = problem
      if not is_constant:
        grads = {
          f"v{i}": problem[f"a{i}"] * (params[f"v{i}"] - problem[f"b{i}"])
          for i in (0, 1)
        }
      grads = jax.lax.stop_gradient(grads)
      return sum((params[k] * grads[k]).sum() for k in params)

    return state.minimize(loss_fn)[0]

  workers = host_workers.Workers(
    lambda: create(tx, [agn], params=start), num_workers, step
  )
  problems = [
    {k: np.float32(x) for k, x in problem.items()}
    for problem in config["problem"]
  ]
  rows = case["steps"]
  for i in range(0, len(rows), num_workers):
    workers.step(problems)
    for row in rows[i : i + num_workers]:
      own = workers.states[row["worker"]].wrapper_states["agn"]
      for name in ("v0", "v1"):
        for ours, theirs in (
          (own.local_params[name], row["local"][name]),
          (own.grad_accum[name], row["acc"][name]),
        ):
          np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
      assert int(own.local_step) == row["local_step"]
    center = workers.center()
    for name in ("v0", "v1"):
      np.testing.assert_allclose(
        center.params[name], row["center"][name], rtol=2e-5, atol=2e-5
      )
    assert int(center.commits) == row["global_step"]
