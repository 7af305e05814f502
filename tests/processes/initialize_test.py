"""flaxshard.initialize: one process, several, and mistakes."""

import os
import socket

import jax
import pytest
import two_processes

import flaxshard as fs


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "MASTER_", "RANK", "WORLD_SIZE")):
      monkeypatch.delenv(name)


def test_one_process_opens_no_port(caplog, monkeypatch):
  # None can be made.
  monkeypatch.setattr(socket, "socket", None)
  with caplog.at_level("INFO", "flaxshard"):
    for _ in range(2):
      assert fs.initialize().num_processes == 1
    assert fs.initialize("localhost:1234", 1, 0).num_processes == 1
  assert not jax.distributed.is_initialized()
  assert len(caplog.messages) == 3
  assert "one process: no cluster variables are set" in caplog.messages[0]


def test_mistakes():
  for name in ("heartbeat_timeout", "initialization_timeout"):
    with pytest.raises(ValueError, match=name):
      fs.initialize(**{name: 0})
  jax.devices()
  with pytest.raises(RuntimeError):
    fs.initialize("127.0.0.1:1", 2, 0)
  assert not jax.distributed.is_initialized()


SCRIPT = """
import logging, os, socket, sys
os.environ["RANK"] = sys.argv[2]
os.environ["JAX_COORDINATOR_PORT"] = sys.argv[1]
logging.basicConfig(format="%(message)s")
logging.getLogger("flaxshard").setLevel("INFO")
import flaxshard as fs
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
first = fs.initialize()
assert fs.initialize() == first
# All processes are on this machine: no other address of it has the port open.
assert socket.socket().connect_ex(("127.0.0.2", int(sys.argv[1])))
mesh = jax.make_mesh((2,), ("x",))
ones = jax.make_array_from_callback(
  (2,), jax.NamedSharding(mesh, jax.P("x")),
  lambda index: jax.numpy.ones(1) * (1 + jax.process_index()))
total = float(jax.jit(jax.numpy.sum)(ones))
print(jax.process_count(), jax.process_index(), total, file=sys.stderr)
"""


@pytest.mark.slow
def test_variables_of_a_launcher_connect_two_processes(monkeypatch):
  """They compute together, and a second call does nothing."""
  variables = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", WORLD_SIZE="2")
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  ended = two_processes.run_until_end(SCRIPT)
  for rank, (code, err) in enumerate(ended):
    log, result = err.splitlines()
    assert code == 0
    assert log.startswith(f"process {rank} of 2, coordinator 127.0.0.1:")
    assert "torchrun" in log
    assert result.split() == ["2", str(rank), "3.0"]
