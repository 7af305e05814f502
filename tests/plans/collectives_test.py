"""Collectives of programs for CPUs, and of texts of TPUs and GPUs.

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

# ruff: noqa: E501

import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.core import source_lines
from flaxshard.plans import collectives
from flaxshard.plans import hlo

FOLDER = pathlib.Path(__file__).parents[1] / "testdata" / "hlo"


def _mesh(shape, names, order=1):
  devices = np.array(jax.devices()[: np.prod(shape)][::order])
  return jax.sharding.Mesh(devices.reshape(shape), names)


MESH = _mesh((1, 2, 1, 4), ("one", "a", "unit", "b"))
SQUARE = _mesh((2, 2), ("a", "b"))
# Its axes have equal sizes.
CUBE = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(2, 2, 2).transpose(2, 0, 1),
  ("x", "y", "z"),
)


@pytest.mark.parametrize(
  ("text", "nbytes"),
  [
    ("f32[3,100]{1,0:T(8,128)}", 1200),
    ("bf16[10,128]{1,0:T(8,128)(2,1)}", 2560),
    ("s32[]{:T(128)}", 4),
    ("pred[7]{0}", 7),
    ("s4[7]{0}", 4),
    ("f32[<=8,2]{1,0}", 64),
    ("f32[0,4]{1,0}", 0),
    ("token[]", 0),
  ],
)
def test_bytes_of_a_shape(text, nbytes):
  (array,) = hlo.parse_shape(text)
  assert array.nbytes == nbytes


@pytest.mark.parametrize("given", ["module @jit_f {}", 3])
def test_what_is_no_program_raises(given):
  with pytest.raises(TypeError, match=f"got '?{given}"):
    collectives(given, MESH)


SITE = "/venv/lib/python3.12/site-packages"


@pytest.mark.parametrize(
  ("files", "expected"),
  [
    ([f"{SITE}/flax/linen/linear.py", "/home/u/model.py"], "model.py:2"),
    ([f"{SITE}/models/vit.py", "/home/u/train.py"], "vit.py:1"),
    ([f"{SITE}/jax/numpy.py", f"{SITE}/optax/adam.py"], "adam.py:2"),
    ([f"{SITE}/flaxshard/models/cnn.py", "/home/u/t.py"], "cnn.py:1"),
    ([f"{SITE}/flaxshard/state/train_state.py", "/home/u/t.py"], "t.py:2"),
    ([f"{SITE}/jax/numpy.py"], ""),
  ],
)
def test_the_users_line(files, expected):
  frames = [(file, line) for line, file in enumerate(files, 1)]
  assert source_lines.user_line(frames) == expected


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


def _read_stored(name, mesh):
  found = collectives((FOLDER / f"{name}.txt").read_text(), mesh)
  rows = sorted((c.kind, c.operand_bytes, c.executions) for c in found)
  return found, rows


def test_pieces_of_an_asynchronous_collective_count_once():
  found, rows = _read_stored("v5e_fsdp", _mesh((8,), ("data",)))
  assert rows == [
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
  devices = fs.Topology.named("2*v5e:2x2").devices
  kernel = 512 * 128 * 2
  for array, names in (
    (devices.reshape(2, 4), ("slice", "data")),
    (devices.reshape(2, 4).T, ("data", "slice")),
  ):
    mesh = jax.sharding.Mesh(array, names)
    found, _ = _read_stored("v5e_two_slices", mesh)
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
    _read_stored("v5e_two_slices", _mesh((8,), ("data",)))


def test_loops_of_the_tpu_compiler_have_trip_counts():
  kernel = 256 * 256 * 4
  _, rows = _read_stored("v5e_scan", _mesh((4,), ("data",)))
  assert rows == [
    ("all-gather", kernel // 2 // 4, 3),
    ("all-gather", kernel // 2 // 4, 3),
    ("all-reduce", 4, 1),
    ("reduce-scatter", kernel, 3),
  ]


HEAD = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""
A = "channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0)"
B = "channel_id=2, replica_groups=[2,4]<=[8]"
# A scope of the user may have the words and the brackets of HLO.
SCOPE = 'metadata={op_name="jit(f)/body=%add, calls={%add, %sum} ( {/x"}'


def _read(text, mesh=MESH):
  head = HEAD.replace("partitions=8", f"partitions={mesh.size}")
  return collectives(head + text, mesh)


# Named scopes are in the conditional's own metadata: they are no branches.
BRANCHES = f"""\
%f (p: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %r.0 = f32[64]{{0}} all-reduce(%p), {A}, to_apply=%add, {SCOPE}
}}

%g (q: f32[64]) -> f32[64] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %r.1 = f32[64]{{0}} all-reduce(%q), {A}, to_apply=%add
}}

%h (s: f32[64]) -> f32[64] {{
  %s = f32[64]{{0}} parameter(0)
  %t = f32[64]{{0}} all-reduce(%s), {A}, to_apply=%add
  ROOT %r.2 = f32[64]{{0}} all-reduce(%t), {B}, to_apply=%add
}}

