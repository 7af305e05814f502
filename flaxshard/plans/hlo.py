"""Parser of HLO text: the program that `jax.stages.Compiled.as_text` prints.

JAX has no public parser of this text. The parser reads what the other modules
of this package need and ignores the rest. Instructions keep their attributes as
text, which is searched when an attribute is asked for.

Source of the syntax: https://openxla.org/xla/operation_semantics and
`HloModule::ToString` in https://github.com/openxla/xla.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import math
import re
from typing import Any

from flaxshard.core import checks
from flaxshard.core import source_lines

# Bits of one element. Types that are not listed (token, opaque) have no data.
_BITS = {
  "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8,
  "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
  "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8,
  "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "bf16": 16,
  "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_ARRAY_THEN_OPCODE = re.compile(
  r"(\w+\[[^\]]*\](?:\{[^}]*\})?) ([a-z][\w-]*)\("
)
_TUPLE_THEN_OPCODE = re.compile(r"\) ([a-z][\w-]*)\(")
_OPERAND = re.compile(r"%([^\s,()]+)")
_PAREN = re.compile(r"[()]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
  r"\b(?:calls|to_apply|condition|body|\w+_computations?)"
  r"=(?:%?([^\s,{}]+)|\{([^}]*)\})"
)
# The tables of source locations at the head of the text.
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclasses.dataclass(frozen=True)
class Array:
  """The shape of one array.

  Attributes:
    dtype: HLO's name of the type, such as `bf16`.
    dims: Lengths of the dimensions.
  """

  dtype: str
  dims: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def nbytes(self) -> int:
    """Bytes of the elements, without the padding of a layout."""
    return -(-self.size * _BITS.get(self.dtype, 0) // 8)


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> tuple[Array, ...]:
  """Returns the arrays of a shape: one, or the leaves of a tuple in order.

  Example:
    >>> [x.nbytes for x in parse_shape("(f32[2,3]{1,0:T(8,128)}, s32[])")]
    [24, 4]
  """
  return tuple(
    # "<=8" is a dynamic length with its bound.
    Array(
      dtype,
      tuple(int(d.strip("<=? ")) for d in dims.split(",") if d.strip()),
    )
    for dtype, dims in _ARRAY.findall(text)
  )


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
  """One instruction.

  Attributes:
    name: Its name, without the leading `%`.
    opcode: Such as `fusion`.
    shape: Text of its shape.
    operands: The instructions that make its operands.
    literal: Text between the parentheses of one without operands: number of a
      parameter, value of a constant.
    attributes: Text after the parentheses.
    users: The instructions that read its result.
  """

  name: str
  opcode: str
  shape: str
  operands: list[Instruction]
  literal: str
  attributes: str
  users: list[Instruction] = dataclasses.field(default_factory=list)

  @property
  def arrays(self) -> tuple[Array, ...]:
    """The arrays of its result."""
    return parse_shape(self.shape)

  @property
  def op_name(self) -> str:
    """JAX's name stack, or the path of an entry parameter's argument."""
    return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"')

  def attribute(self, pattern: str) -> str:
    """Returns the first group of a pattern in the attributes, or ""."""
    match = re.search(pattern, self.attributes)
    return match[1] if match else ""


@dataclasses.dataclass(eq=False)
class Computation:
  """A computation: its instructions by name, in the order of the text."""

  name: str
  instructions: dict[str, Instruction]
  root: Instruction = dataclasses.field(init=False)


@dataclasses.dataclass(eq=False)
class Program:
  """A parsed HLO module.

  Attributes:
    num_partitions: Devices that run the program; in several slices, those of
      one slice.
    computations: Computations by name.
    entry: The computation that is run.
    tables: The rows of the tables of source locations, by number.
  """

  num_partitions: int
  computations: dict[str, Computation]
  entry: Computation
  tables: dict[str, dict[int, str]]

  def instructions(self) -> Iterator[Instruction]:
    """Yields the instructions of all computations."""
    for computation in self.computations.values():
      yield from computation.instructions.values()

  def called(self, instruction: Instruction) -> list[Computation]:
    """Returns the computations that an instruction calls, in their order.

    Args:
      instruction: The instruction; of a `while`, the condition comes first.
    """
    # Name stacks may have any text, such as "body=x".
    attributes = _QUOTED.sub("", instruction.attributes)
    names = [
      name.strip().lstrip("%")
      for single, several in _CALLED.findall(attributes)
      for name in (single or several).split(",")
    ]
    return [self.computations[name] for name in names if name]

  def source_line(self, instruction: Instruction) -> str:
    """Returns where the user's code made an instruction, or ""."""
    return source_lines.user_line(self._frames(instruction))

  def _frames(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yields the files and lines of an instruction, innermost first."""
    if file := instruction.attribute(r'source_file="([^"]*)"'):
      yield file, int(instruction.attribute(r"source_line=(\d+)") or 0)
    number = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
    for _ in self._stack_frames:  # a bound, should a frame be its own parent
      if number not in self._stack_frames:
        return
      file, line, number = self._stack_frames[number]
      yield file, line

  @functools.cached_property
  def _stack_frames(self) -> dict[int, tuple[str, int, int]]:
    """The file, the line and the parent of each frame."""
    files, locations, frames = (
      self.tables[name]
      for name in ("FileNames", "FileLocations", "StackFrames")
    )
    # XLA may print the parent's number plus one: frame 1 then names itself.
    offset = int(_number("parent_frame_id", frames.get(1, "")) == 1)
    found = {}
    for frame, text in frames.items():
      location = locations[_number("file_location_id", text)]
      file = files[_number("file_name_id", location)]
      parent = _number("parent_frame_id", text) - offset
      found[frame] = (file.strip('"'), _number("line", location), parent)
    return found


def _number(name: str, text: str) -> int:
  found = re.search(rf"\b{name}=(\d+)", text)
  return int(found[1]) if found else 0


def parse(compiled: Any) -> Program:
  r"""Parses the HLO text of a compiled program.

  Args:
    compiled: A compiled program (`jax.jit(f).lower(...).compile()`), its text,
      or a parsed program, which is returned as it is.

  Raises:
    TypeError: `compiled` is none of these.

  Example:
    >>> text = "HloModule m\n\nENTRY %e (x: f32[2]) -> f32[2] {\n"
    >>> text += "  ROOT %x = f32[2]{0} parameter(0)\n}\n"
    >>> parse(text).entry.root.shape
    'f32[2]{0}'
  """
  if isinstance(compiled, Program):
    return compiled
  text = compiled.as_text() if hasattr(compiled, "as_text") else compiled
  if not isinstance(text, str) or not text.startswith("HloModule"):
    raise TypeError(
      "compiled must be a compiled program, such as"
      " jax.jit(f).lower(...).compile(), or its HLO text, got "
      f"{checks.describe(compiled)}."
    )
  return _parse_text(text)


def _parse_text(text: str) -> Program:
  lines = text.split("\n")
  tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
  table: dict[int, str] | None = None
  computations: dict[str, Computation] = {}
  computation: Computation | None = None
  entry = ""
  for line in lines[1:]:
    if not line:
      table = None
    elif line[0] == " ":
      if computation is not None:
        _parse_instruction(line, computation)
    elif line[0] == "}":
      computation = None
    elif line in tables:
      table = tables[line]
    elif table is not None:
      number, _, value = line.partition(" ")
      table[int(number)] = value
    elif match := _COMPUTATION.match(line):
      computation = Computation(match[2], {})
      computations[computation.name] = computation
      if match[1]:
        entry = computation.name
  partitions = re.search(r"num_partitions=(\d+)", lines[0])
  count = int(partitions[1]) if partitions else 1
  return Program(count, computations, computations[entry], tables)


def _parse_instruction(line: str, computation: Computation) -> None:
  """Adds the instruction of a line to its computation."""
  match = _INSTRUCTION.match(line)
  if match is None:
    return
  start = match.end()
  if line[start] == "(":
    head = _TUPLE_THEN_OPCODE.search(line, start)
  else:
    head = _ARRAY_THEN_OPCODE.match(line, start)
  if head is None:
    return
  opcode = head[head.lastindex or 1]
  end = _closing_paren(line, head.end())
  inner = line[head.end() : end]
  instructions = computation.instructions
  operands = [instructions[name] for name in _OPERAND.findall(inner)]
  instruction = Instruction(
    match[2],
    opcode,
    line[start : head.start(head.lastindex or 1) - 1],
    operands,
    "" if operands else inner,
    line[end + 1 :],
  )
  for operand in dict.fromkeys(operands):
    operand.users.append(instruction)
  instructions[instruction.name] = instruction
  if match[1]:
    computation.root = instruction


def _closing_paren(line: str, start: int) -> int:
  """Returns the position of the parenthesis that closes the operands."""
  depth = 1
  for match in _PAREN.finditer(line, start):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return match.start()
  return len(line)
