"""Counts the programs that XLA compiles."""

from collections.abc import Iterator
import contextlib
import dataclasses

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Count:
  """The number of programs compiled since `count` was entered."""

  total: int = 0


@contextlib.contextmanager
def count() -> Iterator[Count]:
  """Yields a `Count` that is updated while the `with` block runs.

  Every program counts, also small ones such as `jnp.ones`: create the arguments
  before the block.
  """
  compiled = Count()

  def on_duration(event: str, duration: float, **kwargs: object) -> None:
    del duration, kwargs
    if event == _EVENT:
      compiled.total += 1

  jax.monitoring.register_event_duration_secs_listener(on_duration)
  try:
    yield compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(on_duration)
