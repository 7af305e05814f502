"""`flaxshard.ray.fit` trains in the workers of a local Ray cluster."""

import builtins
import json
import os
import pathlib
import re

import numpy as np
import pytest
import tiny
import xla_flags

import flaxshard
from flaxshard import ray as flaxshard_ray
from flaxshard import train
from flaxshard.train import metrics as metrics_lib

_TESTS = pathlib.Path(__file__).parent
_HOST = {
  "communication_period": 2,
  "commit": "mean",
  "transport": "host",
}


def test_missing_ray_is_an_error_that_names_the_extra(monkeypatch):
  real_import = builtins.__import__

  def without_ray(name, *args):
    if name.split(".")[0] == "ray":
      raise ImportError(name)
    return real_import(name, *args)

  monkeypatch.setattr(builtins, "__import__", without_ray)
  with pytest.raises(ImportError, match=r"pip install 'flaxshard\[ray\]'"):
    flaxshard_ray.fit(tiny.config(), "/tmp/run", scaling_config=None)


def test_ray_is_an_attribute_of_flaxshard():
  assert flaxshard.ray is flaxshard_ray


@pytest.fixture
def ray_train():
  return pytest.importorskip(
    "ray.train", reason="needs Ray: pip install 'flaxshard[ray]'"
  )


@pytest.mark.slow  # needs Ray, which the slow tests install
@pytest.mark.parametrize(
  ("changed", "error", "message"),
  [
    ({"workdir": "runs/digits"}, ValueError, "workdir .* absolute"),
    ({"workdir": None}, TypeError, "workdir"),
    ({"scaling_config": 2}, TypeError, "scaling_config .*ScalingConfig"),
    ({"run_config": {}}, TypeError, "run_config .*RunConfig"),
    ({"heartbeat_timeout": 1e6}, ValueError, "heartbeat_timeout"),
    ({"config": {"batch_size": 0}}, ValueError, "config"),
    (
      {"config": tiny.config(wrappers=(("agn", _HOST),))},
      ValueError,
      "config.wrappers: .*host",
    ),
  ],
)
def test_invalid_argument_raises_before_ray_starts(
  ray_train, changed, error, message
):
  import ray

  arguments = {
    "config": tiny.config(),
    "workdir": "/tmp/run",
    "scaling_config": ray_train.ScalingConfig(num_workers=2),
  }
  with pytest.raises(error, match=message):
    flaxshard_ray.fit(**{**arguments, **changed})
  assert not ray.is_initialized()


@pytest.mark.slow
def test_no_workers_raises(ray_train):
  with pytest.raises(
    ValueError, match=r"num_workers must be at least 1, got 0"
  ):
    flaxshard_ray.fit(
      tiny.config(),
      "/tmp/run",
      scaling_config=ray_train.ScalingConfig(num_workers=0),
    )


@pytest.fixture(scope="module")
def cluster():
  """A local Ray cluster of two CPUs."""
  ray = pytest.importorskip(
    "ray", reason="needs Ray: pip install 'flaxshard[ray]'"
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
      address="local",
      num_cpus=2,
      include_dashboard=False,
      object_store_memory=100 * 2**20,
      runtime_env={
        "env_vars": {
          "JAX_PLATFORMS": "cpu",
          "PYTHONPATH": f"{_TESTS}{os.pathsep}{_TESTS.parent}",
          # Those of the tests make eight devices in each process.
          "XLA_FLAGS": xla_flags.FAST,
        }
      },
    )
    yield
    ray.shutdown()


def _config(data):
  return tiny.config(data=data, precision="float32", eval_every_steps=8)


@pytest.mark.slow
def test_run_with_an_error_and_a_retry_equals_one_process(cluster, tmp_path):
  """The snippet of the docs, in two workers, with other arguments."""
  import ray.train

  errors = tmp_path / "errors"

  class WriteErrors(ray.train.UserCallback):
    def after_exception(self, run_context, worker_exceptions):
      errors.write_text(repr(worker_exceptions[1]))

  [snippet] = re.findall(
    r"```python\n(import flaxshard as fs\nfrom ray.*?)```",
    (_TESTS.parent / "docs" / "guides" / "clusters.md").read_text(),
    re.S,
  )
  workdir = tmp_path / "ray"
  for text, replacement in (
    ('fs.config.read("digits")', "config"),
    ('"/shared/digits"', repr(str(workdir))),
    ('"/shared/ray"', f"{str(tmp_path)!r}, callbacks=callbacks"),
  ):
    assert text in snippet
    snippet = snippet.replace(text, replacement)
  names = {
    "config": _config(
      {"name": "faulty_data:broken_once", "workdir": str(workdir)}
    ),
    "callbacks": [WriteErrors()],
  }
  exec(compile(snippet, "docs/guides/clusters.md", "exec"), names)
  result = names["result"]

  # Ray got the error itself, although it ends all processes.
  assert "OSError" in errors.read_text()
  assert "the disk of process 1 is broken" in errors.read_text()
  assert result.workdir == str(workdir)
  # Rows of a run that was resumed from step 4, without duplicates.
  assert [row["step"] for row in tiny.rows(workdir)] == [2, 4, 6, 8]
  metadata = json.loads(
    (workdir / "checkpoints" / "8" / "flaxshard" / "metadata").read_text()
  )
  assert (metadata["processes"], metadata["devices"]) == (2, 2)
  train.train_and_evaluate(_config({"name": "digits"}), str(tmp_path / "one"))
  expected = metrics_lib.read_last_values(tmp_path / "one" / "metrics.jsonl")
  result.metrics.pop("steps_per_second")
  expected.pop("steps_per_second")
  assert result.metrics.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(
      result.metrics[name], value, rtol=1e-5, err_msg=name
    )
