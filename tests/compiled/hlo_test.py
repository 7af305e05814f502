"""The parser of HLO text."""

import jax
import pytest

from flaxshard.compiled import hlo
from flaxshard.compiled import shapes

TEXT = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, \
may-alias), {1}: (0, {}, must-alias) }, entry_computation_layout={()->()}, \
num_partitions=4

FileNames
1 "/home/user/train.py"
2 "/venv/lib/python3.11/site-packages/flax/linen/linear.py"

FunctionNames
1 "step"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=8 end_line=8 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0:T(128)} parameter(0)
  ROOT %neg = f32[8]{0:T(128)S(1)} negate(%p.0)
}

ENTRY %main (a.1: f32[8], b.1: f32[8]) -> (f32[8], f32[8]) {
  %b.1 = f32[8]{0:T(128)} parameter(1), metadata={op_name="s[\\'b\\']"}
  %a.1 = f32[8]{0:T(128)} parameter(0)
  %c = s32[]{:T(128)} constant(3)
  %fusion = f32[8]{0:T(128)S(1)} fusion(%a.1), kind=kLoop, calls=%fused, \
metadata={op_name="jit(f)/neg" stack_frame_id=2}
  ROOT %t = (f32[8]{0:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%fusion, \
/*index=1*/%b.1)
}
"""


def test_a_program():
  program = hlo.parse(TEXT)
  assert (program.num_partitions, program.is_scheduled) == (4, True)
  assert program.aliases == {(0,): (1, ()), (1,): (0, ())}
  assert list(program.computations) == ["fused", "main"]
  entry = program.entry
  assert [p.name for p in entry.parameters] == ["a.1", "b.1"]
  assert entry.parameters[1].op_name == "s['b']"
  assert entry.root.operands == ("fusion", "b.1")
  assert [str(a) for a in entry.root.arrays] == ["f32[8]", "f32[8]"]
  fusion = entry.instructions["fusion"]
  assert (fusion.called, fusion.op_name) == (("fused",), "jit(f)/neg")
  assert fusion.arrays[0].memory_space == 1
  assert [u.name for u in fusion.users] == ["t"]
  frames = [
    (f.function, f.line) for f in program.tables.frames(fusion.attributes)
  ]
  assert frames == [("Dense.__call__", 8), ("step", 7)]
  assert entry.instructions["c"].literal == "3"
  assert hlo.parse(program) is program


@pytest.mark.parametrize(
  ("text", "nbytes", "padded"),
  [
    ("f32[512,512]{1,0:T(8,128)}", 2**20, 2**20),
    ("f32[3,100]{1,0:T(8,128)}", 1200, 8 * 128 * 4),
    ("f32[3,100]{0,1:T(8,128)}", 1200, 104 * 128 * 4),
    ("bf16[10,128]{1,0:T(8,128)(2,1)}", 2560, 16 * 128 * 2),
    ("s32[]{:T(128)}", 4, 512),
    ("f32[]", 4, 4),
    ("pred[7]{0}", 7, 7),
    ("s4[7]{0}", 4, 4),
    ("f32[0,4]{1,0}", 0, 0),
    ("token[]", 0, 0),
  ],
)
def test_bytes_of_a_shape(text, nbytes, padded):
  (array,) = shapes.parse_shape(text)
  assert (array.nbytes, array.padded_bytes) == (nbytes, padded)


def test_leaves_of_nested_tuples():
  shape = "((f32[2]{0:T(8)(2,1)}, s32[]), f32[4]{0}, (u32[], token[]))"
  assert shapes.element_ranges(shape) == ((0, 2), (2, 3), (3, 5))
  assert len(shapes.parse_shape(shape)) == 5


def test_inputs_that_are_no_program_raise():
  with pytest.raises(ValueError, match="HloModule"):
    hlo.parse("module @jit_f {}")
  with pytest.raises(TypeError, match="compiled program"):
    hlo.parse(3)
  lowered = jax.jit(lambda x: x + 1).lower(1.0)
  with pytest.raises(ValueError, match="HloModule"):
    hlo.parse(lowered)
