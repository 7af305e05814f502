"""A worker that trains a config; `worker_processes` starts and disturbs it."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import connection
import time
from typing import Any

import tiny
import worker_program

from flaxshard import train
from flaxshard.train import console


def run(
  options: worker_program.Options,
  rows: connection.Connection,
  log: connection.Connection,
) -> None:
  """Trains a tiny model on the digits, in a process of its own."""
  worker_program.set_up(options, log)

  def send(kind: str, **fields: Any) -> None:
    rows.send({"kind": kind, "time": time.monotonic(), **fields})

  def watch(step: int, state: Any, metrics: Mapping[str, float]) -> None:
    """Sends a row; a hook, which is called after each step."""
    kinds = ("commit_workers", "eval_loss")
    send(
      "step",
      step=step,
      center=worker_program.digest(state),
      commits=int(state.wrapper_states["agn"].commits),
      **{x: float(metrics[x]) for x in kinds if x in metrics},
    )
    seconds = options.step_seconds
    if options.fault and step >= options.fault.step:
      seconds = worker_program.fail(options.fault, seconds)
    time.sleep(seconds)

  with console.print_log():
    state = train.train_and_evaluate(
      config(options),
      options.folder,
      hooks=[watch],
      worker_id=options.worker,
      num_workers=options.num_workers,
      start_timeout=options.start_timeout,
    )
  send("end", step=int(state.step), center=worker_program.digest(state))


def config(options: worker_program.Options) -> Any:
  """Returns the config."""
  return tiny.config(
    batch_size=8 * options.num_workers,
    num_train_steps=options.size,
    wrappers=(("agn", options.agn),),
    precision="float32",
    log_every_steps=1,
    eval_every_steps=20,
    checkpoint_every_steps=5,
  )
