"""Log lines, warnings and the progress bar of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import logging
import sys
from typing import Any, TextIO
import warnings

import jax


@contextlib.contextmanager
def show_log(*, always: bool = False) -> Iterator[None]:
  """Prints the log of flaxshard within the block, from INFO on.

  Each of Python's warnings is shown once. Python alone shows it again after any
  library has changed the filters, so that a step that is traced twice warns
  twice.

  Args:
    always: Whether to print the log also if logging is configured: if the root
      logger or that of flaxshard has a level or a handler that Python's
      defaults do not have.
  """
  log = logging.getLogger("flaxshard")
  show, shown = warnings.showwarning, set()

  def show_once(
    message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any
  ) -> None:
    if (str(message), category) not in shown:
      shown.add((str(message), category))
      show(message, category, *args, **kwargs)

  with contextlib.ExitStack() as stack:
    stack.callback(setattr, warnings, "showwarning", show)
    warnings.showwarning = show_once
    stack.callback(log.setLevel, log.level)
    stack.callback(setattr, log, "propagate", log.propagate)
    if always or not _is_logging_configured():
      handler = logging.StreamHandler(_stream())
      form = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
      handler.setFormatter(form)
      log.addHandler(handler)
      stack.callback(log.removeHandler, handler)
      log.setLevel(logging.INFO)
      # One of the root logger, such as absl's, would print each line again.
      log.propagate = False
    yield


def quiet_other_processes(worker_id: int = 0) -> None:
  """Logs only warnings and errors until `show_log` ends, but for process 0.

  Call it after JAX has started: asking for the process starts it.

  Args:
    worker_id: The worker that this process is: 0 logs everything.
  """
  if worker_id or jax.process_index():
    log = logging.getLogger("flaxshard")
    log.setLevel(max(log.getEffectiveLevel(), logging.WARNING))


def _is_logging_configured() -> bool:
  root, log = logging.getLogger(), logging.getLogger("flaxshard")
  if log.handlers or log.level or root.level != logging.WARNING:
    return True
  # Orbax logs while it is imported, for which absl calls logging.basicConfig():
  # a plain handler of standard error says nothing about the user.
  return any(
    type(handler) is not logging.StreamHandler
    or handler.stream is not sys.stderr
    for handler in root.handlers
  )


def _stream() -> TextIO:
  # A notebook shows standard error on red ground.
  return sys.stdout if in_notebook() else sys.stderr


@contextlib.contextmanager
def progress_bar(
  first_step: int, num_train_steps: int
) -> Iterator[Callable[[int, Mapping[str, float | int | None]], None]]:
  """Opens a tqdm bar on a terminal or in a notebook.

  Args:
    first_step: The step that the run continues from, 0 for a new one.
    num_train_steps: The last step.

  Yields:
    A function `update(step, row)`; it does nothing elsewhere.
  """
  if not (sys.stderr.isatty() or in_notebook()):
    yield lambda step, row: None
    return
  with warnings.catch_warnings():
    # Without ipywidgets, the bar of a notebook is text.
    warnings.filterwarnings("ignore", "IProgress not found")
    from tqdm import auto
  from tqdm.contrib import logging as tqdm_logging

  # Log lines are printed above the bar, not through it. tqdm replaces the
  # handlers that write to the console, so ask it only where there are some.
  consoles = (sys.stdout, sys.stderr)
  loggers = [
    log
    for log in (logging.getLogger("flaxshard"), logging.getLogger())
    if any(getattr(h, "stream", None) in consoles for h in log.handlers)
  ]
  with (
    auto.tqdm(
      total=num_train_steps,
      initial=first_step,
      unit="step",
      dynamic_ncols=True,
      file=_stream(),
    ) as bar,
    tqdm_logging.logging_redirect_tqdm(loggers, tqdm_class=auto.tqdm),
  ):

    def update(step: int, row: Mapping[str, float | int | None]) -> None:
      shown = {
        name: f"{row[key]:.4g}"
        for name, key in (("loss", "train_loss"), ("acc", "train_accuracy"))
        if row.get(key) is not None
      }
      # A row of an evaluation alone keeps the last training metrics.
      if shown:
        bar.set_postfix(shown, refresh=False)
      bar.update(step - bar.n)

    yield update


def in_notebook() -> bool:
  """Returns whether code runs in a Jupyter kernel, not in a terminal."""
  shell = ipython_shell()
  # tqdm.auto recognizes a kernel by this entry of the config as well.
  return shell is not None and "IPKernelApp" in shell.config


def ipython_shell() -> Any:
  """Returns the shell of IPython, or of a notebook; None elsewhere."""
  # A program that IPython runs has imported it.
  if "IPython" not in sys.modules:
    return None
  from IPython import get_ipython

  return get_ipython()
