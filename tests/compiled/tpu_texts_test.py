"""Texts of programs that libtpu 0.0.42 compiled, with JAX 0.10.2.

tests/testdata/hlo has them, without most of `backend_config`. All are steps
`(state, batch) -> (state, {"loss": ...})` with donated states:

- v5e_fsdp.txt: v5e:2x4, two kernels [512, 512] and [512, 128] in bfloat16,
  sharded over `data`, momentum, a batch [256, 512]; arguments 393,216 bytes.
- v5e_two_slices.txt: two slices of v5e:2x2, one kernel [512, 128], replicated,
  a batch [256, 512]; arguments 327,680 bytes.
- v5e_scan.txt: v5e:2x2, a scan over three kernels [256, 256] that are sharded
  over `data`, a batch [1024, 256]; arguments 458,752 bytes.
"""

import functools
import pathlib

import jax
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.compiled import arguments
from flaxshard.compiled import buffers
from flaxshard.compiled import collectives
from flaxshard.compiled import executions
from flaxshard.compiled import hlo

FOLDER = pathlib.Path(__file__).parents[1] / "testdata" / "hlo"


@functools.cache
def _program(name):
  return hlo.parse((FOLDER / f"{name}.txt").read_text())


def _mesh(count):
  return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))


def _rows(found):
  return sorted(
    (c.kind, c.purpose, c.parameters, c.operand_bytes, c.executions)
    for c in found
  )


def test_pieces_of_an_asynchronous_collective_count_once():
  program = _program("v5e_fsdp")
  pieces = [
    i.name
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.opcode == "all-gather"
  ]
  assert len(pieces) > 3
  found = collectives(program, _mesh(8))
  kernels = ("Dense_0/kernel", "Dense_1/kernel")
  assert _rows(found) == [
    ("all-gather", "activations", (), 8192, 1),
    ("all-gather", "parameter", kernels[:1], 512 * 512 * 2 // 8, 1),
    ("all-gather", "parameter", kernels[1:], 512 * 128 * 2 // 8, 1),
    ("all-reduce", "metrics", (), 4, 1),
    ("all-to-all", "activations", (), 32768, 1),
    ("reduce-scatter", "gradients", kernels, (512 + 128) * 512 * 2, 1),
  ]
  assert {c.axes for c in found} == {("data",)}
  assert {c.network for c in found} == {"ici"}
  assert {c.source.partition(":")[0] for c in found} == {"train.py"}
  scatter = next(c for c in found if c.kind == "reduce-scatter")
  assert scatter.result_bytes == scatter.operand_bytes // 8
  assert scatter.link_bytes == scatter.operand_bytes * 7 / 8


def test_transfers_between_slices():
  devices = fs.Topology.named("v5e:2x2", num_slices=2).devices
  kernel = 512 * 128 * 2
  for array, names in (
    (devices.reshape(2, 4), ("slice", "data")),
    (devices.reshape(2, 4).T, ("data", "slice")),
  ):
    mesh = jax.sharding.Mesh(array, names)
    found = collectives(_program("v5e_two_slices"), mesh)
    assert {
      (c.kind, c.axes, c.network, c.operand_bytes)
      for c in found
      if c.purpose == "gradients"
    } == {
      ("reduce-scatter", ("data",), "ici", kernel),
      ("all-reduce", ("slice",), "dcn", kernel // 4),
      ("all-gather", ("data",), "ici", kernel // 4),
    }
    assert {c.purpose for c in found} == {"gradients", "metrics"}
    assert {c.parameters for c in found} == {("Dense_0/kernel",), ()}
  with pytest.raises(ValueError, match="8 devices"):
    collectives(_program("v5e_two_slices"), _mesh(8))


def test_loops_of_the_tpu_compiler_have_trip_counts():
  program = _program("v5e_scan")
  loops = [
    i
    for computation in program.computations.values()
    for i in computation.instructions.values()
    if i.opcode == "while"
  ]
  assert [executions.trip_count(program, loop) for loop in loops] == [3, 3]
  kernel = 256 * 256 * 4
  name = ("ScanL_0/Dense_0/kernel",)
  assert _rows(collectives(program, _mesh(4))) == [
    ("all-gather", "parameter", name, kernel // 2 // 4, 3),
    ("all-gather", "parameter", name, kernel // 2 // 4, 3),
    ("all-reduce", "metrics", (), 4, 1),
    ("reduce-scatter", "gradients", name, kernel, 3),
  ]


@pytest.mark.parametrize(
  ("name", "nbytes"),
  [("v5e_fsdp", 393216), ("v5e_two_slices", 327680), ("v5e_scan", 458752)],
)
def test_arguments_have_the_bytes_of_the_compilers_analysis(name, nbytes):
  peak = buffers.peak_memory(_program(name))
  assert peak.arguments == nbytes
  first = peak.buffers[0]
  assert first.kind == "argument"
  assert first.nbytes == max(b.nbytes for b in peak.buffers)


def test_arguments_are_parameters_slots_and_data():
  leaves = arguments.argument_leaves(_program("v5e_fsdp"))
  assert sorted((x.category, x.parameter) for x in leaves.values()) == [
    ("data", ""),
    ("optimizer state", "Dense_0/kernel"),
    ("optimizer state", "Dense_1/kernel"),
    ("parameter", "Dense_0/kernel"),
    ("parameter", "Dense_1/kernel"),
  ]
