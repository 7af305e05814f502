"""Named topologies where there is no TPU compiler, and a quiet CPU run."""

import os
import subprocess
import sys

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec


@pytest.mark.parametrize(
  ("device_assignment", "facts"),
  [
    ("v6e:1x2", r"not installed .*flaxshard\[tpu\]"),
    ("v5e-8", "'v5e:2x4'"),
    (fs.Topology((2, 2, 1, 1)), "Topology.named"),
  ],
)
def test_mistakes(monkeypatch, device_assignment, facts):
  def get_topology_desc(*_, **__):
    raise RuntimeError("JAX TPU support not installed")

  monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
  with pytest.raises(ValueError, match=facts):
    fs.Strategy(device_assignment)


def test_abstract_batch_on_devices():
  strategy = fs.Strategy()
  shape = jax.ShapeDtypeStruct((16, 2), jnp.float32)
  batch = strategy.shard_batch({"x": shape})
  assert batch["x"].sharding == jax.NamedSharding(strategy.mesh, P("replica"))
  assert strategy.jit(lambda b: b["x"].sum()).lower(batch).as_text()


@pytest.mark.tpu
def test_libtpu_writes_nothing_where_there_is_no_tpu():
  environment = {
    name: value
    for name, value in os.environ.items()
    if name != "JAX_PLATFORMS" and not name.startswith("TPU_")
  }
  result = subprocess.run(
    [sys.executable, "-c", "import flaxshard as fs; print(fs.Strategy())"],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert "replica=" in result.stdout and not result.stderr
