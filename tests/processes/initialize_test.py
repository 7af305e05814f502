"""flaxshard.initialize: one process, several, and mistakes."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import pytest

import flaxshard as fs


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_")):
      monkeypatch.delenv(name)
  for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    monkeypatch.delenv(name, raising=False)


def test_one_process_opens_no_port(caplog, monkeypatch):
  def fail(*args, **kwargs):
    raise AssertionError("a socket was opened")

  monkeypatch.setattr(socket, "socket", fail)
  with caplog.at_level("INFO", "flaxshard"):
    for _ in range(2):
      assert fs.initialize().num_processes == 1
    assert fs.initialize("localhost:1234", 1, 0).num_processes == 1
  assert not jax.distributed.is_initialized()
  assert len(caplog.messages) == 3
  assert "one process: no cluster variables are set" in caplog.messages[0]


def test_snippet_of_the_docs_runs(capsys):
  docs = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "processes.md"
  snippets = re.findall(r"```python\n(.*?)```", docs.read_text(), re.S)
  exec(next(s for s in snippets if "fs.initialize" in s))
  assert capsys.readouterr().out.startswith("0 1 no cluster variables")


@pytest.mark.parametrize(
  "name", ["heartbeat_timeout", "initialization_timeout"]
)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "60", None, True])
def test_invalid_timeouts_raise(name, value):
  with pytest.raises(ValueError, match=name):
    fs.initialize(**{name: value})


def test_call_after_jax_has_started_raises():
  jax.devices()
  with pytest.raises(RuntimeError, match="before JAX starts its devices"):
    fs.initialize("127.0.0.1:1", 2, 0)
  assert not jax.distributed.is_initialized()


SCRIPT = """
import logging, os, socket, sys
logging.basicConfig(format="%(message)s")
logging.getLogger("flaxshard").setLevel("INFO")
import flaxshard as fs
import jax
jax.config.update("jax_platforms", "cpu")
for _ in range(2):
  fs.initialize(heartbeat_timeout=20.0)
# All processes are on this machine: no other address of it has the port open.
port = int(os.environ["JAX_COORDINATOR_PORT"])
assert socket.socket().connect_ex(("127.0.0.2", port))
for arguments in ({"num_processes": 3}, {"heartbeat_timeout": 21.0}):
  try:
    fs.initialize(**{"heartbeat_timeout": 20.0, **arguments})
  except ValueError as e:
    assert list(arguments)[0] in str(e), e
  else:
    raise AssertionError(arguments)
mesh = jax.make_mesh((2,), ("x",))
ones = jax.make_array_from_callback(
  (2,), jax.NamedSharding(mesh, jax.P("x")),
  lambda index: jax.numpy.ones(1) * (1 + jax.process_index()))
total = float(jax.jit(jax.numpy.sum)(ones))
print(jax.process_count(), jax.process_index(), total)
"""


@pytest.mark.slow
def test_variables_of_a_launcher_connect_two_processes():
  """They compute together, and a second call does nothing."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  environ |= {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "2",
    "JAX_COORDINATOR_PORT": str(port),
  }
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", SCRIPT],
      env={**environ, "RANK": str(rank)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    outputs = [p.communicate(timeout=120) for p in processes]
  finally:
    for p in processes:
      p.kill()
  for rank, (out, err) in enumerate(outputs):
    assert processes[rank].returncode == 0, err
    # Gloo prints lines, too.
    assert out.splitlines()[-1].split() == ["2", str(rank), "3.0"]
    lines = [line for line in err.splitlines() if "torchrun" in line]
    assert len(lines) == 1
    assert f"process {rank} of 2, coordinator 127.0.0.1:{port}" in lines[0]
