"""Ends a run before its last step: a signal, divergence, early stopping.

A run that diverges raises. One whose evaluations no longer improve ends well.
At Ctrl-C, SIGTERM or JAX's notice of preemption, the loop, which asks after
each step, saves a checkpoint and stops. No signal interrupts a save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import logging
import math
import os
import signal
import threading
import time
from typing import Any

from flax.training import early_stopping as flax_early_stopping
import jax
from jax.experimental import multihost_utils
import numpy as np

from flaxshard.core import gradients
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import steps
from flaxshard.train import config as config_lib
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

_log = logging.getLogger(__name__)

# Signals in quick succession are one request: a key that is held down, or a
# signal that reaches the process both directly and through its parent.
_SAME_REQUEST_SECONDS = 1.0
# A run has diverged after so many skipped steps in a row, if the loss scale is
# at its floor. A shorter stretch may be the fault of a few batches.
_MAX_STALLED_STEPS = 20

_all_finite = jax.jit(gradients.all_finite)


class Watch:
  """Raises or warns when a run diverges, and warns of what wrappers tell.

  A run diverges at an applied step with a non-finite loss, at a non-finite
  evaluation, with non-finite parameters that are to be saved, or when all of
  the last 20 steps, or all of a shorter run, were skipped with the loss scale
  at its floor. With `config.on_nonfinite` "stop" the checks raise
  FloatingPointError, with "continue" they warn.

  Args:
    config: A checked config.

  Attributes:
    is_stalled: Whether the last step was skipped, with the loss scale at its
      floor. Such a state may have diverged. It differs from the one before the
      skipped steps in its counters only, so that little is lost if it is not
      saved.
  """

  def __init__(self, config: Any):
    self.is_stalled = False
    self._config = config
    self._warned: set[str] = set()

  def check_steps(
    self, step: int, state: TrainState, progress: steps.Progress
  ) -> None:
    """Checks the steps since the last check.

    Args:
      step: The step just taken.
      state: The state after it.
      progress: The combined progress of all replicas.

    Raises:
      FloatingPointError: The run has diverged.
    """
    if progress.bad_step:
      paths = gradients.nonfinite_leaves(state.params)
      self._report(
        "loss",
        f"step {int(progress.bad_step)}: the loss is not finite; {len(paths)} "
        f"of {len(jax.tree.leaves(state.params))} parameters are not finite "
        f"after step {step}{': ' if paths else ''}{', '.join(paths)}.",
      )
    self.is_stalled = False
    # A fixed scale skips no step, and "auto" may have found nothing to scale.
    found = [w for w in state.wrappers if isinstance(w, LossScale)]
    rules: list[Any] = [w.rule for w in found if w.skips_steps]
    scale = state.wrapper_states.get(LossScale.name)
    if not rules or not scale:
      return
    # On the host: an operation on the devices would be one of all processes.
    if float(scale.scale) > np.float32(rules[0].min_scale):
      return
    stalled = int(scale.bad_steps)
    self.is_stalled = stalled > 0
    floor = (
      f"LossScale: the scale is at its floor, {float(scale.scale):g}, and "
      f"gradients are still not finite ({scale.skipped_steps} steps skipped so "
      "far). A smaller scale is not allowed: look for the source with "
      "flaxshard.nonfinite_leaves(grads), or lower min_scale."
    )
    if stalled >= min(_MAX_STALLED_STEPS, self._config.num_train_steps):
      self._report(
        "stall",
        f"step {step}: the last {stalled} steps were skipped, so training "
        f"makes no progress. {floor} A lower config.learning_rate may help.",
      )
    # The skipped step that lowered the scale to its floor counts, too.
    elif scale.skipped_steps:
      self._warn("floor", f"step {step}: {floor}")

  def check_evaluation(
    self, step: int, evaluation: Mapping[str, float]
  ) -> None:
    """Checks the metrics of an evaluation.

    Args:
      step: The step just taken.
      evaluation: The metrics by name; empty if there was no evaluation.

    Raises:
      FloatingPointError: One is not finite.
    """
    bad = {k: v for k, v in evaluation.items() if not math.isfinite(v)}
    if bad:
      values = ", ".join(f"{name}={value}" for name, value in bad.items())
      self._report(
        "evaluation",
        f"step {step}: the evaluation is not finite: {values}. The parameters "
        "have diverged or overflow in config.precision, where a lower "
        "config.learning_rate may help, or an example of the evaluation is not "
        "finite.",
      )

  def check_params(self, step: int, state: TrainState) -> None:
    """Checks the parameters, before they are saved.

    A finite loss can have infinite gradients. The next step would have a loss
    that is not finite, and a run that resumes from there would stop at once.

    Args:
      step: The step just taken.
      state: The state after it.

    Raises:
      FloatingPointError: One is not finite.
    """
    if bool(_all_finite(state.params)):
      return
    paths = gradients.nonfinite_leaves(state.params)
    self._report(
      "parameters",
      f"step {step}: {len(paths)} parameters are not finite after it: "
      f"{', '.join(paths)}. A lower config.learning_rate may help.",
    )

  def _warn(self, kind: str, message: str) -> None:
    """Logs the first warning of each kind."""
    if kind not in self._warned:
      self._warned.add(kind)
      _log.warning("%s", message)

  def _report(self, kind: str, message: str) -> None:
    if self._config.on_nonfinite == "continue":
      self._warn(kind, message)
      return
    raise FloatingPointError(
      f"{message} This state is not saved; earlier checkpoints are kept. "
      "config.on_nonfinite='continue' would go on."
    )

  def warn_of_pending(self, step: int, state: TrainState, ends: bool) -> None:
    """Warns of gradients that are not in the parameters of an evaluation.

    It is logged for the first such evaluation, and for the last step.

    Args:
      step: The step just taken.
      state: The state after it.
      ends: Whether the step is the last one.
    """
    when = "ends the run" if ends else "is evaluated"
    notes = " ".join(stack.pending(state.wrappers, state.wrapper_states))
    if notes:
      self._warn(when, f"step {step} {when} with updates pending. {notes}")


def stopped_early(
  config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> str | None:
  """Returns why evaluations end a run; None if they do not.

  An evaluation improves if its metric is better than the best one so far by
  more than `min_delta`. Flax's rule tolerates `patience` evaluations in a row
  that do not improve, and stops at the next one. A metric that is not finite
  does not improve; before the first finite one nothing is counted.

  Args:
    config: `config.early_stopping`, also that of an earlier run; without a
      metric nothing ends the run.
    rows: The rows of metrics so far, some of which have an evaluation. A metric
      that is None is not finite.

  Example:
    >>> config = {"metric": "eval_loss", "mode": "auto", "patience": 1,
    ...           "min_delta": 0.0}
    >>> losses = enumerate([0.5, 0.3, 0.4, 0.3])
    >>> stopped_early(config, [{"step": i, "eval_loss": x} for i, x in losses])
    ...     # doctest: +ELLIPSIS
    'stopped early at step 3: eval_loss has not improved on 0.3 of step 1 by...'
  """
  metric = config["metric"]
  if metric == "none":
    return None
  # Flax's rule knows smaller metrics as better.
  mode = config_lib.resolve_mode(metric, config["mode"])
  sign = -1 if mode == "max" else 1
  rule = flax_early_stopping.EarlyStopping(
    patience=config["patience"], min_delta=config["min_delta"]
  )
  best_step = 0
  for row in rows:
    if metric not in row:
      continue
    value = math.inf if row[metric] is None else sign * row[metric]
    rule = rule.update(value if math.isfinite(value) else math.inf)
    if rule.has_improved:
      best_step = row["step"]
    if rule.should_stop:
      return (
        f"stopped early at step {row['step']}: {metric} has not improved on "
        f"{rule.best_metric * sign:.4g} of step {best_step} by more than "
        f"{config['min_delta']:g} in {config['patience'] + 1} evaluations"
      )
  return None


class StopRequest:
  """Catches SIGINT and SIGTERM within a `with` block.

  The first signal is noted, the second one answered with a log line. The third
  one raises KeyboardInterrupt, or SystemExit for SIGTERM, but never while a
  checkpoint is being written. Python handles a signal between two of its own
  instructions, so none of them ends a compilation; SIGQUIT does. Outside of
  the main thread no signal is caught, because Python cannot do that.

  With JAX's preemption service (`jax.distributed`), SIGTERM is left to JAX,
  which reports it to all processes. A SIGINT, which may have reached this
  process alone, is passed on to JAX as SIGTERM; see `agree`.

  A key that is still held down after the block is no new request.

  Attributes:
    signum: Number of the first signal, or None.
  """

  def __init__(self) -> None:
    self.signum: int | None = None
    self._count = 0
    self._last_time = -math.inf
    self._is_saving = False
    self._has_ended = False
    self._before: dict[int, Any] = {}

  def __enter__(self) -> StopRequest:
    """Installs the handlers."""
    if threading.current_thread() is threading.main_thread():
      signums = [signal.SIGINT]
      if not _uses_preemption_service():
        signums.append(signal.SIGTERM)
      for signum in signums:
        self._before[signum] = signal.signal(signum, self._receive)
    return self

  def __exit__(self, *error: object) -> None:
    """Restores the handlers; after a request, once the key is released."""
    self._has_ended = True
    if self.signum is None:
      for signum, handler in self._before.items():
        signal.signal(signum, handler)

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Lets no signal interrupt the `with` block."""
    self._is_saving = True
    try:
      yield
    finally:
      self._is_saving = False

  def agree(self, step: int) -> int | None:
    """Returns the signal to stop for after a step, the same step everywhere.

    Call it after every step. Without JAX's preemption service it costs nothing.

    Args:
      step: The step just taken.

    Returns:
      Without the preemption service, the first signal of this process, or None.
      With it, None until a step that no process has passed; at that step the
      first signal, or SIGTERM in processes that received none.

    References:
      https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
    """
    if not _uses_preemption_service():
      return self.signum
    if multihost_utils.reached_preemption_sync_point(step):
      # Read only now: the signal may have come since the call.
      return self.signum or signal.SIGTERM
    return None

  def _receive(self, signum: int, frame: Any) -> None:
    del frame
    before, self._last_time = self._last_time, time.monotonic()
    if self._last_time - before < _SAME_REQUEST_SECONDS:
      return
    if self._has_ended:
      signal.signal(signum, self._before[signum])
      os.kill(os.getpid(), signum)
      return
    self._count += 1
    name = signal.Signals(signum).name
    if self._count == 1:
      self.signum = signum
      _log.warning("%s: stopping after this step, with a checkpoint", name)
      if _uses_preemption_service():
        os.kill(os.getpid(), signal.SIGTERM)
    elif self._count == 2 or self._is_saving:
      _log.warning(
        "%s again: stopping with a checkpoint; a third signal ends the run "
        "without one, but none interrupts a save",
        name,
      )
    elif signum == signal.SIGINT:
      raise KeyboardInterrupt
    else:
      raise SystemExit(128 + signum)


def _uses_preemption_service() -> bool:
  return (
    jax.distributed.is_initialized()
    and jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
  )
