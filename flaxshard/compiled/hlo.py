"""Parser of HLO text: the program that `jax.stages.Compiled.as_text` prints.

JAX has no public parser of this text. The parser reads what the other modules
of this package need and ignores the rest. Instructions keep their attributes as
text, which is searched when an attribute is asked for.

Source of the syntax: https://openxla.org/xla/operation_semantics and
`HloModule::ToString` in https://github.com/openxla/xla.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Protocol

from flaxshard.compiled import frames
from flaxshard.compiled import shapes

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
  r"(?:calls|to_apply|body|condition|true_computation|false_computation)"
  r"=%?([^\s,{}]+)"
  r"|(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)


class HasText(Protocol):
  """A compiled program, such as `jax.stages.Compiled`."""

  def as_text(self) -> str | None:
    """Returns the HLO text of the program."""


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
  """One instruction.

  Attributes:
    name: Its name, without the leading `%`.
    opcode: Such as `fusion`.
    shape: Text of its shape.
    operands: Names of its operands; for a parameter, constant or iota empty.
    literal: Text between the parentheses: number of a parameter, value of a
      constant.
    attributes: Text after the parentheses.
    is_root: Whether it is the result of its computation.
    computation: The computation that it stands in.
  """

  name: str
  opcode: str
  shape: str
  operands: tuple[str, ...]
  literal: str
  attributes: str
  is_root: bool
  computation: Computation

  @property
  def arrays(self) -> tuple[shapes.Array, ...]:
    """The arrays of its result."""
    return shapes.parse_shape(self.shape)

  @property
  def op_name(self) -> str:
    """JAX's name stack, or the path of an entry parameter's argument."""
    return _unescape(self.attribute(r'op_name="((?:[^"\\]|\\.)*)"'))

  @property
  def called(self) -> tuple[str, ...]:
    """Names of the computations that it calls, in the order of the text."""
    names: list[str] = []
    # Name stacks may have any text, such as "body=x".
    attributes = _QUOTED.sub("", self.attributes)
    for single, several in _CALLED.findall(attributes):
      found = [single] if single else several.split(",")
      names.extend(name.strip().lstrip("%") for name in found)
    return tuple(names)

  def called_as(self, role: str) -> str:
    """Returns the computation of one role, such as `body`; "" if none."""
    match = re.search(rf"\b{role}=%?([^\s,{{}}]+)", self.attributes)
    return match[1] if match else ""

  def attribute(self, pattern: str) -> str:
    """Returns the first group of a pattern in the attributes, or ""."""
    match = re.search(pattern, self.attributes)
    return match[1] if match else ""

  @property
  def operand_instructions(self) -> list[Instruction]:
    """The instructions that its operands name."""
    by_name = self.computation.instructions
    return [by_name[name] for name in self.operands if name in by_name]

  @property
  def binding(self) -> Instruction:
    """The instruction that gives the operands to a called computation.

    This is the call or, of an asynchronous call without operands, the
    `-update` behind it. The compiler of TPU7x writes these for SparseCores.
    """
    if self.operands or not self.opcode.endswith("-start"):
      return self
    updates = (i for i in self.users if i.opcode.endswith("-update"))
    return next(updates, self)

  @property
  def call_operands(self) -> list[Instruction]:
    """The instructions that a called computation has as its parameters."""
    binding = self.binding
    given = binding.operand_instructions
    return given if binding is self else given[1:]

  @property
  def users(self) -> list[Instruction]:
    """The instructions that read its result."""
    return self.computation.users(self)


@dataclasses.dataclass(slots=True, eq=False)
class Computation:
  """A computation: its instructions by name, in the order of the text."""

  name: str
  instructions: dict[str, Instruction]
  root: Instruction | None = None
  _users: dict[str, list[Instruction]] | None = None

  def users(self, instruction: Instruction) -> list[Instruction]:
    """Returns the instructions that read an instruction's result."""
    if self._users is None:
      self._users = {}
      for other in self.instructions.values():
        for name in dict.fromkeys(other.operands):
          self._users.setdefault(name, []).append(other)
    return self._users.get(instruction.name, [])

  @property
  def parameters(self) -> list[Instruction]:
    """Its parameters, by number."""
    found = [i for i in self.instructions.values() if i.opcode == "parameter"]
    return sorted(found, key=lambda i: int(i.literal))


