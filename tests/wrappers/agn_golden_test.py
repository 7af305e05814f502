"""AGN beside numbers of the original program, step by step."""

import json
import pathlib

import jax
import numpy as np
import optax
import pytest
import quadratic_states

import flaxshard as fs

FIGURES = pathlib.Path(__file__).parents[1] / "testdata" / "agn.json"
CASES = json.loads(FIGURES.read_text())["cases"]


def optimizer(name, hyper):
  if name == "sgd":
    return optax.sgd(hyper["lr"])
  if name == "momentum":
    return optax.sgd(hyper["lr"], momentum=hyper["momentum"])
  return optax.adam(
    hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["epsilon"]
  )


def gradient(kind, problem, params):
  """The gradients of a worker in the run of the original."""
  if kind == "constant":
    return dict(problem)
  return {
    f"v{i}": problem[f"a{i}"] * (params[f"v{i}"] - problem[f"b{i}"])
    for i in (0, 1)
  }


def step(state, problem, kind):
  # A loss with the given gradient.
  def loss_fn(params):
    grads = jax.lax.stop_gradient(gradient(kind, problem, params))
    return sum((params[k] * grads[k]).sum() for k in params)

  return state.minimize(loss_fn)


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_every_step_equals_that_of_the_original(case):
  config = case["config"]
  workers, kind = config["num_workers"], config["gradient_kind"]
  strategy = fs.Strategy(devices=jax.devices()[:workers])
  wrapper = fs.AGN(
    config["period"],
    commit="sequential",
    share_step_count=config["optimizer"] == "adam",
  )
  state = quadratic_states.create(
    [wrapper],
    optimizer(config["optimizer"], config["hyper"]),
    {k: np.float32(v) for k, v in config["init"].items()},
    strategy=strategy,
  )
  problems = strategy.distribute_values_from_function(
    lambda context: jax.tree.map(
      np.float32,
      config["problem"][context.replica_id_in_sync_group],
      is_leaf=lambda x: isinstance(x, list),
    )
  )
  run = strategy.jit(lambda state, problem: step(state, problem, kind))
  rounds = [
    case["steps"][i : i + workers]
    for i in range(0, len(case["steps"]), workers)
  ]
  for rows in rounds:
    assert [row["worker"] for row in rows] == list(range(workers))
    state, _ = run(state, problems)
    agn = jax.device_get(state.wrapper_states["agn"])
    for row in rows:
      for name in ("v0", "v1"):
        for ours, theirs in (
          (agn.local_params[name][row["worker"]], row["local"][name]),
          (agn.grad_accum[name][row["worker"]], row["acc"][name]),
        ):
          np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    for name in ("v0", "v1"):  # the center after the last worker's commit
      np.testing.assert_allclose(
        state.params[name], rows[-1]["center"][name], rtol=2e-5, atol=2e-5
      )
    assert int(agn.local_step) == rows[-1]["local_step"] == int(state.step)
    assert int(agn.commits) * workers == rows[-1]["global_step"]
