"""Collectives of programs for CPUs, and of stored texts of TPUs and GPUs.

tests/testdata/hlo has programs that libtpu 0.0.42 compiled with JAX 0.10.2,
without most of `backend_config`. All are steps
`(state, batch) -> (state, {"loss": ...})` with donated states:

- v5e_fsdp.txt: v5e:2x4, two kernels [512, 512] and [512, 128] in bfloat16,
  sharded over `data`, momentum, a batch [256, 512].
- v5e_two_slices.txt: two slices of v5e:2x2, one kernel [512, 128], replicated,
  a batch [256, 512].
- v5e_scan.txt: v5e:2x2, a scan over three kernels [256, 256] that are sharded
  over `data`, a batch [1024, 256].
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.plans import collectives
from flaxshard.plans import hlo

FOLDER = pathlib.Path(__file__).parents[1] / "testdata" / "hlo"


def _mesh(shape, names, order=1):
  devices = np.array(jax.devices()[: np.prod(shape)][::order])
  return jax.sharding.Mesh(devices.reshape(shape), names)


def _compile(function, mesh, spec, shape=(8, 4)):
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False
  )
  x = jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec)
  )
  return jax.jit(mapped).lower(x).compile()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_axes_and_bytes_of_an_all_reduce(order, axes):
  mesh = _mesh((4, 2), ("a", "b"), order)
  compiled = _compile(lambda x: jax.lax.psum(x, axes), mesh, P(("a", "b")))
  (found,) = collectives(compiled, mesh)
  size = {("a",): 4, ("b",): 2, ("a", "b"): 8}[axes]
  assert (found.kind, found.axes) == ("all-reduce", axes)
  assert found.operands == (hlo.Array("f32", (1, 4)),)
  assert (found.operand_bytes, found.group_size) == (16, size)
  assert (found.network, found.executions) == ("ici", 1)
  assert found.link_bytes == pytest.approx(2 * (size - 1) / size * 16)
  assert not found.in_conditional


def test_a_loop_multiplies_the_executions():
  mesh = _mesh((8,), ("a",))

  def function(x):
    return jax.lax.fori_loop(0, 5, lambda _, y: jax.lax.psum(y, "a") * 0.1, x)

  (found,) = collectives(_compile(function, mesh, P("a")), mesh)
  assert (found.executions, found.trip_count_known) == (5, True)


@functools.cache
def _program(name):
  return hlo.parse((FOLDER / f"{name}.txt").read_text())


def _rows(found):
  return sorted((c.kind, c.operand_bytes, c.executions) for c in found)


def test_pieces_of_an_asynchronous_collective_count_once():
  program = _program("v5e_fsdp")
  pieces = [i for i in program.instructions() if i.opcode == "all-gather"]
  assert len(pieces) > 3
  found = collectives(program, _mesh((8,), ("data",)))
  assert _rows(found) == [
    ("all-gather", 8192, 1),
    ("all-gather", 512 * 128 * 2 // 8, 1),
    ("all-gather", 512 * 512 * 2 // 8, 1),
    ("all-reduce", 4, 1),
    ("all-to-all", 32768, 1),
    ("reduce-scatter", (512 + 128) * 512 * 2, 1),
  ]
  assert {c.axes for c in found} == {("data",)}
  assert {c.network for c in found} == {"ici"}
  # The innermost frames are Flax's and Optax's.
  assert {c.source.partition(":")[0] for c in found} == {"train.py"}
  scatter = next(c for c in found if c.kind == "reduce-scatter")
  assert scatter.result_bytes == scatter.operand_bytes // 8
  assert scatter.link_bytes == scatter.operand_bytes * 7 / 8


@pytest.mark.tpu
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
      if c.operand_bytes > 4096
    } == {
      ("reduce-scatter", ("data",), "ici", kernel),
      ("all-reduce", ("slice",), "dcn", kernel // 4),
      ("all-gather", ("data",), "ici", kernel // 4),
    }
  with pytest.raises(ValueError, match="8 devices"):
    collectives(_program("v5e_two_slices"), _mesh((8,), ("data",)))


def test_loops_of_the_tpu_compiler_have_trip_counts():
  kernel = 256 * 256 * 4
  found = collectives(_program("v5e_scan"), _mesh((4,), ("data",)))
  assert _rows(found) == [
    ("all-gather", kernel // 2 // 4, 3),
    ("all-gather", kernel // 2 // 4, 3),
    ("all-reduce", 4, 1),
    ("reduce-scatter", kernel, 3),
  ]


# Asynchronous collectives in the form of XLA's GPU and generic texts, written
# by hand.
GPU = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, \
may-alias) }, entry_computation_layout={()->()}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%async_computation (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8]{0} reduce-scatter(%p), channel_id=3, \
replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add, \
metadata={op_name="jit(step)/transpose(jvp(M))/dot" \
source_file="/home/user/train.py" source_line=5}
}

ENTRY %main (w: f32[8], x: f32[64]) -> (f32[8], f32[]) {
  %w = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %x = f32[64]{0} parameter(1), metadata={op_name="batch"}
  %gather = (f32[8]{0}, f32[64]{0}) all-gather-start(%w), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(step)/jvp(M)"}
  %gathered = f32[64]{0} all-gather-done(%gather)
  %permute = (f32[64]{0}, f32[64]{0}) collective-permute-start(%x), \
channel_id=2, source_target_pairs={{0,4},{4,0},{1,5},{5,1}}, \
metadata={op_name="jit(step)/jvp(M)"}
  %permuted = f32[64]{0} collective-permute-done(%permute)
  %half = bf16[64]{0} custom-call(%gathered, %permuted), \
custom_call_target="__cublas$gemm"
  %grad = f32[64]{0} convert(%half)
  %scatter = ((f32[64]{0}), f32[8]{0}) async-start(%grad), \
calls=%async_computation
  %scattered = f32[8]{0} async-done(%scatter)
  %fused = ((f32[64]{0}), f32[8]{0}, s32[]) fusion-start(%x), kind=kCustom, \
calls=%async_computation
  %unfused = f32[8]{0} fusion-done(%fused)
  %new = f32[8]{0} subtract(%w, %scattered)
  %zero = f32[] constant(0)
  %loss = f32[] reduce(%permuted, %zero), dimensions={0}, to_apply=%add
  %start = f32[] all-reduce-start(%loss), channel_id=4, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %done = f32[] all-reduce-done(%start)
  ROOT %out = (f32[8]{0}, f32[]) tuple(%new, %done)
}
"""


def test_starts_and_ends_on_gpus_count_once():
  found = collectives(GPU, _mesh((2, 4), ("node", "gpu")))
  both = ("node", "gpu")
  rows = [(c.kind, c.operand_bytes, c.result_bytes, c.axes) for c in found]
  assert sorted(rows) == [
    ("all-gather", 32, 256, both),
    ("all-reduce", 4, 4, ("gpu",)),
    ("collective-permute", 256, 256, ("node",)),
    ("reduce-scatter", 256, 32, both),
    ("reduce-scatter", 256, 32, both),
  ]
  (widened,) = (c for c in found if c.widened)
  assert (widened.kind, widened.source) == ("reduce-scatter", "train.py:5")
