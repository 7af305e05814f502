"""`flaxshard.ray.fit` trains in the workers of a local Ray cluster."""

import json
import os
import pathlib
import re

import pytest
import tiny
import xla_flags

import flaxshard
from flaxshard.train import report

pytestmark = pytest.mark.slow  # needs Ray, which the slow tests install

_TESTS = pathlib.Path(__file__).parent
_STORE = {"type": "store", "grace": 1.0, "deadline": 5.0}


def agn_config(**fields):
  agn = dict(communication_period=2, commit="mean", transport=_STORE)
  fields |= {"mesh": {"replica": 2}, "precision": "float32"}
  return tiny.config(wrappers=(("agn", agn),), **fields)


@pytest.fixture(scope="module")
def ray_train():
  return pytest.importorskip(
    "ray.train", reason="needs Ray: pip install 'flaxshard[ray]'"
  )


@pytest.mark.parametrize(
  ("config", "workdir", "workers", "message"),
  [
    (tiny.config(), "runs/digits", {}, "workdir .* absolute"),
    (tiny.config(batch_size=0), "/tmp/run", {}, "config"),
    (tiny.config(), "/tmp/run", {"num_workers": 0}, "at least 1, got 0"),
    (agn_config(), "/tmp/run", {"num_workers": (1, 2)}, r"workers=\(1, 2\)"),
    (agn_config(), "/tmp/run", {"use_tpu": True}, "tpu=True"),
    (agn_config(), "/tmp/run", {"num_workers": 3}, "batch_size=16 .* 3 worker"),
  ],
)
def test_invalid_argument_raises_before_ray_starts(
  ray_train, config, workdir, workers, message
):
  import ray

  scaling_config = ray_train.ScalingConfig(**workers)
  with pytest.raises(ValueError, match=message):
    flaxshard.ray.fit(config, workdir, scaling_config=scaling_config)
  assert not ray.is_initialized()


@pytest.fixture(scope="module")
def cluster(ray_train, tmp_path_factory):
  """A local Ray cluster of two CPUs, whose workers compile a program once."""
  import ray

  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # A process for each group of workers.
    patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
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


def test_run_with_an_error_and_a_retry(cluster, ray_train, tmp_path):
  """The snippet of the docs, in two workers, with other arguments."""
  errors = tmp_path / "errors"

  class WriteErrors(ray_train.UserCallback):
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
  config = tiny.config(
    data={"name": "faulty_data:broken_once", "workdir": str(workdir)},
    eval_every_steps=8,
  )
  names = {"config": config, "callbacks": [WriteErrors()]}
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
  assert result.metrics == report.read_last_values(str(workdir))


def test_a_worker_of_agn_starts_again_alone(cluster, ray_train, tmp_path):
  """Worker 0 fails for good, and worker 1 ends the run."""
  config = agn_config(
    data={"name": "faulty_data:of_attempts"},
    eval_every_steps=1,
    hooks=({"name": "faulty_data:Attempts", "log": str(tmp_path / "log")},),
  )
  result = flaxshard.ray.fit(
    config,
    str(tmp_path / "run"),
    scaling_config=ray_train.ScalingConfig(num_workers=2),
    run_config=ray_train.RunConfig(
      failure_config=ray_train.FailureConfig(max_failures=2)
    ),
  )
  # An error of JAX ends the process, and an exception of Python does not.
  first, second, third = (tmp_path / "log").read_text().split()
  assert first != second == third
  assert [*result.worker_failures] == [0]
  error = str(result.worker_failures[0])
  assert re.search("actor .*(died|is unavailable)", error)
  # Its failures do not start the other one again.
  rows = tiny.rows(tmp_path / "run/workers/1")
  assert [row["step"] for row in rows] == [*range(1, 9)]
  # In the folder of worker 0.
  assert tiny.rows(result.workdir)[-1]["step"] == 8
  assert pathlib.Path(result.workdir, "checkpoints", "8").is_dir()
  assert result.metrics == report.read_last_values(
    str(tmp_path / "run/workers/1")
  )


def test_failure_of_all_workers_is_an_error_that_names_them(
  cluster, ray_train, tmp_path
):
  with pytest.raises(ray_train.TrainingFailedError) as caught:
    flaxshard.ray.fit(
      agn_config(data={"name": "faulty_data:missing"}),
      str(tmp_path),
      scaling_config=ray_train.ScalingConfig(num_workers=2),
    )
  assert [*caught.value.worker_failures] == [0, 1]
  assert re.search("(?s)worker 0: .*missing.*worker 1: ", str(caught.value))
