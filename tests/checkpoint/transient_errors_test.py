"""Errors that may go away are raised, and no step is passed over for them."""

import contextlib
import gc
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import reader

LEAVES = 8


def create(value):
  return fs.TrainState.create(
    apply_fn=None,
    params={f"w{i}": jnp.full(1000, value + i) for i in range(LEAVES)},
    tx=optax.sgd(0.1),
  )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Two steps of a plain Flax program, which have no digests."""
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  with ocp.CheckpointManager(path) as manager:
    for step in (1, 2):
      state = create(float(step)).without_wrappers()
      manager.save(step, args=ocp.args.StandardSave(state))
  return path


@pytest.fixture
def path(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


def assert_healthy(path):
  """The newest step can be restored, and saving renames no directory."""
  with fs.Checkpointer(path) as checkpointer:
    restored = checkpointer.restore(create(0.0))
    assert checkpointer.restored_step == 2
    np.testing.assert_array_equal(restored.params["w0"], np.full(1000, 2.0))
    checkpointer.save(3, restored)
  assert sorted(os.listdir(path)) == ["1", "2", "3"]


@contextlib.contextmanager
def leave_open_files(spare):
  """Takes all file descriptors of this process but a few."""
  # Event loops of earlier tests would give their descriptors back meanwhile.
  gc.collect()
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  used = max(map(int, os.listdir("/proc/self/fd")))
  resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
  with contextlib.ExitStack() as stack:
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    files = []
    with pytest.raises(OSError, match="Too many open files"):
      while True:
        files.append(stack.enter_context(open(os.devnull)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 + spare, hard))
    yield


# Without a descriptor asyncio cannot make, nor close, its event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("spare", [0, 3])
def test_too_many_open_files_raises(path, spare):
  with fs.Checkpointer(path) as checkpointer:
    with (
      leave_open_files(spare),
      pytest.raises(Exception) as e,  # of Orbax
    ):
      checkpointer.restore(create(0.0))
    assert not isinstance(e.value, digests.Damaged)
    assert checkpointer.all_steps() == [1, 2]
  assert_healthy(path)


TRANSIENT = [
  jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
  MemoryError(),
  OSError(24, "Too many open files"),
  ValueError("NOT_FOUND: Error opening file [too many open files]"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda e: type(e).__name__)
def test_transient_errors_are_raised(path, error, monkeypatch):
  read_item, calls = reader.read_item, []

  def fail_once(*args):
    calls.append(args)
    if len(calls) == 1:
      raise error
    return read_item(*args)

  monkeypatch.setattr(reader, "read_item", fail_once)
  with fs.Checkpointer(path) as checkpointer:
    with pytest.raises(type(error)) as e:
      checkpointer.restore(create(0.0))
    assert e.value is error
  assert_healthy(path)
