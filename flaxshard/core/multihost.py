"""Shares errors, flags and values between the processes of a program.

All of it goes through the key-value store of JAX's coordination service, which
process 0 runs. It needs no devices, and a process that waits here is not in a
collective operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import itertools
import json
import os
import socket
from typing import Any

import jax

from flaxshard.core import checks

# Long messages, such as those with the output of a compiler, are cut.
_MESSAGE_LENGTH = 2000

# A process may load data or read a checkpoint before it takes part. A process
# that is lost meanwhile is found by its heartbeats.
_TIMEOUT_MS = 24 * 3600 * 1000

# All processes make the same exchanges in the same order.
_exchange_numbers = itertools.count()

# The index of this process and the number of processes, if known.
_process: tuple[int, int] | None = None


def set_process(index: int, count: int) -> None:
  """Sets the index of this process and the number of processes.

  JAX knows them only after it has started its devices.

  Args:
    index: The index of this process.
    count: The number of processes.

  Example:
    >>> set_process(0, 1)
  """
  global _process
  _process = index, count


def is_process_known() -> bool:
  """Returns whether `set_process` was called.

  Example:
    >>> set_process(0, 1)
    >>> is_process_known()
    True
  """
  return _process is not None


def process_index() -> int:
  """Returns the index of this process.

  Unless `set_process` was called, it starts JAX's devices.

  Example:
    >>> process_index()
    0
  """
  return jax.process_index() if _process is None else _process[0]


def process_count() -> int:
  """Returns the number of processes.

  Unless `set_process` was called, it starts JAX's devices.

  Example:
    >>> process_count()
    1
  """
  return jax.process_count() if _process is None else _process[1]


def coordination_client() -> Any:
  """Returns the client of JAX's coordination service.

  Raises:
    ValueError: The processes are not connected.

  Example:
    >>> client = coordination_client()  # doctest: +SKIP
    >>> client.key_value_set("key", "value")  # doctest: +SKIP
  """
  # Orbax has the public function for it. `import flaxshard` does not need it,
  # and Orbax takes a fifth of a second to import.
  import orbax.checkpoint as ocp

  return ocp.multihost.get_jax_distributed_client()


def exchange(value: Any) -> list[Any]:
  """Returns the values of all processes, by process.

  All processes must call it, in the same order as other exchanges.

  Args:
    value: That of this process: a value for JSON.

  Raises:
    jax.errors.JaxRuntimeError: Another process has ended.

  Example:
    >>> exchange("a")
    ['a']
  """
  index, count = process_index(), process_count()
  if count == 1:
    return [value]
  client = coordination_client()
  number = next(_exchange_numbers)
  name = f"flaxshard/exchange/{number}"
  client.key_value_set(f"{name}/{index}", json.dumps(value))
  client.wait_at_barrier(name, _TIMEOUT_MS)
  if number:
    # All processes have read the values before: they are at this exchange.
    client.key_value_delete(f"flaxshard/exchange/{number - 1}/{index}")
  received = dict(client.key_value_dir_get(f"{name}/"))
  return [json.loads(received[f"{name}/{k}"]) for k in range(count)]


@contextlib.contextmanager
def raise_on_all_processes(*kinds: type[Exception]) -> Iterator[None]:
  """Raises one process's error in all processes.

  Without it, the processes that have no error go on and wait for the failed one
  in their next collective. All processes must enter the block. In the block, do
  not call a collective after code that can fail: the failed process would not
  take part in it. With one process it does nothing.

  Args:
    *kinds: Exception types that the other processes raise as the same type. For
      an error of any other type they raise a RuntimeError.

  Raises:
    Exception: The error of this process, or of another one, with its index.

  Example:
    >>> with raise_on_all_processes(ValueError):
    ...   pass
  """
  if process_count() == 1:
    yield
    return
  error = sent = None
  try:
    yield
  except Exception as e:
    error, matches = e, [isinstance(e, kind) for kind in kinds] + [True]
    sent = matches.index(True), str(e)[:_MESSAGE_LENGTH]
  received = exchange(sent)
  if error is not None:
    raise error
  for process, failure in enumerate(received):
    if failure is not None:
      code, message = failure
      raise (*kinds, RuntimeError)[code](f"process {process}: {message}")


def check_agreement(facts: Mapping[str, Any], hint: str = "") -> None:
  """Raises in all processes if the facts of any two processes differ.

  All processes must call it. With one process it does nothing.

  Args:
    facts: A few facts by name, which must be equal in all processes. The values
      are made of dicts, lists, strings, numbers, bools and None.
    hint: A sentence for the message that says what to do.

  Raises:
    ValueError: Two processes disagree. The message has the first difference,
      with both values and processes.

  Example:
    >>> check_agreement({"seed": 0})
  """
  if process_count() == 1:
    return
  name = f"process {process_index()} (host {socket.gethostname()}, "
  # All as JSON, which has lists for tuples.
  (name_0, facts_0), *others = exchange([f"{name}pid {os.getpid()})", facts])
  for name_1, facts_1 in others:
    for field, value_0, value_1 in checks.differences(facts_0, facts_1):
      raise ValueError(
        f"the processes disagree on {field}: {value_0!r:.300} in {name_0}, "
        f"{value_1!r:.300} in {name_1}. {hint}".rstrip()
      )


def summarize_error(error: BaseException) -> str:
  """Returns the type of an error and the first line of its message.

  Args:
    error: The error.

  Example:
    >>> summarize_error(KeyError("w"))
    "KeyError: 'w'"
  """
  first_line = (str(error).splitlines() or [""])[0]
  return f"{type(error).__name__}: {first_line}"
