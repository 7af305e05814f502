"""Prints what the TPU compiler says that training steps cost.

No TPU is needed: libtpu compiles for a topology that it knows by name. Every
figure is the compiler's, not a run's. A table has a row for each program:

  bytes  XLA's "bytes accessed", and their ratio to those of the first program.
         They include VMEM, and a slice that is copied there in advance counts
         as the whole array that it is taken from.
  temp   temporary memory.
  peak   the largest memory alive at once, arguments and outputs included.

All are those of one device, in copies of the parameters in float32 (which is
the size of the gradients too). The state is donated.

  pip install "jax[tpu]"
  python benchmarks/tpu.py
  python benchmarks/tpu.py loss_scale --topologies v5e:2x2 --models mlp
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import importlib.metadata
import os
from typing import Any, NamedTuple

# Before JAX is imported: libtpu looks for TPUs otherwise, and locks itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import loss_scale as steps
import numpy as np
import optax

import flaxshard as fs

PyTree = Any


class Program(NamedTuple):
  """A jitted step and the abstract arguments to compile it for."""

  name: str
  step: Callable[..., Any]
  args: tuple[Any, ...]
  jit: Callable[..., Any] = jax.jit


class Figures(NamedTuple):
  """The compiler's figures of a program, in bytes per device."""

  accessed: float
  temp: float
  peak: float


def compile_program(program: Program) -> Figures:
  """Compiles a program and reads its figures."""
  jitted = program.jit(program.step, donate_argnums=0)
  compiled = jitted.lower(*program.args).compile()
  memory = compiled.memory_analysis()
  return Figures(
    compiled.cost_analysis()["bytes accessed"],
    memory.temp_size_in_bytes,
    memory.peak_memory_in_bytes,
  )


def print_table(title: str, unit: float, programs: list[Program]) -> None:
  """Compiles programs and prints their figures, in units of `unit` bytes."""
  print(f"\n{title}; one copy: {unit / 2**20:.0f} MiB.\n")
  print("| program          | bytes | ratio |  temp |  peak |")
  print("|-----------------:|------:|------:|------:|------:|")
  first = None
  for program in programs:
    figures = compile_program(program)
    first = first or figures
    print(
      f"| {program.name:<16} | {figures.accessed / unit:5.2f} "
      f"| {figures.accessed / first.accessed:5.2f} "
      f"| {figures.temp / unit:5.2f} | {figures.peak / unit:5.2f} |",
      flush=True,
    )


def size_of(params: PyTree) -> int:
  """Returns the bytes of parameters in float32."""
  return sum(4 * p.size for p in jax.tree.leaves(params))


# -- Models.


def mlp(dtype: Any) -> steps.Problem:
  """6 layers of 4096 features, batch 1024."""
  x = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
  loss = lambda out, y: ((out - y) ** 2).mean()
  model = steps.Mlp(dtype, features=4096)
  return problem(model, x, x, loss)


def transformer(dtype: Any) -> steps.Problem:
  """16 heads of 64 features; 16 sequences."""
  return decoder(dtype, heads=16, batch=16)


def transformer_wide_heads(dtype: Any) -> steps.Problem:
  """8 heads of 128 features, as wide as a tile of TPU memory; 8 sequences."""
  return decoder(dtype, heads=8, batch=8)


