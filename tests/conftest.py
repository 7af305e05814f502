"""Eight virtual CPU devices for every test; servers for some."""

import gc
import os

import pytest
import xla_flags

_FLAGS = ["--xla_force_host_platform_device_count=8", *xla_flags.FAST.split()]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_given = os.environ.get("XLA_FLAGS", "").split()
_names = {flag.partition("=")[0] for flag in _given}
os.environ["XLA_FLAGS"] = " ".join(
  [*_given, *(x for x in _FLAGS if x.partition("=")[0] not in _names)]
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
  """Gives each worker one block of tests, of which idle ones steal.

  A file is then split between workers rarely: both would set up its fixtures.
  """
  if config.getoption("dist") != "load":
    return None  # what --dist says
  from xdist import scheduler

  return scheduler.WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
  """Spares the garbage collector the modules and the collected tests."""
  gc.collect()
  gc.freeze()
  # Programs that are traced are many objects, few of them garbage.
  gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def servers():
  """Servers of buckets, started once: clients keep their addresses."""
  import bucket_servers

  with bucket_servers.start():
    yield


@pytest.fixture(scope="session")
def program_server():
  import forked_programs

  with forked_programs.Programs() as started:
    yield started


@pytest.fixture
def programs(program_server):
  """A `forked_programs.Programs`, whose programs end with the test."""
  yield program_server
  program_server.kill()
