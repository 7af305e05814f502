"""Named topologies where there is no TPU compiler, and a quiet CPU run."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flaxshard as fs
from flaxshard.partitioning import compile_only

P = jax.sharding.PartitionSpec


@pytest.mark.parametrize(
  ("arguments", "error", "part"),
  [
    (dict(device_assignment="v5e:2x4"), ValueError, r'"flaxshard\[tpu\]"'),
    (dict(device_assignment="v5e-8"), ValueError, "'v5e:2x4'"),
    (
      dict(device_assignment=fs.Topology((2, 2, 1, 1))),
      ValueError,
      "Topology.named",
    ),
  ],
)
def test_invalid_first_argument_raises(
  monkeypatch: pytest.MonkeyPatch,
  arguments: dict[str, Any],
  error: type[Exception],
  part: str,
) -> None:
  monkeypatch.setattr(compile_only, "has_libtpu", lambda: False)
  with pytest.raises(error, match=part):
    fs.Strategy(**arguments)


def test_abstract_batch_on_devices() -> None:
  strategy = fs.Strategy()
  shape = jax.ShapeDtypeStruct((16, 2), jnp.float32)
  batch = strategy.shard_batch({"x": shape})
  assert batch["x"].sharding == jax.NamedSharding(strategy.mesh, P("replica"))
  assert strategy.jit(lambda b: b["x"].sum()).lower(batch).as_text()


@pytest.mark.tpu
def test_libtpu_writes_nothing_where_there_is_no_tpu() -> None:
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
