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
from typing import Any, NamedTuple

from flaxshard.core import checks
from flaxshard.core import source_lines

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{\s*$")
_INSTRUCTION = re.compile(
  r"\s+(ROOT )?%?([^\s=]+) = (.+?[)\]}]) ([a-z][\w-]*)\("
)
# A row of a table of source locations.
_ROW = re.compile(r"(\d+) (.*)")
_OPERAND = re.compile(r"%([^\s,()]+)")
_PAREN = re.compile(r"[()]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
  r"\b(?:calls|to_apply|condition|body|\w+_computations?)"
  r"=(?:%?([^\s,{}]+)|\{([^}]*)\})"
)
_PARENT = r"parent_frame_id=(\d+)"
# Their result is the operand, in another shape, layout, type or place.
_MOVES = frozenset(
  "bitcast convert copy dynamic-slice opt-barrier optimization-barrier pad "
  "reduce-precision reshape reverse slice transpose".split()
)
_CALLS = frozenset("async call custom-call fusion".split())
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
    # A type names its bits: bf16, s4, f8e4m3fn. A token has none.
    bits = 8 if self.dtype == "pred" else _number(r"(\d+)", self.dtype)
    return -(-self.size * bits // 8)


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
    attributes = instruction.attributes
    if file := instruction.attribute(r'source_file="([^"]*)"'):
      yield file, _number(r"source_line=(\d+)", attributes)
    files, _, locations, frames = (self.tables[name] for name in _TABLES)
    # XLA may print the parent's number plus one: frame 1 then names itself.
    offset = int(_number(_PARENT, frames.get(1, "")) == 1)
    number = _number(r"stack_frame_id=(\d+)", attributes)
    for _ in frames:  # a bound, should a frame be its own parent
      if number not in frames:
        return
      frame = frames[number]
      location = locations[_number(r"file_location_id=(\d+)", frame)]
      file = files[_number(r"file_name_id=(\d+)", location)]
      yield file.strip('"'), _number(r"\bline=(\d+)", location)
      number = _number(_PARENT, frame) - offset


def _number(pattern: str, text: str) -> int:
  found = re.search(pattern, text)
  return int(found[1]) if found else 0


def parse(compiled: Any) -> Program:
  r"""Parses the HLO text of a compiled program.

  Args:
    compiled: A compiled program (`jax.jit(f).lower(...).compile()`), or its
      text.

  Raises:
    TypeError: `compiled` is none of these.

  Example:
    >>> text = "HloModule m\n\nENTRY %e (x: f32[2]) -> f32[2] {\n"
    >>> text += "  ROOT %x = f32[2]{0} parameter(0)\n}\n"
    >>> parse(text).entry.root.shape
    'f32[2]{0}'
  """
  text = compiled.as_text() if hasattr(compiled, "as_text") else compiled
  if not isinstance(text, str) or not text.startswith("HloModule"):
    raise TypeError(
      "compiled must be a compiled program, such as"
      " jax.jit(f).lower(...).compile(), or its HLO text, got "
      f"{checks.describe(compiled)}."
    )
  head, *lines = text.split("\n")
  tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
  table: dict[int, str] = {}
  computations: dict[str, Computation] = {}
  computation = Computation("", {})
  entry = ""
  for line in lines:
    if line in tables:
      table = tables[line]
    elif match := _ROW.match(line):
      table[int(match[1])] = match[2]
    elif match := _COMPUTATION.match(line):
      computation = Computation(match[2], {})
      computations[computation.name] = computation
      if match[1]:
        entry = computation.name
    elif match := _INSTRUCTION.match(line):
      _add_instruction(computation, match)
  count = _number(r"num_partitions=(\d+)", head) or 1
  return Program(count, computations, computations[entry], tables)


def _add_instruction(computation: Computation, match: re.Match[str]) -> None:
  """Adds the instruction of a line, of which `match` is the beginning."""
  line = match.string
  is_root, name, shape, opcode = match.groups()
  end = _closing_paren(line, match.end())
  inner = line[match.end() : end]
  instructions = computation.instructions
  operands = [instructions[x] for x in _OPERAND.findall(inner)]
  literal = "" if operands else inner
  instruction = Instruction(
    name, opcode, shape, operands, literal, line[end + 1 :]
  )
  for operand in dict.fromkeys(operands):
    operand.users.append(instruction)
  instructions[name] = instruction
  if is_root:
    computation.root = instruction


def _closing_paren(line: str, start: int) -> int:
  """Returns the position of the parenthesis that closes the operands."""
  depth = 1
  for match in _PAREN.finditer(line, start):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return match.start()
  return len(line)


def is_call(instruction: Instruction) -> bool:
  """Returns whether an instruction runs what it calls once."""
  # XLA writes an asynchronous fusion as `fusion-start`.
  return instruction.opcode.removesuffix("-start") in _CALLS


class _Place(NamedTuple):
  """A value in a program.

  Attributes:
    value: The instruction that makes it, or a tuple that it is in.
    callers: The instructions that call its computation, the innermost last.
    elements: The numbers of its element in a tuple of tuples, the innermost
      first.
  """

  value: Instruction
  callers: tuple[Instruction, ...] = ()
  elements: tuple[int, ...] = ()


def _sources(program: Program, place: _Place) -> Iterator[_Place]:
  """Yields a value, and then what it was each time before it was moved."""
  for _ in range(1000):  # a bound, should a text be odd
    yield place
    value, callers, elements = place
    if value.opcode == "parameter" and callers:
      operand = callers[-1].operands[int(value.literal)]
      place = _Place(operand, callers[:-1], elements)
    elif value.opcode == "tuple" and elements:
      place = _Place(value.operands[elements[-1]], callers, elements[:-1])
    elif value.opcode == "get-tuple-element":
      number = int(value.attribute(r"index=(\d+)"))
      place = _Place(value.operands[0], callers, (*elements, number))
    elif value.opcode in _MOVES:
      place = _Place(value.operands[0], callers, elements)
    elif is_call(value) and (called := program.called(value)):
      place = _Place(called[0].root, (*callers, value), elements)
    else:
      return


def is_widened(
  program: Program, value: Instruction, caller: Instruction | None
) -> bool:
  """Returns whether a value is float32 that was cast from bfloat16.

  Args:
    program: The program.
    value: The instruction that makes it. After the cast it may be moved.
    caller: The instruction that calls the value's computation.
  """
  callers = (caller,) if caller and is_call(caller) else ()
  dtypes = [
    [array.dtype for array in x.value.arrays]
    for x in _sources(program, _Place(value, callers))
  ]
  return dtypes[0] == ["f32"] and ["bf16"] in dtypes


def trip_count(program: Program, loop: Instruction) -> int | None:
  """Returns how many turns a `while` runs; None if the program has no count.

  XLA writes the count of a loop with constant bounds into `backend_config`. The
  TPU compiler does not: there the count follows from the counter's first
  value, its step and its bound.
  """
  known = loop.attribute(r'known_trip_count"?[:=]\s*\{"?n"?:"?(\d+)')
  if known:
    return int(known)

  def origin(*place: Any) -> _Place:
    *_, first = _sources(program, _Place(*place))
    return first

  condition, body = program.called(loop)
  compare = origin(condition.root)
  if "direction=LT" not in compare.value.attributes:
    return None
  counter, bound = (origin(x, compare.callers) for x in compare.value.operands)
  first = _integer(origin(loop.operands[0], (), counter.elements))
  last = _integer(bound)
  add = origin(body.root, (), counter.elements)
  terms = [_integer(origin(x, add.callers)) for x in add.value.operands]
  steps = [x for x in terms if x is not None]
  if first is None or last is None or len(steps) != 1:
    return None
  if add.value.opcode != "add" or steps[0] <= 0:
    return None
  return len(range(first, last, steps[0]))


def _integer(place: _Place) -> int | None:
  """Returns the value of a constant; None if it is no integer."""
  value = place.value
  if value.opcode == "constant" and re.fullmatch(r"-?\d+", value.literal):
    return int(value.literal)
  return None
