"""flaxshard.initialize: one process, and mistakes."""

import os
import socket

import jax
import pytest

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
