"""Counts the programs that XLA compiles."""

from collections.abc import Iterator
import contextlib
import types

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def count() -> Iterator[types.SimpleNamespace]:
  """Yields the number of programs compiled in the `with` block so far, `total`.

  Every program counts, also small ones such as `jnp.ones`: create the arguments
  before the block.
  """
  compiled = types.SimpleNamespace(total=0)

  def on_duration(event: str, duration: float, **kwargs: object) -> None:
    del duration, kwargs
    if event == _EVENT:
      compiled.total += 1

  jax.monitoring.register_event_duration_secs_listener(on_duration)
  try:
    yield compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(on_duration)
