"""Plans the train step of a config."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import ml_collections

from flaxshard.analysis import check
from flaxshard.analysis import compilation as compilation_lib
from flaxshard.analysis import host_commit_bytes
from flaxshard.analysis import plan as plan_lib
from flaxshard.core import checks
from flaxshard.core.policy import Policy
from flaxshard.partitioning import rules as rules_lib
from flaxshard.tasks import load
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import program as program_lib
from flaxshard.train import ranks


def replace_fields(
  config: Any, fields: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Returns a checked copy of a config with other values of some fields.

  Args:
    config: The config; see `plan_config`.
    fields: The values, by paths such as "model.embed_dim".

  Raises:
    ValueError, TypeError: There is no such field, or a value is not allowed.
  """
  changed = config_lib.check(config).unlock()
  try:
    changed.update_from_flattened_dict(fields)
  except KeyError as e:
    raise ValueError(f"config: {e.args[0]}") from e
  return config_lib.check(changed)


def plan_config(config: Any, topology: str, task: Any = None) -> plan_lib.Plan:
  """Plans the train step of a config on devices that need not exist.

  State, step and shardings are those of a run. The data is not read, except for
  one example of a factory without `data.shapes_from`. With
  `AGN(transport="host")` it is the step of one worker, and a note says how many
  bytes its commits have; see `ranks.config_of_worker`.

  Args:
    config: An `ml_collections.ConfigDict` or a dict; see docs/config.md.
    topology: Name of the devices, such as `"v5p:4x4x8"`; see `Topology.named`.
    task: A task object, in place of `config.task`; see `flaxshard.tasks.Task`.

  Raises:
    ValueError, TypeError: The config is invalid, or does not fit the devices;
      or there is no such topology.
  """
  config = config_lib.check(load.record(config, task))
  strategy = devices.create_compile_only_strategy(config, topology)
  loaded = load.load(config, task, shapes_only=True)
  program = program_lib.create_program(config, strategy, loaded)
  for note in program.notes:
    checks.warn(note)
  compilation = compilation_lib.compile_step(
    program.trace, strategy.mesh.devices.flat[0]
  )
  plan = plan_lib.plan_compiled(
    compilation,
    program.arguments,
    batch_argnum=program_lib.BATCH,
    topology=topology,
  )
  if ranks.host_agn(config) is not None:
    note = host_commit_bytes.describe(program.abstract_state)
    plan = dataclasses.replace(plan, notes=(*plan.notes, note))
  # Neither compiled nor refused: there is no compiler, as the plan notes.
  if compilation.compiled is None and compilation.error is None:
    return plan
  findings = check.check_compiled(
    program.arguments,
    compilation,
    rules=rules_lib.from_config(config.mesh.rules),
    policy=Policy(config.precision),
  )
  return dataclasses.replace(plan, findings=findings)
