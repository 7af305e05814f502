"""Calls the user's functions after each row of metrics of a run.

A hook is a function `hook(step, state, metrics)`. It is called in every process
once a row of metrics is written, and after the checkpoint of that step, if one
is due: at multiples of `log_every_steps` and `eval_every_steps`, and at the
last step. So a hook may use collectives, and one that writes files does so
where `jax.process_index() == 0`. Hooks of a step are called in their order; a
run that continues from a checkpoint does not call those of its step again.

With `AGN(transport="store")` every worker is process 0 of a program of its own,
and calls its hooks at its own pace. `workdir` is then the worker's folder, and
a class can take `worker_id`.

- `step`: Number of batches consumed, by which rows and checkpoints are named.
- `state`: The `TrainState`. Its arrays are deleted by the next step, so that no
  hook keeps a second state in memory: a hook copies what it needs later.
- `metrics`: The row, a dict of floats by name. It is a copy.

What a hook returns is not used. An exception ends the run in all processes with
a `HookError`; the rows and checkpoints until then stay::

    config.hooks = (
      "my_package.hooks:log",                                  # a function
      {"name": "my_package.hooks:Upload", "bucket": "gs://b"}, # a class
    )
    train_and_evaluate(config, workdir, hooks=[my_hook])  # called after those
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
from typing import Any

from flaxshard.core import registry
from flaxshard.state.train_state import TrainState

Hook = Callable[[int, TrainState, Mapping[str, float]], Any]


class HookError(RuntimeError):
  """A hook raised; the message names it, the step and the error."""


def create(
  config: Any, hooks: Sequence[Hook], workdir: str, worker_id: int = 0
) -> Callable[[int, TrainState, Mapping[str, float | int | None]], None]:
  """Returns a function that calls the hooks of a run, in their order.

  Args:
    config: The checked config. Its `hooks` are dicts with a `"name"`,
      `"package.module:attribute"`, and arguments. A class is created with the
      arguments, and with `config`, `workdir` and `worker_id` if it takes them.
      Another callable is the hook itself, and the arguments are passed at each
      call.
    hooks: Further hooks, which are called after the named ones.
    workdir: The folder of the run, or of the worker.
    worker_id: The worker that this process is.

  Returns:
    A function `call(step, state, row)`. Each hook gets a copy of the row,
    without the values that are None. If one raises an exception, `call` raises
    a HookError.

  Raises:
    TypeError: One of `hooks` is no function.
    ValueError: A name is unknown, or an argument is.
  """
  offered = {"config": config, "workdir": workdir, "worker_id": worker_id}
  found: list[tuple[str, Hook]] = []
  for i, named in enumerate(config.hooks):
    where, hook, arguments = registry.find(f"config.hooks[{i}]", named, {})
    if inspect.isclass(hook):
      given = registry.accepted(hook, offered, arguments)
      hook = registry.construct(where, hook, arguments, given=given)
      arguments = {}
    # Now, and not at the first row of metrics.
    registry.check_call(where, hook, 0, None, {}, **arguments)
    hook = functools.partial(hook, **registry.to_plain(arguments))
    found.append((named["name"], hook))
  for i, hook in enumerate(hooks):
    # To call a class would make an object at each step, and do nothing else.
    if not callable(hook) or inspect.isclass(hook):
      raise TypeError(
        f"hooks[{i}] must be a function (step, state, metrics) or a callable "
        f"object, got {hook!r}."
      )
    # The name of a function, or of the class of an object.
    cls = hook if hasattr(hook, "__qualname__") else type(hook)
    found.append((f"{cls.__module__}:{cls.__qualname__}", hook))

  def call(
    step: int, state: TrainState, row: Mapping[str, float | int | None]
  ) -> None:
    for name, hook in found:
      metrics = {k: float(v) for k, v in row.items() if v is not None}
      try:
        hook(step, state, metrics)
      except Exception as e:
        raise HookError(
          f"hook {name} raised {type(e).__name__} at step {step}: {e}"
        ) from e

  return call
