"""Trains on a Ray cluster: one process of the program per Ray Train worker.

Ray Train's `JaxTrainer` places the workers, and starts them again after a
failure. It connects them by `jax.distributed` on TPUs and, if asked to, on
GPUs, but not on CPUs; `fit` connects those that it does not.

Needs Ray: `pip install 'flaxshard[ray]'`. Ray is imported by `fit`, not with
this module.

References:
  https://docs.ray.io/en/latest/train/api/doc/ray.train.v2.jax.JaxTrainer.html
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from typing import Any

from absl import logging as absl_logging
import jax

from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.processes import initialize
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import loop
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import ranks


@dataclasses.dataclass(frozen=True)
class FitResult:
  """The outcome of a run that reached its last step.

  Attributes:
    metrics: The last value of each metric in `metrics.jsonl`, such as
      `"eval_accuracy"`, and the `"step"` of the last row.
    workdir: The folder of the run, with its checkpoints.
  """

  metrics: dict[str, float | int | None]
  workdir: str


def fit(
  config: Any,
  workdir: str | os.PathLike[str],
  *,
  scaling_config: Any,
  run_config: Any = None,
  heartbeat_timeout: float = 60.0,
) -> FitResult:
  """Runs `flaxshard.train.train_and_evaluate` in the workers of Ray Train.

  The workers are the processes of one program, connected by
  `flaxshard.initialize`. Each of them needs flaxshard, the modules that the
  config names, and the workdir. The log lines of a run appear in the output of
  this process, as those of any Ray worker do.

  Args:
    config: The config of the run, as for `train_and_evaluate`.
    workdir: The folder of the run, or a bucket's URL: an absolute path that is
      the same storage on all workers. If it has a checkpoint, training
      continues from it.
    scaling_config: A `ray.train.ScalingConfig`: the number of workers, and the
      CPUs, GPUs or TPUs of each. Workers without `use_gpu` and `use_tpu` train
      on CPUs.
    run_config: A `ray.train.RunConfig`. With
      `failure_config=ray.train.FailureConfig(max_failures=3)`, Ray starts all
      workers again after a failure, up to three times, and training continues
      from the last checkpoint.
    heartbeat_timeout: Seconds without a sign of life after which a worker
      counts as lost. On TPUs Ray connects the workers, with JAX's default of
      100 seconds.

  Returns:
    The final metrics and the workdir.

  Raises:
    ValueError, TypeError: An argument is invalid. Nothing has been started.
    ImportError: Ray is not installed.
    ray.train.TrainingFailedError: A worker failed more often than `run_config`
      allows. The message has the workers' errors, and `worker_failures` the
      exceptions by the index of the worker.

  Example:
    >>> from ray.train import ScalingConfig  # doctest: +SKIP
    >>> result = fit(  # doctest: +SKIP
    ...   config, "/shared/digits", scaling_config=ScalingConfig(num_workers=2)
    ... )
  """
  ray_train, jax_trainer = _import_ray()
  config = config_lib.check(config)
  if ranks.host_agn(config) is not None:
    raise ValueError(
      "config.wrappers: fit cannot start AGN(transport='host'), got "
      f"{config.wrappers!r}: Ray's workers are one JAX world. Use "
      "transport='compiled', or start the workers without Ray."
    )
  workdir = _check_workdir(workdir)
  _check_type("scaling_config", scaling_config, ray_train.ScalingConfig)
  if scaling_config.min_workers < 1:
    raise ValueError(
      "scaling_config.num_workers must be at least 1, got "
      f"{scaling_config.num_workers!r}. Without Ray's workers, call "
      "flaxshard.train.train_and_evaluate."
    )
  if run_config is not None:
    _check_type("run_config", run_config, ray_train.RunConfig)
  checks.number("heartbeat_timeout", heartbeat_timeout, above=0, below=1e6)
  trainer = jax_trainer.JaxTrainer(
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


def _import_ray() -> tuple[Any, Any]:
  """Returns the modules `ray.train` and `ray.train.v2.jax`."""
  try:
    from ray import train as ray_train
    from ray.train.v2 import jax as jax_trainer
  except ImportError as e:
    raise ImportError(
      "flaxshard.ray needs Ray Train 2.60 or later: "
      "pip install 'flaxshard[ray]'"
    ) from e
  return ray_train, jax_trainer


def _check_workdir(workdir: str | os.PathLike[str]) -> str:
  path = checks.path("workdir", workdir)
  if not files.is_bucket(path) and not os.path.isabs(path):
    raise ValueError(
      f"workdir must be an absolute path or a bucket's URL, got {path!r}: "
      "workers have other working directories."
    )
  return path


def _check_type(argument: str, value: Any, expected: type) -> None:
  if not isinstance(value, expected):
    raise TypeError(
      f"{argument} must be a ray.train.{expected.__name__}, got {type(value)}."
    )


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
  # Ray shows all of its workers' log lines; Orbax and JAX log many at INFO.
  absl_logging.set_verbosity(absl_logging.WARNING)
  with console.print_log():
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
        f"stopped by {_signal_name(e.code)} with a checkpoint in {workdir}; "
        "the same call continues from there"
      ) from e
  if jax.process_index():
    return None
  return metrics_lib.read_last_values(metrics_lib.metrics_path(workdir))


def _signal_name(code: Any) -> str:
  try:
    return signal.Signals(code - 128).name
  except (TypeError, ValueError):
    return f"exit code {code}"
