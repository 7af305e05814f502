"""Collectives of programs for CPUs, and of texts of TPUs and GPUs.

tests/testdata/hlo has two programs written by hand:

- branches.txt: a conditional in a loop. Its branches have one collective in
  common. Metadata of users may have the words and the brackets of HLO.
- gpu.txt: asynchronous collectives in the form of XLA's GPU and generic texts.

The others are programs that libtpu 0.0.42 compiled with JAX 0.10.2, without
most of `backend_config`. All are steps
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
    ([f"{SITE}/flaxshard/models/images.py", "/home/u/t.py"], "images.py:1"),
    ([f"{SITE}/flaxshard/state/train_state.py", "/home/u/t.py"], "t.py:2"),
    ([f"{SITE}/jax/numpy.py"], ""),
  ],
)
def test_the_users_line(files, expected):
  frames = [(file, line) for line, file in enumerate(files, 1)]
  assert source_lines.user_line(frames) == expected


@pytest.mark.parametrize(
  ("axes", "order"), [(("a",), 1), (("b",), -1), (("a", "b"), -1)]
)
def test_axes_and_bytes_of_an_all_reduce_in_a_loop(axes, order):
  mesh = _mesh((4, 2), ("a", "b"), order)
  spec = P(("a", "b"))
  turn = lambda i, x: jax.lax.psum(x, axes) * 0.1
  looped = jax.shard_map(
    lambda x: jax.lax.fori_loop(0, 5, turn, x),
    mesh=mesh,
    in_specs=spec,
    out_specs=P(),
    check_vma=False,
  )
  sharding = jax.NamedSharding(mesh, spec)
  x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
  (found,) = collectives(jax.jit(looped).lower(x).compile(), mesh)
  size = {("a",): 4, ("b",): 2, ("a", "b"): 8}[axes]
  assert (found.kind, found.axes) == ("all-reduce", axes)
  assert found.operands == (hlo.Array("f32", (1, 4)),)
  assert (found.operand_bytes, found.group_size) == (16, size)
  assert (found.executions, found.trip_count_known) == (5, True)
  assert found.link_bytes == pytest.approx(2 * (size - 1) / size * 16)
  assert found.network == "ici" and not found.in_conditional


def _stored(name):
  return (FOLDER / f"{name}.txt").read_text()


def _read_stored(name, mesh):
  found = collectives(_stored(name), mesh)
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


BRANCHES = _stored("branches")


@pytest.mark.parametrize("order", ["%f, %g, %h", "%h, %g, %f"])
def test_what_all_branches_have_counts_once(order):
  text = BRANCHES.replace("%f, %g, %h", order)
  common, other = sorted(collectives(text, MESH), key=lambda c: c.axes)
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
  found = collectives(text, MESH)
  assert {c.executions for c in found} == {1 if turns is None else turns}
  assert {c.trip_count_known for c in found} == {turns is not None}
  assert ("is unknown" in str(found[0])) == (turns is None)


MIXED = """\
HloModule jit_step, is_scheduled=true, num_partitions=SIZE

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: s4[33], b: f32[<=8,2], c: pred[7]) -> (s4[33], f32[<=8,2], pred[7]) {
  %a = s4[33]{0:E(4)} parameter(0)
  %b = f32[<=8,2]{1,0:T(2,128)} parameter(1)
  %c = pred[7]{0} parameter(2)
  ROOT %all = (s4[33]{0:E(4)}, f32[<=8,2]{1,0:T(2,128)}, /*index=2*/pred[7]{0}) all-reduce(%a, %b, /*index=2*/%c), replica_groups=GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
  ("mesh", "groups", "axes"),
  [
    (MESH, "{{7,3},{6,2},{5,1},{4,0}}", ("a",)),
    (MESH, "{{0,1,2,3},{4,5,6,7}}", ("b",)),
    (MESH, "{}", ("a", "b")),
    (MESH, "{{0,1},{2,3},{4,5},{6,7}}", ()),  # a part of b
    (SQUARE, "[2,2]<=[4]", ("b",)),
    (SQUARE, "[2,2]<=[2,2]T(1,0)", ("a",)),
    (SQUARE, "[4,1]<=[4]", ()),
    (CUBE, "[4,2]<=[2,4]T(1,0)", ("x",)),
    (CUBE, "[4,2]<=[2,2,2]T(0,2,1)", ("y",)),
    (CUBE, "[2,4]<=[2,2,2]T(1,0,2)", ("x", "z")),
    (SQUARE, "mesh['a'=2,'b'=2] {'a'}", ("a",)),
    (SQUARE, "mesh['a'=2,'b'=2] {'b'}", ("b",)),
    (SQUARE, "mesh['a'=2,'b'=2] {'a','b'}", ("a", "b")),
    # Parts of an axis.
    (SQUARE, "mesh['a'=4] {'a':(1)2}", ("a",)),
    (SQUARE, "mesh['a'=4] {'a':(2)2}", ("b",)),
    # Other orders of devices.
    (SQUARE, "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ("b",)),
    (SQUARE, "mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ("b",)),
  ],
)
def test_axes_of_groups(mesh, groups, axes):
  text = MIXED.replace("SIZE", str(mesh.size)).replace("GROUPS", groups)
  (found,) = collectives(text, mesh)
  nbytes = 17 + 64 + 7
  assert (found.operand_bytes, found.result_bytes) == (nbytes, nbytes)
  assert [x.dtype for x in found.operands] == ["s4", "f32", "pred"]
  assert found.axes == axes


def test_starts_and_ends_on_gpus_count_once():
  found, _ = _read_stored("gpu", _mesh((2, 4), ("node", "gpu")))
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
