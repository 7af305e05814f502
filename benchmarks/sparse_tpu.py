"""Prints what the TPU compiler says that steps of an embedding table cost.

No TPU is needed: libtpu compiles for a topology that it knows by name. Every
figure is the compiler's, not a run's. A table of 1,000,000 rows of 128 features
is looked up by 4,096 ids per device, and updated by Adam. A table has a row for
each program:

  exchanged  bytes that a device receives from others in the collectives of a
             step, if they are rings: those of all-reduce count twice.
  largest    the largest result of a collective.
  temp       temporary memory of a device.
  state      arguments of a device that are updated in place.

  pip install "jax[tpu]"
  python benchmarks/sparse_tpu.py
  python benchmarks/sparse_tpu.py --topology v5e:2x2 --rows 100000
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

# Before JAX is imported: libtpu looks for TPUs otherwise, and locks itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax

import flaxshard as fs
from flaxshard import plans

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct


class Program(NamedTuple):
  """A step to compile.

  Attributes:
    gradient: `"dense"` or `"rows"`.
    way: `"run"`, once per replica, or `"jit"`, over the whole batch.
    table: Where the rows are: `"whole"` on each device, or split over the axis
      `"replica"` or `"model"`.
    loss_scale: Whether the step has a dynamic loss scale.
  """

  gradient: str
  way: str
  table: str
  loss_scale: bool = False


PROGRAMS = (
  Program("dense", "run", "whole"),
  Program("rows", "run", "whole"),
  Program("dense", "run", "whole", loss_scale=True),
  Program("rows", "run", "whole", loss_scale=True),
  Program("dense", "jit", "whole"),
  Program("rows", "jit", "whole"),
  Program("rows", "jit", "whole", loss_scale=True),
  Program("dense", "jit", "replica"),
  Program("rows", "jit", "replica"),
  Program("rows", "jit", "replica", loss_scale=True),
  Program("dense", "run", "model"),
  Program("rows", "run", "model"),
  Program("rows", "run", "model", loss_scale=True),
)


def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
  """Takes a step on the squared error of the rows that are looked up."""

  def loss_fn(params: Any) -> jax.Array:
    rows = params["table"][batch["ids"]]
    return jnp.square(rows - batch["targets"]).mean()

  return state.minimize(loss_fn)


def compile_program(program: Program, args: argparse.Namespace) -> str:
  """Compiles a program; returns a row of the table."""
  devices = fs.Strategy(args.topology).num_replicas_in_sync
  mesh = {"model": devices, "replica": 1} if program.table == "model" else None
  strategy = fs.Strategy(args.topology, mesh_shape=mesh)
  spec = P() if program.table == "whole" else P(program.table, None)
  state = fs.TrainState.create(
    apply_fn=None,
    params={
      "table": Shape(
        (args.rows, args.features),
        jnp.float32,
        sharding=jax.sharding.NamedSharding(strategy.mesh, spec),
      )
    },
    tx=optax.adam(1e-3),
    wrappers=[fs.LossScale("dynamic")] if program.loss_scale else [],
    sparse=["table"] if program.gradient == "rows" else [],
    strategy=strategy,
  )
  count = devices * args.ids
  batch = strategy.shard_batch(
    {
      "ids": Shape((count,), jnp.int32),
      "targets": Shape((count, args.features), jnp.float32),
    }
  )
  jit = strategy.jit if program.way == "run" else jax.jit
  lowered = jit(train_step, donate_argnums=0).lower(state, batch)
  compiled = lowered.compile()
  found = [
    c for c in plans.collectives(compiled, strategy.mesh) if c.group_size > 1
  ]
  memory = compiled.memory_analysis()
  cells = [
    sum(map(received, found)),
    max(c.result_bytes for c in found),
    memory.temp_size_in_bytes,
    memory.alias_size_in_bytes,
  ]
  name = ", ".join(
    [program.gradient, program.way, program.table]
    + ["loss scale"] * program.loss_scale
  )
  figures = " | ".join(f"{x / 2**20:9,.1f}" for x in cells)
  return f"| {name:<30} | {figures} |"


def received(collective: Any) -> float:
  """Returns the bytes that a device receives in a ring."""
  others = (collective.group_size - 1) / collective.group_size
  size = max(collective.operand_bytes, collective.result_bytes)
  rounds = 2 if collective.kind == "all-reduce" else 1
  return rounds * others * size * collective.executions


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--topology", default="v5e:2x4")
  parser.add_argument("--rows", type=int, default=1_000_000)
  parser.add_argument("--features", type=int, default=128)
  parser.add_argument("--ids", type=int, default=4096, help="ids per device")
  args = parser.parse_args()
  size = 4 * args.rows * args.features / 2**20
  print(
    f"{args.topology}, table of {args.rows:,} x {args.features} ({size:,.0f} "
    f"MiB), {args.ids:,} ids per device, Adam, JAX {jax.__version__}; MiB.\n"
  )
  names = ["exchanged", "largest", "temp", "state"]
  print(f"| {'step':<30} | {' | '.join(f'{name:>9}' for name in names)} |")
  print(f"|:{'-' * 31}|{'----------:|' * len(names)}")
  for program in PROGRAMS:
    print(compile_program(program, args), flush=True)


if __name__ == "__main__":
  main()
