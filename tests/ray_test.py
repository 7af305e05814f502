"""`flaxshard.ray.fit` trains in the workers of a local Ray cluster."""

import json
import os
import pathlib
import re

import numpy as np
import pytest
import tiny
import xla_flags

import flaxshard
from flaxshard import train
from flaxshard.train import metrics as metrics_lib

_TESTS = pathlib.Path(__file__).parent
_STORE = {"type": "store", "grace": 1.0, "deadline": 5.0}
_AGN = tiny.config(
  wrappers=(
    ("agn", dict(communication_period=2, commit="mean", transport=_STORE)),
  ),
  precision="float32",
  mesh={"replica": 2},
)


@pytest.fixture
def ray_train():
  return pytest.importorskip(
    "ray.train", reason="needs Ray: pip install 'flaxshard[ray]'"
  )


@pytest.mark.slow  # needs Ray, which the slow tests install
@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"workdir": "runs/digits"}, "workdir .* absolute"),
    ({"workers": 0}, "num_workers must be at least 1, got 0"),
    ({"config": {"batch_size": 0}}, "config"),
    ({"config": _AGN, "workers": (1, 2)}, r"workers=\(1, 2\)"),
    ({"config": _AGN, "workers": 1, "use_tpu": True}, "tpu=True"),
    ({"config": _AGN, "workers": 3}, "batch_size=16 .* 3 workers"),
  ],
)
def test_invalid_argument_raises_before_ray_starts(ray_train, changed, message):
  import ray

  changed = dict(changed)
  workers = ray_train.ScalingConfig(
    num_workers=changed.pop("workers", 2), use_tpu=changed.pop("use_tpu", False)
  )
  arguments = {
    "config": tiny.config(),
    "workdir": "/tmp/run",
    "scaling_config": workers,
  }
  with pytest.raises(ValueError, match=message):
    flaxshard.ray.fit(**{**arguments, **changed})
  assert not ray.is_initialized()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  """A local Ray cluster of two CPUs, whose workers compile a program once."""
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
          "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("jax")),
          "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
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
    (_TESTS.parent / "docs" / "guides" / "processes.md").read_text(),
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
  exec(compile(snippet, "docs/guides/processes.md", "exec"), names)
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
  expected = metrics_lib.read_last_values(str(tmp_path / "one"))
  result.metrics.pop("steps_per_second")
  expected.pop("steps_per_second")
  assert result.metrics.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(
      result.metrics[name], value, rtol=1e-5, err_msg=name
    )


@pytest.mark.slow
def test_workers_of_agn_start_again_alone(cluster, tmp_path):
  """Worker 0 fails for good, and worker 1 ends the run."""
  from ray import train as ray_train

  config = _AGN.copy_and_resolve_references()
  config.data = {"name": "faulty_data:of_attempt"}
  config.eval_every_steps = 1
  faults = (("killed",) * 3, ("disk", "device"))
  hook = {"name": "faulty_data:Attempt", "log": str(tmp_path)}
  config.hooks = ({**hook, "faults": faults, "attempts": 3},)
  result = flaxshard.ray.fit(
    config,
    str(tmp_path / "run"),
    scaling_config=ray_train.ScalingConfig(num_workers=2),
    run_config=ray_train.RunConfig(
      failure_config=ray_train.FailureConfig(max_failures=2)
    ),
  )
  # Each worker has all of its attempts, and none for a failure of the other.
  attempts = [
    [line.split() for line in (tmp_path / str(k)).read_text().splitlines()]
    for k in range(2)
  ]
  killed, others = (zip(*lines, strict=True) for lines in attempts)
  processes, found = killed
  assert found == faults[0] and len(set(processes)) == 3
  processes, found = others
  assert found == (*faults[1], "none")
  # An exception of Python does not end the process.
  assert processes[0] == processes[1] != processes[2]
  assert [*result.worker_failures] == [0]
  assert "actor died" in str(result.worker_failures[0])
  rows = tiny.rows(tmp_path / "run/workers/1")
  assert [row["step"] for row in rows] == [*range(1, 9)]
  # In the folder of worker 0.
  assert tiny.rows(result.workdir)[-1]["step"] == 8
  assert pathlib.Path(result.workdir, "checkpoints", "8").is_dir()
  assert result.metrics["step"] == 8
  assert np.isfinite([*result.metrics.values()]).all()


@pytest.mark.slow
def test_failure_of_all_workers_is_an_error_that_names_them(cluster, tmp_path):
  from ray import train as ray_train

  config = _AGN.copy_and_resolve_references()
  config.data = {"name": "faulty_data:missing"}
  with pytest.raises(ray_train.TrainingFailedError) as caught:
    flaxshard.ray.fit(
      config,
      str(tmp_path),
      scaling_config=ray_train.ScalingConfig(num_workers=2),
    )
  assert [*caught.value.worker_failures] == [0, 1]
  assert re.search("(?s)worker 0: .*missing.*worker 1: ", str(caught.value))
