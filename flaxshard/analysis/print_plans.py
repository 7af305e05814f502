"""Prints the plans of a config, for `python -m flaxshard --plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import functools
import json
import logging
import os
import textwrap
import time
from typing import Any

import jax

from flaxshard.analysis import compare
from flaxshard.analysis import comparison
from flaxshard.analysis import config_plan
from flaxshard.analysis import plan as plan_lib
from flaxshard.analysis import search
from flaxshard.core import directories
from flaxshard.core import files
from flaxshard.partitioning.topology import Topology
from flaxshard.train import config as config_lib
from flaxshard.train import devices

_log = logging.getLogger(__name__)


def print_plans(
  config: Any,
  topologies: str,
  workdir: str | None,
  *,
  find_largest_batch: bool = False,
) -> None:
  """Prints the plans of a config, and writes them to a folder.

  Call it before anything else uses JAX: only JAX's CPU backend is started.

  Args:
    config: As in `config_plan.plan_config`.
    topologies: Names of topologies, separated by commas; one is printed with
      all details, several as a comparison.
    workdir: The folder for `plan.json`, `plan.html` and `plan.png`; None: none
      is written.
    find_largest_batch: Whether to search the largest batch that fits, and to
      plan that instead of `config.batch_size`. Each try is printed.

  Raises:
    ValueError, TypeError: As `config_plan.plan_config`; or `workdir` cannot be
      written.
  """
  # JAX would start a GPU or TPU of this machine. A backend that runs already
  # stays as it is.
  with contextlib.suppress(RuntimeError):
    jax.config.update("jax_platforms", "cpu")
  if workdir is not None:
    workdir = files.absolute(workdir)
    directories.check_writable("workdir", workdir)
  config = config_lib.check(config)
  names = list(dict.fromkeys(map(str.strip, topologies.split(","))))
  _check_topologies(config, names, find_largest_batch)
  if config.mesh.virtual_devices:
    _log.info(
      "config.mesh.virtual_devices=%d is not used: a plan is for the devices "
      "of a topology",
      config.mesh.virtual_devices,
    )
  plans: dict[str, plan_lib.Plan] = {}
  for name in names:
    start = time.monotonic()
    make_plan = (
      _plan_largest_batch if find_largest_batch else config_plan.plan_config
    )
    plans[name] = make_plan(config, name)
    _log.info(
      "planned %s in %.1f s, %.1f s of them for tracing and compiling the step",
      name,
      time.monotonic() - start,
      plans[name].seconds,
    )
  shown: plan_lib.Plan | comparison.Comparison = next(iter(plans.values()))
  if len(plans) > 1:
    shown = compare.compare_plans(plans)
  print(shown)
  if len(plans) > 1:
    for name, plan in plans.items():
      if plan.findings is not None:
        found = textwrap.indent(str(plan.findings), "  ")
        print(f"check for mistakes on {name}\n{found}")
  if workdir is not None:
    _write(plans, shown, workdir)


def _plan_largest_batch(config: Any, topology: str) -> plan_lib.Plan:
  """Searches the largest batch, prints the search, and returns its plan."""
  # Flushed: each line takes a compilation, and stdout may be a pipe.
  show = functools.partial(print, flush=True)
  found = search.largest_batch(config, topology, on_try=show)
  print(found)
  return found.plan


def _check_topologies(
  config: Any, names: Sequence[str], any_batch_size: bool
) -> None:
  """Checks all topologies before one of them is compiled, in minutes."""
  for name in names:
    if not name:
      raise ValueError(
        f"--plan={','.join(names)} must be topologies separated by commas, "
        "such as v5e:2x4,v5p:2x2x1."
      )
    if any_batch_size:
      Topology.named(name)
    else:
      devices.create_compile_only_strategy(config, name)


def _write(
  plans: Mapping[str, plan_lib.Plan], shown: Any, workdir: str
) -> None:
  """Writes `plan.json`, `plan.html` and `plan.png`."""
  values = {name: plan.to_dict() for name, plan in plans.items()}
  page = [shown, *plans.values()] if len(plans) > 1 else [shown]
  body = "\n".join(item._repr_html_() for item in page)
  contents = {
    "plan.json": json.dumps(values, indent=2),
    "plan.html": f'<!DOCTYPE html><meta charset="utf-8">\n{body}\n',
  }
  for name, content in contents.items():
    with files.atomic_write(os.path.join(workdir, name)) as f:
      f.write(content)
  try:
    shown.plot(os.path.join(workdir, "plan.png"))
  except ImportError as e:
    _log.warning("plan.png is not drawn: %s", e)
  _log.info("wrote the plan to %s", workdir)