@dataclasses.dataclass(eq=False)
class Program:
  """A parsed HLO module.

  Attributes:
    header: The first line, with aliases and the entry's layout.
    computations: Computations by name.
    entry: The computation that is run.
    out_tree: The tree of the outputs (`Compiled.out_tree`); None if the program
      was given as text.
    tables: The tables of source locations.
    shared: Results computed from the program that several readers use, by name.
  """

  header: str
  computations: dict[str, Computation]
  entry: Computation
  out_tree: Any
  tables: frames.Tables
  shared: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

  @functools.cached_property
  def num_partitions(self) -> int:
    """Devices that run the program; in several slices, those of one slice."""
    match = re.search(r"num_partitions=(\d+)", self.header)
    return int(match[1]) if match else 1

  @functools.cached_property
  def is_scheduled(self) -> bool:
    """Whether instructions stand in the order in which they run."""
    return "is_scheduled=true" in self.header

  @functools.cached_property
  def aliases(self) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
    """Outputs that reuse an argument's memory.

    From the index of an output to the number of the parameter and the index in
    it.
    """
    start = self.header.find("input_output_alias={")
    if start < 0:
      return {}
    end = self.header.find("), entry", start)
    text = self.header[start : end if end > 0 else None]
    found = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", text)
    return {
      _integers(output): (int(number), _integers(index))
      for output, number, index in found
    }


def _unescape(text: str) -> str:
  r"""Returns a string without the escapes of C, such as `\303\266` for ö."""
  if "\\" not in text:
    return text
  decoded = text.encode().decode("unicode_escape")
  return decoded.encode("latin-1").decode(errors="replace")


def _integers(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in text.split(",") if part.strip())


def parse(compiled: HasText | Program | str) -> Program:
  r"""Parses the HLO text of a compiled program.

  Args:
    compiled: A compiled program (`jax.jit(f).lower(...).compile()`), its text,
      or a parsed program, which is returned as it is.

  Raises:
    TypeError: `compiled` is none of these.
    ValueError: The text is no HLO module.

  Example:
    >>> text = "HloModule m\n\nENTRY %e (x: f32[2]) -> f32[2] {\n"
    >>> text += "  ROOT %x = f32[2]{0} parameter(0)\n}\n"
    >>> parse(text).entry.root.shape
    'f32[2]{0}'
  """
  if isinstance(compiled, Program):
    return compiled
  if isinstance(compiled, str):
    text: str | None = compiled
  elif hasattr(compiled, "as_text"):
    text = compiled.as_text()
  else:
    raise TypeError(
      "compiled must be a compiled program, such as"
      f" jax.jit(f).lower(...).compile(), or its HLO text, got {compiled!r}."
    )
  if not text or not text.startswith("HloModule"):
    raise ValueError(
      "compiled must be HLO text that begins with 'HloModule', got"
      f" {(text or '')[:60]!r}."
    )
  return _parse_text(text, getattr(compiled, "out_tree", None))


def _parse_text(text: str, out_tree: Any) -> Program:
  lines = text.split("\n")
  tables = frames.Tables({name: {} for name in frames.NAMES})
  table: dict[int, str] | None = None
  computations: dict[str, Computation] = {}
  computation: Computation | None = None
  entry: Computation | None = None
  for line in lines[1:]:
    if not line:
      table = None
    elif line[0] == " ":
      instruction = (
        _parse_instruction(line, computation) if computation else None
      )
      if instruction is not None and computation is not None:
        computation.instructions[instruction.name] = instruction
        if instruction.is_root:
          computation.root = instruction
    elif line[0] == "}":
      computation = None
    elif line in tables.rows:
      table = tables.rows[line]
    elif table is not None:
      number, _, value = line.partition(" ")
      table[int(number)] = value
    elif match := _COMPUTATION.match(line):
      computation = Computation(match[2], {})
      computations[computation.name] = computation
      if match[1]:
        entry = computation
  if entry is None:
    raise ValueError("compiled: the HLO text has no ENTRY computation.")
  return Program(lines[0], computations, entry, out_tree, tables)


def _parse_instruction(
  line: str, computation: Computation
) -> Instruction | None:
  match = _INSTRUCTION.match(line)
  if match is None:
    return None
  start = match.end()
  if line[start] == "(":
    head = _TUPLE_THEN_OPCODE.search(line, start)
    if head is None:
      return None
    shape, opcode = line[start : head.start() + 1], head[1]
  else:
    head = _ARRAY_THEN_OPCODE.match(line, start)
    if head is None:
      return None
    shape, opcode = head[1], head[2]
  end = _closing_paren(line, head.end())
  inner = line[head.end() : end]
  operands: tuple[str, ...] = ()
  if opcode not in ("parameter", "constant", "iota"):
    operands = tuple(_OPERAND.findall(inner))
  return Instruction(
    match[2],
    opcode,
    shape,
    operands,
    inner if not operands else "",
    line[end + 1 :],
    bool(match[1]),
    computation,
  )


def _closing_paren(line: str, start: int) -> int:
  """Returns the position of the parenthesis that closes the operands."""
  depth = 1
  for match in _PAREN.finditer(line, start):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return match.start()
  return len(line)
