"""Runs of several workers, as threads of this process."""

import functools
import threading

import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.train import charts

AGN = {"communication_period": 3, "commit": "mean"}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
  monkeypatch.setattr(charts, "plot", lambda *args: None)


def config(agn, **fields):
  values = dict(
    # With dropout: workers have the random streams of replicas.
    model={"name": "cnn", "features": (), "dense": 8, "dropout": 0.5},
    precision="float32",
    wrappers=(("agn", agn),),
    mesh={"replica": 2, "per_replica": True},
  )
  return tiny.config(**{**values, **fields})


def run_workers(folder, *configs):
  """Trains one worker in each of two threads; returns states or errors."""
  results = [None, None]

  def run(worker_id):
    try:
      results[worker_id] = train.train_and_evaluate(
        configs[worker_id % len(configs)],
        str(folder),
        worker_id=worker_id,
        num_workers=2,
      )
    except BaseException as e:
      results[worker_id] = e

  threads = [
    threading.Thread(target=functools.partial(run, k)) for k in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


def assert_close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_two_workers_equal_two_replicas(tmp_path):
  states = run_workers(tmp_path / "host", config({**AGN, "transport": "host"}))
  compiled = train.train_and_evaluate(config(AGN), str(tmp_path / "compiled"))
  wanted = compiled.wrapper_states["agn"]
  for k, state in enumerate(states):
    assert_equal(state.params, states[0].params)
    jax.tree.map(assert_close, state.params, compiled.params)
    agn = state.wrapper_states["agn"]
    assert int(agn.commits) == int(wanted.commits) == 2
    jax.tree.map(
      lambda a, b, k=k: assert_close(a, b[k]),
      agn.local_params,
      wanted.local_params,
    )
  rows = [tiny.rows(tmp_path / "host" / x) for x in ("", "workers/1")]
  assert [r.get("commit_workers") for r in rows[0]] == [None, 2, 2, None]
  # Each logs its own rows, and evaluates the same center.
  assert rows[0][-1]["train_loss"] != rows[1][-1]["train_loss"]
  assert rows[0][-1]["eval_loss"] == rows[1][-1]["eval_loss"]
  loaded = fs.load(str(tmp_path / "host" / "workers" / "1"))
  assert_equal(loaded.state.params, states[1].params)


@pytest.mark.slow
def test_workers_that_disagree_raise(tmp_path):
  agn = {**AGN, "transport": "host"}
  errors = run_workers(tmp_path, config(agn), config(agn, seed=1))
  for error in errors:
    assert isinstance(error, ValueError)
    assert "config.seed" in str(error)
