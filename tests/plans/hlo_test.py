"""The reader of HLO text: programs, groups of devices, loops, branches."""

# ruff: noqa: E501

import jax
import numpy as np
import pytest

from flaxshard import plans
from flaxshard.core import source_lines
from flaxshard.plans import flow
from flaxshard.plans import groups
from flaxshard.plans import hlo

MESH = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(1, 2, 1, 4), ("one", "a", "unit", "b")
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
    plans.collectives(given, MESH)


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


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
    ("replica_groups={}, x", ((0, 1, 2, 3),)),
    ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
    ("replica_groups=[4,1]<=[4]", ((0,), (1,), (2,), (3,))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
    ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
    (
      "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x",
      ((0, 1), (2, 3)),
    ),
    (
      "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}",
      ((0, 1), (2, 3)),
    ),
  ],
)
def test_replica_groups(text, expected):
  assert groups.replica_groups(text, 4) == expected


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
  return plans.collectives(HEAD + text, mesh)


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
  program = hlo.parse(HEAD + text)
  assert flow.trip_count(program, program.entry.root) == turns
  found = _read(text)
  assert {c.trip_count_known for c in found} == {turns is not None}
  assert ("is unknown" in str(found[0])) == (turns is None)


MIXED = """\
ENTRY %main (a: s4[33], b: f32[<=8,2], c: bf16[64]) -> (s4[33], f32[<=8,2], bf16[64]) {
  %a = s4[33]{0:E(4)} parameter(0)
  %b = f32[<=8,2]{1,0} parameter(1)
  %c = bf16[64]{0} parameter(2)
  ROOT %all = (s4[33]{0:E(4)}, f32[<=8,2]{1,0}, /*index=2*/bf16[64]{0}) all-reduce(%a, %b, /*index=2*/%c), replica_groups=GROUPS, to_apply=%add
}
"""
# Its axes have equal sizes.
CUBE = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(2, 2, 2).transpose(2, 0, 1),
  ("x", "y", "z"),
)


@pytest.mark.parametrize(
  ("mesh", "groups", "axes"),
  [
    (MESH, "{{7,3},{6,2},{5,1},{4,0}}", ("a",)),
    (MESH, "{{0,1,2,3},{4,5,6,7}}", ("b",)),
    (MESH, "{}", ("a", "b")),
    (MESH, "{{0,1},{2,3},{4,5},{6,7}}", ()),  # a part of b
    (CUBE, "[4,2]<=[2,4]T(1,0)", ("x",)),
    (CUBE, "[4,2]<=[2,2,2]T(0,2,1)", ("y",)),
    (CUBE, "[2,4]<=[2,2,2]T(1,0,2)", ("x", "z")),
  ],
)
def test_axes_of_groups(mesh, groups, axes):
  (found,) = _read(MIXED.replace("GROUPS", groups), mesh)
  nbytes = 17 + 64 + 128
  assert (found.operand_bytes, found.result_bytes) == (nbytes, nbytes)
  assert [x.dtype for x in found.operands] == ["s4", "f32", "bf16"]
  assert found.axes == axes