%body (l: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %l = (s32[], f32[64]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%l), index=0
  %v = f32[64]{{0}} get-tuple-element(%l), index=1
  %c = f32[64]{{0}} conditional(%i, %v, %v, %v), \
branch_computations={{%f, %g, %h}}, {SCOPE}
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %m = (s32[], f32[64]{{0}}) tuple(%j, %c)
}}

%condition (k: (s32[], f32[64])) -> pred[] {{
  %k = (s32[], f32[64]{{0}}) parameter(0)
  %n = s32[] get-tuple-element(%k), index=0
  %bound = s32[] constant(5)
  ROOT %lt = pred[] compare(%n, %bound), direction=LT, {SCOPE}
}}

ENTRY %main (w: f32[64]) -> (s32[], f32[64]) {{
  %w = f32[64]{{0}} parameter(0), metadata={{op_name="state.params[\\'w\\']"}}
  %zero = s32[] constant(-2)
  %t0 = (s32[], /*index=1*/f32[64]{{0}}) tuple(%zero, /*index=1*/%w)
  ROOT %loop = (s32[], /*index=1*/f32[64]{{0}}) while(%t0), \
condition=%condition, body=%body, {SCOPE}
}}
"""


@pytest.mark.parametrize("order", ["%f, %g, %h", "%h, %g, %f"])
def test_what_all_branches_have_counts_once(order):
  text = BRANCHES.replace("%f, %g, %h", order)
  common, other = sorted(_read(text), key=lambda c: c.axes)
  assert (common.axes, common.in_conditional) == (("a",), False)
  assert (other.axes, other.in_conditional) == (("b",), True)
  assert (common.executions, other.executions) == (7, 7)


@pytest.mark.parametrize(
  ("text", "turns"),
  [
    (BRANCHES, 7),
    (BRANCHES.replace("constant(5)", "constant(-5)"), 0),
    # The text of a float may be that of an integer, or not.
    (BRANCHES.replace("constant(5)", "constant(1.5)"), None),
    (BRANCHES.replace("constant(-2)", "constant(nan)"), None),
    (BRANCHES.replace("constant(1)", "constant(0.5)"), None),
    (BRANCHES.replace("direction=LT", "direction=NE"), None),
  ],
)
def test_turns_of_a_loop(text, turns):
  found = _read(text)
  assert {c.executions for c in found} == {1 if turns is None else turns}
  assert {c.trip_count_known for c in found} == {turns is not None}
  assert ("is unknown" in str(found[0])) == (turns is None)


MIXED = """\
ENTRY %main (a: s4[33], b: f32[<=8,2], c: bf16[64]) -> (s4[33], f32[<=8,2], bf16[64]) {
  %a = s4[33]{0:E(4)} parameter(0)
  %b = f32[<=8,2]{1,0} parameter(1)
  %c = bf16[64]{0} parameter(2)
  ROOT %all = (s4[33]{0:E(4)}, f32[<=8,2]{1,0}, /*index=2*/bf16[64]{0}) all-reduce(%a, %b, /*index=2*/%c), GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
  ("mesh", "groups", "axes"),
  [
    (MESH, "replica_groups={{7,3},{6,2},{5,1},{4,0}}", ("a",)),
    (MESH, "replica_groups={{0,1,2,3},{4,5,6,7}}", ("b",)),
    (MESH, "replica_groups={}", ("a", "b")),
    (MESH, "replica_groups={{0,1},{2,3},{4,5},{6,7}}", ()),  # a part of b
    (SQUARE, "replica_groups=[2,2]<=[4]", ("b",)),
    (SQUARE, "replica_groups=[2,2]<=[2,2]T(1,0)", ("a",)),
    (SQUARE, "replica_groups=[4,1]<=[4]", ()),
    (CUBE, "replica_groups=[4,2]<=[2,4]T(1,0)", ("x",)),
    (CUBE, "replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("y",)),
    (CUBE, "replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("x", "z")),
    (SQUARE, "replica_groups=mesh['a'=2,'b'=2] {'a'}", ("a",)),
    (SQUARE, "replica_groups=mesh['a'=2,'b'=2] {'b'}", ("b",)),
    (SQUARE, "replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ("a", "b")),
    # Parts of an axis.
    (SQUARE, "replica_groups=mesh['a'=4] {'a':(1)2}", ("a",)),
    (SQUARE, "replica_groups=mesh['a'=4] {'a':(2)2}", ("b",)),
    # Other orders of devices.
    (
      SQUARE,
      "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}",
      ("b",),
    ),
    (
      SQUARE,
      "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}",
      ("b",),
    ),
  ],
)
def test_axes_of_groups(mesh, groups, axes):
  (found,) = _read(MIXED.replace("GROUPS", groups), mesh)
  nbytes = 17 + 64 + 128
  assert (found.operand_bytes, found.result_bytes) == (nbytes, nbytes)
  assert [x.dtype for x in found.operands] == ["s4", "f32", "bf16"]
  assert found.axes == axes


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
