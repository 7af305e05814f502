"""Rare forms of HLO text, written by hand."""

# ruff: noqa: E501
import gc
import weakref

import jax
import numpy as np
import pytest

from flaxshard.compiled import buffers
from flaxshard.compiled import collectives
from flaxshard.compiled import dataflow
from flaxshard.compiled import executions
from flaxshard.compiled import hlo
from flaxshard.compiled import values

MESH = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(1, 2, 1, 4), ("one", "a", "unit", "b")
)

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
  text = HEAD + text
  buffers.peak_memory(text)
  return collectives(text, mesh)


def _rows(found):
  return sorted(
    (c.kind, c.axes, c.operand_bytes, c.result_bytes) for c in found
  )


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
  %w = f32[64]{{0}} parameter(0), metadata={{op_name="state[\\'Gr\\303\\266\\303\\237e\\']"}}
  %zero = s32[] constant(-2)
  %t0 = (s32[], /*index=1*/f32[64]{{0}}) tuple(%zero, /*index=1*/%w)
  ROOT %loop = (s32[], /*index=1*/f32[64]{{0}}) while(%t0), \
condition=%condition, body=%body, {SCOPE}
}}
"""


@pytest.mark.parametrize("order", ["%f, %g, %h", "%h, %g, %f"])
def test_three_branches_in_a_loop(order):
  text = BRANCHES.replace("%f, %g, %h", order)
  common, other = sorted(_read(text), key=lambda c: c.axes)
  assert (common.axes, common.in_conditional) == (("a",), False)
  assert (other.axes, other.in_conditional) == (("b",), True)
  assert (common.executions, other.executions) == (7, 7)
  program = hlo.parse(HEAD + BRANCHES)
  assert program.entry.parameters[0].op_name == "state['Größe']"
  assert program.entry.root.called == ("condition", "body")


# SparseCores gather parameters: their calls get the operands in an update.
LATE = f"""\
%gather (p: f32[64]) -> f32[256] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %all-gather = f32[256]{{0}} all-gather(%p), {B}, dimensions={{0}}
}}, execution_thread="sparsecore"

%reduce (q: f32[256]) -> f32[64] {{
  %q = f32[256]{{0}} parameter(0)
  ROOT %reduce-scatter = f32[64]{{0}} reduce-scatter(%q), {B}, dimensions={{0}}, \
to_apply=%add
}}, execution_thread="sparsecore"

ENTRY %main (w: f32[64], x: f32[256]) -> (f32[64]) {{
  %w = f32[64]{{0}} parameter(0), metadata={{op_name="state.params[\\'w\\']"}}
  %x = f32[256]{{0}} parameter(1), metadata={{op_name="batch"}}
  %s.0 = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%gather
  %cast = f32[64]{{0}} copy(%w)
  %u.0 = ((f32[64]{{0}}), f32[256]{{0}}) call-update(%s.0, %cast)
  %square = f32[256]{{0}} multiply(%x, %x)
  %d.0 = f32[256]{{0}} call-done(%u.0)
  %dot = f32[256]{{0}} multiply(%d.0, %square)
  %s.1 = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%reduce
  %u.1 = ((f32[256]{{0}}), f32[64]{{0}}) call-update(%s.1, %dot)
  %d.1 = f32[64]{{0}} call-done(%u.1)
  %new = f32[64]{{0}} subtract(%w, %d.1)
  ROOT %out = (f32[64]{{0}}) tuple(%new)
}}
"""


def test_asynchronous_calls_that_get_their_operands_late():
  head = HEAD.replace(", ", ", input_output_alias={ {0}: (0, {}) }, ", 1)
  found = collectives(head + LATE, MESH)
  assert _rows(found) == [
    ("all-gather", ("b",), 256, 1024),
    ("reduce-scatter", ("b",), 1024, 256),
  ]
  gather = next(c for c in found if c.kind == "all-gather")
  assert (gather.purpose, gather.parameters) == ("parameter", ("w",))
  program = hlo.parse(head + LATE)
  entry = program.entry.instructions
  graph = values.trace(program)
  [gathered] = graph.of(entry["d.0"])
  assert dataflow.argument(graph, gathered) == 0
  start = list(graph.of(program.entry.parameters[0]))
  readers = dataflow.readers(graph, start, stop=())
  assert {graph.owner[x].name for x in readers} == {"dot", "new"}
  readers = dataflow.readers(graph, start, stop=("all-gather",))
  assert {graph.owner[x].name for x in readers} == {"all-gather", "new"}
  # The copy, the square and the result: the copy stays until the call is done.
  temporaries = buffers.peak_memory(program).temporaries
  assert temporaries == 4 * (64 + 256 + 256)


def test_a_gradient_in_a_loop_makes_a_training_step():
  # Elsewhere than in a forward or backward pass it moves no activations.
  add = "%j = s32[] add(%i, %one)"
  differentiated = f'{add}, metadata={{op_name="jit(f)/jvp(M)/add"}}'
  for text, purpose in (
    (BRANCHES, "activations"),
    (BRANCHES.replace(add, differentiated), "other"),
  ):
    assert {c.purpose for c in _read(text)} == {purpose}


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
  assert executions.trip_count(program, program.entry.root) == turns
  found = _read(text)
  assert {c.trip_count_known for c in found} == {turns is not None}
  assert ("is unknown" in str(found[0])) == (turns is None)


# A gather that one turn starts and the next one ends, and scatters in the short
# form of asynchronous computations.
ASYNC = f"""\
%inner (p: f32[64]) -> f32[16] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %scatter.0 = f32[16]{{0}} reduce-scatter(%p), {B}, dimensions={{0}}, \
to_apply=%add
}}

