"""Trains on a Ray cluster: one process of the program per worker.

Ray Train's `JaxTrainer` places the workers, and starts all of them again after
a failure. It connects them by `jax.distributed` on TPUs and, if asked to, on
GPUs, but not on CPUs; `fit` connects those that it does not.

The workers of AGN with a center in a store are not connected. Each is a Ray
actor, which Ray restarts alone.

Needs Ray: `pip install 'flaxshard[ray]'`. Ray is imported by `fit`, not with
this module.

References:
  https://docs.ray.io/en/latest/train/api/doc/ray.train.v2.jax.JaxTrainer.html
  https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
from typing import Any

from absl import logging as absl_logging
import jax

from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.processes import initialize
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import devices
from flaxshard.train import loop
from flaxshard.train import report

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult:
  """The outcome of a run that reached its last step.

  Attributes:
    metrics: The last value of each metric in `metrics.jsonl`, such as
      `"eval_accuracy"`, and the `"step"` of the last row. They are those of
      worker 0 or, if it failed, of the first worker that did not.
    workdir: The folder of the run, with its checkpoints.
    worker_failures: The errors of workers of AGN that failed more often than
      allowed while others ended the run, by the index of the worker.
  """

  metrics: dict[str, float | int | None]
  workdir: str
  worker_failures: dict[int, Exception] = dataclasses.field(
    default_factory=dict
  )


def fit(
  config: Any,
  workdir: str | os.PathLike[str],
  *,
  scaling_config: Any,
  run_config: Any = None,
  heartbeat_timeout: float = 60.0,
) -> FitResult:
  """Runs `flaxshard.train.train_and_evaluate` in workers on a Ray cluster.

  The workers are the processes of one program, connected by
  `flaxshard.initialize`. Each of them needs flaxshard, the modules that the
  config names, and the workdir. The log lines of a run appear in the output of
  this process, as those of any Ray worker do.

  With `AGN(transport="store")` in the config each worker is a Ray actor of its
  own. Ray restarts one that fails, and the others go on meanwhile. If one fails
  more often than allowed, the others still end the run. It has a final model
  then, so `fit` logs the error and returns it in `worker_failures`. It raises
  if no worker reaches the end.

  Args:
    config: The config of the run, as for `train_and_evaluate`.
    workdir: The folder of the run, or a bucket's URL: an absolute path that is
      the same storage on all workers. If it has a checkpoint, training
      continues from it.
    scaling_config: A `ray.train.ScalingConfig`: the number of workers, and the
      CPUs, GPUs or TPUs of each. Workers without `use_gpu` and `use_tpu` train
      on CPUs. The workers of AGN cannot be elastic or use TPUs.
    run_config: A `ray.train.RunConfig`. With
      `failure_config=ray.train.FailureConfig(max_failures=3)`, Ray starts all
      workers again after a failure, up to three times, and training continues
      from the last checkpoint. Each worker of AGN is started again alone, up to
      three times: in a new process if its process died or JAX failed, in the
      same process after another exception. Nothing else of `run_config` has an
      effect on these workers.
    heartbeat_timeout: Seconds without a sign of life after which a worker
      counts as lost. On TPUs Ray connects the workers, with JAX's default of
      100 seconds. It has no effect on the workers of AGN.

  Returns:
    The final metrics and the workdir.

  Raises:
    ValueError, TypeError: An argument is invalid. Nothing has been started.
    ray.train.TrainingFailedError: A worker, or all workers of AGN, failed more
      often than `run_config` allows. The message has the workers' errors, and
      `worker_failures` the exceptions by the index of the worker.

  Example:
    >>> import flaxshard as fs
    >>> from ray.train import ScalingConfig  # doctest: +SKIP
    >>> result = fs.ray.fit(  # doctest: +SKIP
    ...   config, "/shared/digits", scaling_config=ScalingConfig(num_workers=2)
    ... )
  """
  from ray import train as ray_train
  from ray.train.v2 import jax as jax_trainer

  config = config_lib.check(config)
  workdir = os.fspath(workdir)
  if not files.is_bucket(workdir) and not os.path.isabs(workdir):
    raise ValueError(
      f"workdir must be an absolute path or a bucket's URL, got {workdir!r}: "
      "workers have other working directories."
    )
  checks.integer(
    "scaling_config.num_workers", scaling_config.min_workers, minimum=1
  )
  if devices.has_workers(config):
    return _fit_actors(
      config, workdir, scaling_config, run_config or ray_train.RunConfig()
    )
  trainer: Any = jax_trainer.JaxTrainer(
    _train,
    train_loop_config={
      "config": config,
      "workdir": workdir,
      "heartbeat_timeout": heartbeat_timeout,
    },
    # Not use_gpu: it would set CUDA_VISIBLE_DEVICES to the same GPUs in all
    # workers of a node (Ray 2.60). Ray itself gives each worker its own.
    jax_config=jax_trainer.JaxConfig(use_tpu=scaling_config.use_tpu),
    scaling_config=scaling_config,
    run_config=run_config,
  )
  return FitResult(trainer.fit().return_value, workdir)


def _fit_actors(
  config: Any, workdir: str, scaling_config: Any, run_config: Any
) -> FitResult:
  """Trains in one actor per worker, which Ray restarts alone."""
  import ray
  from ray import train as ray_train

  count = scaling_config.num_workers
  if scaling_config.elasticity_enabled or scaling_config.use_tpu:
    raise ValueError(
      "scaling_config: the workers of AGN need one number of workers and no "
      f"use_tpu, got num_workers={count!r}, use_tpu={scaling_config.use_tpu}."
    )
  devices.config_of_worker(config, count)
  resources = scaling_config.additional_resources_per_worker
  max_failures = run_config.failure_config.max_failures
  labels = scaling_config.label_selector
  # No placement group: a worker starts as soon as there is room for it.
  spread = "SPREAD" in scaling_config.placement_strategy
  actor = ray.remote(
    num_cpus=scaling_config.num_cpus_per_worker,
    num_gpus=scaling_config.num_gpus_per_worker,
    memory=resources.pop("memory", None),
    resources=resources,
    scheduling_strategy="SPREAD" if spread else "DEFAULT",
    max_restarts=max_failures,
    # Restarts and exceptions together.
    max_task_retries=max_failures,
  )(_Worker)
  actors: list[Any] = [
    actor.options(
      label_selector=labels[k] if isinstance(labels, list) else labels
    ).remote(config, workdir, k, count)
    for k in range(count)
  ]
  metrics: dict[int, dict[str, Any]] = {}
  failures: dict[int, Exception] = {}
  runs = {
    a.train.options(retry_exceptions=True).remote(): k
    for k, a in enumerate(actors)
  }
  try:
    while runs:
      [ended], _ = ray.wait([*runs])
      k = runs.pop(ended)
      try:
        metrics[k] = ray.get(ended)
      except ray.exceptions.RayError as e:
        _log.warning("worker %d has failed: %s", k, e)
        failures[k] = e
      # Makes room for workers that have not started yet.
      ray.kill(actors[k])
  finally:
    for a in actors:
      ray.kill(a)
  failures = dict(sorted(failures.items()))
  if not metrics:
    text = "\n".join(f"worker {k}: {e}" for k, e in failures.items())
    raise ray_train.WorkerGroupError(text, failures)
  return FitResult(metrics[min(metrics)], workdir, failures)


@dataclasses.dataclass(frozen=True)
class _Worker:
  """The actor of a worker of AGN."""

  config: Any
  workdir: str
  worker_id: int
  num_workers: int

  def __repr__(self) -> str:
    # Ray writes it before each line that the worker prints.
    return f"worker {self.worker_id}"

  def train(self) -> dict[str, Any]:
    """Trains, and returns the final metrics of this worker."""
    with _print_log():
      try:
        loop.train_and_evaluate(
          self.config,
          self.workdir,
          worker_id=self.worker_id,
          num_workers=self.num_workers,
        )
      except jax.errors.JaxRuntimeError as e:
        # Ray starts another process: the devices may be unusable in this one.
        _log.exception("worker %d: an error of JAX", self.worker_id)
        raise SystemExit(1) from e
    folder = devices.folder_of_worker(self.workdir, self.worker_id)
    return report.read_last_values(folder)


def _train(arguments: dict[str, Any]) -> dict[str, Any] | None:
  """Trains in a worker; worker 0 returns the final metrics."""
  import ray
  from ray import train as ray_train
  from ray.train import collective

  context = ray_train.get_context()
  address = None
  if context.get_world_rank() == 0:
    host = ray.util.get_node_ip_address()
    if ":" in host:
      host = f"[{host}]"
    with socket.socket() as s:
      s.bind(("", 0))
      address = f"{host}:{s.getsockname()[1]}"
  with _print_log():
    initialize(
      collective.broadcast_from_rank_zero(address),
      context.get_world_size(),
      context.get_world_rank(),
      heartbeat_timeout=arguments["heartbeat_timeout"],
    )
    workdir = arguments["workdir"]
    try:
      loop.train_and_evaluate(arguments["config"], workdir)
    except SystemExit as e:
      # Ray shows the message of an error, and of this one only the number.
      raise RuntimeError(
        f"stopped with exit code {e.code} (128 and the number of a signal) and "
        f"a checkpoint in {workdir}; the same call continues from there"
      ) from e
  if jax.process_index():
    return None
  return report.read_last_values(workdir)


def _print_log() -> contextlib.AbstractContextManager[None]:
  # Ray shows all of its workers' log lines; Orbax and JAX log many at INFO.
  absl_logging.set_verbosity(absl_logging.WARNING)
  return console.show_log(always=True)