def decoder(dtype: Any, heads: int, batch: int) -> steps.Problem:
  """2 layers of 1024 features, vocabulary 4096, sequences of 256."""
  x = jax.ShapeDtypeStruct((batch, 256), jnp.int32)

  def loss(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  model = steps.Transformer(
    dtype, features=1024, layers=2, heads=heads, vocab=4096
  )
  return problem(model, x, x, loss)


def problem(model: Any, x: Any, y: Any, loss: Any) -> steps.Problem:
  def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    return loss(model.apply({"params": params}, batch[0]), batch[1])

  params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
  return steps.Problem(params, loss_fn, (x, y), optax.adam(1e-3))


MODELS = {f.__name__: f for f in (mlp, transformer, transformer_wide_heads)}


# -- Loss scaling: the same step with different ways to skip overflows.


def loss_scale_programs(
  problem: steps.Problem, mesh: Mesh, names: list[str]
) -> list[Program]:
  """Returns the steps of `loss_scale.py`, for a batch split over the mesh."""
  whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("replica")))

  def place(tree: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  programs = []
  for name in names:
    step: Any = None

    def create(params: PyTree, name: str = name) -> Any:
      nonlocal step
      state, step = steps.VARIANTS[name](problem._replace(params=params))
      return state

    state = place(jax.eval_shape(create, problem.params), whole)
    programs.append(Program(name, step, (state, place(problem.batch, split))))
  return programs


def loss_scale(topology: str, args: argparse.Namespace) -> None:
  """Prints a table for each model, dtype and number of devices."""
  devices = np.array(topologies.get_topology_desc(topology, "tpu").devices)
  for model in args.models:
    for dtype in args.dtypes:
      for count in args.devices or (1, len(devices)):
        given = MODELS[model](jnp.dtype(dtype))
        mesh = Mesh(devices[:count], ("replica",))
        plural = "s, data parallel" if count > 1 else ""
        print_table(
          f"loss_scale, {model}, {dtype} compute, {topology}, {count} device"
          f"{plural}",
          size_of(given.params),
          loss_scale_programs(given, mesh, args.variants),
        )


# -- Replicas: the same step in the global view, and once per replica.


def replica_models(dtype: Any) -> dict[str, tuple[Any, Any, Any]]:
  """Returns a model, its input and a loss, by name."""
  x = jax.ShapeDtypeStruct((1024, 2048), jnp.float32)
  tokens = jax.ShapeDtypeStruct((64, 128), jnp.int32)
  return {
    "mlp": (
      steps.Mlp(dtype, features=2048, layers=4),
      x,
      lambda out, y: ((out - y) ** 2).mean(),
    ),
    "transformer": (
      steps.Transformer(dtype, features=512, layers=2, vocab=4096),
      tokens,
      lambda logits, y: optax.softmax_cross_entropy_with_integer_labels(
        logits, y
      ).mean(),
    ),
  }


def replica_programs(
  strategy: fs.Strategy, model: Any, x: Any, loss: Any
) -> list[Program]:
  """Returns a step with each wrapper, for a batch split over the replicas."""
  count = strategy.num_replicas_in_sync
  halves = [list(range(count // 2)), list(range(count // 2, count))]

  def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss_fn(params: PyTree) -> jax.Array:
      return loss(state.apply_fn({"params": params}, batch[0]), batch[1])

    return state.minimize(loss_fn)

  def create(*wrappers: Any) -> Any:
    sample = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    return fs.create_train_state(
      model,
      jax.random.key(0),
      sample,
      optax.adam(1e-3),
      strategy=strategy,
      wrappers=wrappers,
    )

  batch = strategy.shard_batch((x, x))
  bare = create()
  jit_steps = lambda step, donate_argnums: strategy.jit_steps(
    step, donate_state=True
  )
  wrapped = {
    "cross_shard": fs.CrossShard(),
    "2 groups": fs.CrossShard(group_assignment=halves),
    "agn sequential": fs.AGN(10),
    "agn mean": fs.AGN(10, commit="mean"),
    "agn sum": fs.AGN(10, commit="sum"),
  }
  return [
    Program("global view", step, (bare, batch)),
    Program("run", step, (bare, batch), strategy.jit),
    Program("run_steps, 4", step, (bare, [batch] * 4), jit_steps),
    *(
      Program(name, step, (create(wrapper), batch), strategy.jit)
      for name, wrapper in wrapped.items()
    ),
  ]


def replicas(topology: str, args: argparse.Namespace) -> None:
  """Prints a table for each model, in bfloat16."""
  strategy = fs.Strategy(topology)
  for name, (model, x, loss) in replica_models(jnp.bfloat16).items():
    if name in args.models:
      programs = replica_programs(strategy, model, x, loss)
      print_table(
        f"replicas, {name}, bfloat16 compute, {topology}",
        size_of(programs[0].args[0].params),
        programs,
      )


# The topologies of each section.
SECTIONS = {
  loss_scale: ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"],
  replicas: ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"],
}


def main() -> None:
  """Reads the flags, compiles, prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  add = parser.add_argument
  names = [section.__name__ for section in SECTIONS]
  add("sections", nargs="*", help=f"of {', '.join(names)}; default: all")
  add("--topologies", nargs="+", help="default: depends on the section")
  add("--models", nargs="+", choices=MODELS, default=list(MODELS))
  add("--dtypes", nargs="+", default=["float16", "bfloat16"])
  variants = ["bare", "loss_scale", "dynamic_scale"]
  add("--variants", nargs="+", choices=steps.VARIANTS, default=variants)
  add("--devices", type=int, nargs="+", help="default: one, and all")
  add("--cache", help="directory of compiled programs, to go on faster")
  args = parser.parse_args()
  unknown = set(args.sections) - set(names)
  if unknown:
    parser.error(f"unknown sections {sorted(unknown)}; see --help")
  if args.cache:
    jax.config.update("jax_compilation_cache_dir", args.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  print(
    f"libtpu {importlib.metadata.version('libtpu')}, JAX {jax.__version__}: "
    "the compiler's figures, not a run."
  )
  for section, defaults in SECTIONS.items():
    if not args.sections or section.__name__ in args.sections:
      for topology in args.topologies or defaults:
        section(topology, args)


if __name__ == "__main__":
  main()
