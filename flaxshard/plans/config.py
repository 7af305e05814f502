"""Plans of configs, for `python -m flaxshard --plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from typing import Any

import jax

from flaxshard.core import files
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import check
from flaxshard.plans import plan as plan_lib
from flaxshard.plans import step as step_lib
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)

_WORKER = (
  "This is the step of one worker. Its commits go to a store, and are "
  "not in the program."
)


def plan_config(config: Any, topology: str, task: Any = None) -> plan_lib.Plan:
  """Plans the train step of a config on devices that need not exist.

  State, step and shardings are those of a run. The data is not read, except for
  one example of a factory without `data.shapes_from`. With
  `AGN(transport="store")` it is the step of one worker; see
  `devices.config_of_worker`.

  Args:
    config: An `ml_collections.ConfigDict` or a dict; see docs/config.md.
    topology: Name of the devices, such as `"v5p:4x4x8"`; see `Topology.named`.
    task: A task object, in place of `config.task`; see `flaxshard.tasks.Task`.

  Raises:
    ValueError, TypeError: The config is invalid, or does not fit the devices;
      or there is no such topology.
  """
  config = config_lib.check(config, task)
  strategy = devices.create_strategy(config, topology)
  setup = setup_lib.Setup(config, strategy, task, shapes_only=True)
  step = step_lib.compile_step(setup.trace(), setup.arguments, setup_lib.BATCH)
  plan = plan_lib.plan_step(step, topology)
  rules = rules_lib.from_config(config.mesh.rules)
  worker = (_WORKER,) if devices.has_workers(config) else ()
  return dataclasses.replace(
    plan,
    notes=(*plan.notes, *worker),
    findings=check.check_step(step, rules),
  )


def print_plans(config: Any, topologies: str, workdir: str | None) -> None:
  """Prints the plans of a config, one after the other.

  Call it before anything else uses JAX: only JAX's CPU backend is started.

  Args:
    config: As in `plan_config`.
    topologies: Names of topologies, separated by commas.
    workdir: The folder for `plan.json`; None: it is not written.

  Raises:
    ValueError, TypeError: As `plan_config`; or `workdir` cannot be written.
  """
  # JAX would start a GPU or TPU of this machine. A backend that runs already
  # stays as it is.
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_platforms", "cpu")
  if workdir is not None:
    workdir = files.absolute(workdir)
    files.check_writable("workdir", workdir)
  config = config_lib.check(config)
  names = list(dict.fromkeys(map(str.strip, topologies.split(","))))
  # Mistakes in all of them come before the first one is compiled, in minutes.
  for name in names:
    devices.create_strategy(config, name)
  plans = {}
  for name in names:
    start = time.monotonic()
    plans[name] = plan_config(config, name)
    _log.info("planned %s in %.1f s", name, time.monotonic() - start)
    print(plans[name])
  if workdir is not None:
    values = {name: plan.to_dict() for name, plan in plans.items()}
    path = os.path.join(workdir, "plan.json")
    files.write_text(path, json.dumps(values, indent=2))
    _log.info("wrote the plan to %s", path)
