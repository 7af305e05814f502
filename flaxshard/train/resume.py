"""Continues the run of a workdir, or begins one."""

from __future__ import annotations

import logging
import os
from typing import Any

import jax

from flaxshard import checkpoint
from flaxshard.core import multihost
from flaxshard.state.train_state import TrainState
from flaxshard.train import config as config_lib
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)


def open_checkpointer(config: Any, workdir: str) -> checkpoint.Checkpointer:
  """Returns the checkpointer of a workdir.

  Args:
    config: A checked config.
    workdir: The workdir.
  """
  best_metric = config.best_metric
  return checkpoint.Checkpointer(
    os.path.join(workdir, "checkpoints"),
    max_to_keep=config.max_to_keep,
    keep_every=config.keep_every_steps or None,
    best_metric=None if best_metric == "none" else best_metric,
    best_mode=config_lib.resolve_mode(best_metric, config.best_mode),
    keep_best=config.keep_best,
    config=same_run.config_to_json(config),
  )


def restore_or_create(
  setup: setup_lib.Setup,
  workdir: str,
  checkpointer: checkpoint.Checkpointer,
  batches: Any,
) -> tuple[TrainState, int]:
  """Returns the state to train from, and the step that it was saved at.

  Args:
    setup: The setup of the config.
    workdir: The workdir.
    checkpointer: Its checkpointer.
    batches: The training batches, which continue from the same step.

  Raises:
    ValueError: The checkpoint has another model or another data order, or a
      finished run would pass for one of a changed config; or that of
      `config.init_from` does not fit the model.
  """
  config = setup.config
  latest_step = checkpointer.latest_step()
  multihost.check_agreement(
    {"the latest checkpoint": latest_step},
    "All processes must read the same checkpoints.",
  )
  if latest_step is None:
    return _initialize(config.init_from, setup.create_state()), 0
  with multihost.raise_on_all_processes(ValueError):
    if jax.process_index() == 0:
      same_run.check_earlier_run(
        config, workdir, setup.num_train_examples, latest_step
      )
  # Into shapes and shardings: a state of arrays would need its memory twice.
  state = checkpointer.restore(setup.abstract_state, data=batches)
  # Not always the latest step: a damaged one is passed over.
  first_step = checkpointer.restored_step or 0
  if first_step < config.num_train_steps:
    _log.info("resuming from step %d in %s", first_step, workdir)
  return state, first_step


def _initialize(init_from: Any, state: TrainState) -> TrainState:
  """Returns a new state with the parameters of `config.init_from`, if any."""
  arguments = init_from.to_dict()
  if not arguments["path"]:
    return state
  if arguments["step"] < 0:
    arguments["step"] = None
  arguments["item"] = arguments["item"] or None
  new, _ = checkpoint.init_from(state, **arguments)
  return new
