"""Plans the train step of a config, for `python -m flaxshard --plan`."""

from __future__ import annotations

from typing import Any

from flaxshard import data
from flaxshard.analysis import plan as plan_lib
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import program as program_lib


def plan_config(config: Any, topology: str) -> plan_lib.Plan:
  """Plans the train step of a config on devices that need not exist.

  State, step and shardings are those of a run. The data is not read, except for
  one example of a factory without `data.shapes_from`.

  Args:
    config: An `ml_collections.ConfigDict` or a dict; see
      `flaxshard.train.config`.
    topology: Name of the devices, such as `"v5p:4x4x8"`; see `Topology.named`.

  Raises:
    ValueError, TypeError: The config is invalid, or does not fit the devices;
      or there is no such topology.
  """
  config = config_lib.check(config)
  strategy = devices.create_compile_only_strategy(config, topology)
  shapes = data.load_shapes(config.data)
  program = program_lib.create_program(
    config, strategy, shapes.example, shapes.num_classes
  )
  return plan_lib.plan_traced(
    program.trace,
    program.arguments,
    batch_argnum=program_lib.BATCH,
    topology=topology,
  )