%body (l: ((f32[64], f32[128]), f32[64])) -> ((f32[64], f32[128]), f32[64]) {{
  %l = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) parameter(0)
  %v = (f32[64]{{0}}, f32[128]{{0}}) get-tuple-element(%l), index=0
  %u = f32[64]{{0}} get-tuple-element(%l), index=1
  %d = f32[128]{{0}} all-gather-done(%v)
  %s = (f32[64]{{0}}, f32[128]{{0}}) all-gather-start(%u), {A}, dimensions={{0}}
  %cut = f32[64]{{0}} slice(%d), slice={{[0:64]}}
  ROOT %m = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) tuple(%s, %cut)
}}

%condition (k: ((f32[64], f32[128]), f32[64])) -> pred[] {{
  %k = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (w: f32[64], t: token[]) -> (f32[16], f32[16], token[]) {{
  %w = f32[64]{{0}} parameter(0)
  %t = token[] parameter(1)
  %first = (f32[64]{{0}}, f32[128]{{0}}) custom-call(), \
custom_call_target="AllocateBuffer"
  %t0 = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) tuple(%first, %w)
  %loop = ((f32[64]{{0}}, f32[128]{{0}}), f32[64]{{0}}) while(%t0), \
condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}
  %x = f32[64]{{0}} get-tuple-element(%loop), index=1
  %s.1 = ((f32[64]{{0}}), f32[16]{{0}}, s32[]) fusion-start(%x), kind=kCustom, \
calls=%inner
  %d.1 = f32[16]{{0}} fusion-done(%s.1)
  %s.2 = ((f32[64]{{0}}), f32[16]{{0}}, s32[]) reduce-scatter-start(%x), {B}, \
dimensions={{0}}, to_apply=%add
  %d.2 = f32[16]{{0}} reduce-scatter-done(%s.2)
  ROOT %out = (f32[16]{{0}}, f32[16]{{0}}, token[]) tuple(%d.1, %d.2, %t)
}}
"""


def test_asynchronous_forms():
  found = _read(ASYNC)
  assert _rows(found) == [
    ("all-gather", ("a",), 256, 512),
    ("reduce-scatter", ("b",), 256, 64),
    ("reduce-scatter", ("b",), 256, 64),
  ]
  assert sorted(c.executions for c in found) == [1, 1, 6]


MIXED = """\
ENTRY %main (a: s4[33], b: f8e4m3fn[7], c: f32[<=8,2], d: bf16[64]) -> (s4[33], f8e4m3fn[7], f32[<=8,2], bf16[64]) {
  %a = s4[33]{0:E(4)} parameter(0)
  %b = f8e4m3fn[7]{0} parameter(1)
  %c = f32[<=8,2]{1,0} parameter(2)
  %d = bf16[64]{0} parameter(3)
  ROOT %all = (s4[33]{0:E(4)}, f8e4m3fn[7]{0}, f32[<=8,2]{1,0}, /*index=3*/bf16[64]{0}) all-reduce(%a, %b, %c, /*index=3*/%d), GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
  ("groups", "axes"),
  [
    ("{{0,4},{1,5},{2,6},{3,7}}", ("a",)),
    ("{{7,3},{6,2},{5,1},{4,0}}", ("a",)),
    ("{{0,1,2,3},{4,5,6,7}}", ("b",)),
    ("{}", ("a", "b")),
    ("{{0,1},{2,3},{4,5},{6,7}}", ()),
  ],
)
def test_several_operands_of_rare_types(groups, axes):
  (found,) = _read(MIXED.replace("GROUPS", f"replica_groups={groups}"))
  nbytes = 17 + 7 + 64 + 128
  assert (found.operand_bytes, found.result_bytes) == (nbytes, nbytes)
  assert (found.dtype, found.axes) == ("bf16", axes)


def test_axes_of_equal_size():
  # Groups tell axes of equal size apart, in any order of the devices.
  devices = np.array(jax.devices()[:8]).reshape(2, 2, 2).transpose(2, 0, 1)
  mesh = jax.sharding.Mesh(devices, ("x", "y", "z"))
  for groups, axes in (
    ("[4,2]<=[2,4]T(1,0)", ("x",)),
    ("[4,2]<=[2,2,2]T(0,2,1)", ("y",)),
    ("[4,2]<=[8]", ("z",)),
    ("[2,4]<=[2,2,2]T(1,0,2)", ("x", "z")),
  ):
    (found,) = _read(MIXED.replace("GROUPS", f"replica_groups={groups}"), mesh)
    assert found.axes == axes


def test_a_program_is_freed_after_use():
  program = hlo.parse(HEAD + BRANCHES)
  collectives(program, MESH)
  buffers.peak_memory(program)
  freed = weakref.ref(program)
  del program
  gc.collect()
  assert freed() is None
