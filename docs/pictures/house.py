"""The packages of flaxshard and what they import, read off the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
import functools
import pathlib

from drawing import Drawing

_PACKAGE = pathlib.Path(__file__).parents[2] / "flaxshard"

# From the top: a package imports packages on lower floors only. The number is
# the middle of its box.
FLOORS: tuple[dict[str, int], ...] = (
  {"ray": 48, "__main__": 206, "__init__": 320, "testing": 430},
  {"plans": 206},
  {"train": 206},
  {
    "tasks": 48,
    "checkpoint": 144,
    "strategy": 240,
    "center": 336,
    "nnx": 432,
  },
  {"models": 48, "state": 268, "processes": 396},
  {"wrappers": 268},
  {"sparse": 268},
  {"data": 162, "replicas": 258},
  {"partitioning": 200},
  {"core": 240},
)

_MAIN = ("state", "wrappers", "strategy", "checkpoint", "train")
# Past the boxes between, along a side of the picture.
_BY_THE_SIDE = {("models", "core"): 24, ("processes", "core"): 436}
_WIDTH, _HEIGHT, _STEP = 90, 34, 70


def imports() -> dict[str, set[str]]:
  """Returns the packages that each package imports when it is imported.

  The modules of `flaxshard/` itself count as packages. An import in a function
  or for type checking alone is left out, except in `__main__`, and so are the
  names that `__init__` imports when asked for.
  """
  return _imports(_PACKAGE)


@functools.cache
def _imports(package: pathlib.Path) -> dict[str, set[str]]:
  found: dict[str, set[str]] = {
    path.stem: set()
    for path in sorted(package.iterdir())
    if path.suffix == ".py" or (path / "__init__.py").exists()
    # Leads to examples/, which use the public names.
    if path.stem != "examples"
  }
  for path in sorted(package.rglob("*.py")):
    name = path.relative_to(package).parts[0].removesuffix(".py")
    deep = name == "__main__"
    for module in _imported(ast.parse(path.read_text()), deep):
      target = module.split(".")[1] if "." in module else "__init__"
      target = target if target in found else "__init__"
      if target != name:
        found[name].add(target)
  return found


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
  """Returns the arrows of a graph that no longer way replaces."""

  @functools.cache
  def reach(name: str) -> set[str]:
    return set(graph[name]).union(*map(reach, graph[name]))

  return {
    name: {
      target
      for target in targets
      if not any(target in reach(other) for other in targets)
    }
    for name, targets in graph.items()
  }


def _imported(node: ast.AST, deep: bool) -> Iterator[str]:
  """Yields the names of modules of flaxshard that a module imports."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
      continue
    lazy = (ast.FunctionDef, ast.ClassDef, ast.With)
    if not deep and isinstance(child, lazy):
      continue
    if isinstance(child, ast.Import):
      yield from (x.name for x in child.names if _is_ours(x.name))
    elif isinstance(child, ast.ImportFrom) and _is_ours(child.module or ""):
      yield from (f"{child.module}.{x.name}" for x in child.names)
    yield from _imported(child, deep)


def _is_ours(module: str) -> bool:
  return module.split(".")[0] == "flaxshard"


def house(scheme: str) -> Drawing:
  """Draws the packages on their floors, with the imports of `direct`."""
  drawing = Drawing(
    480,
    _STEP * (len(FLOORS) - 1) + _HEIGHT + 8,
    scheme,
    f"The packages of flaxshard on {len(FLOORS)} floors. All imports point "
    "down.",
  )
  center = {name: x for floor in FLOORS for name, x in floor.items()}
  top = {
    name: 4 + i * _STEP for i, floor in enumerate(FLOORS) for name in floor
  }
  for name, targets in direct(imports()).items():
    for target in sorted(targets):
      bend = _BY_THE_SIDE.get((name, target))
      if bend is not None:
        middle = top[target] + _HEIGHT / 2
        side = 1 if bend > center[target] else -1
        edge = center[target] + side * (_WIDTH / 2 + 2)
        drawing.arrow(
          [(bend, top[name] + _HEIGHT), (bend, middle), (edge, middle)]
        )
        continue
      shift = (center[target] - center[name]) / 2.5
      shift = max(-0.44 * _WIDTH, min(0.44 * _WIDTH, shift))
      drawing.arrow(
        [
          (center[name] + shift, top[name] + _HEIGHT),
          (center[target] - shift / 2, top[target] - 2),
        ]
      )
  for name, x in center.items():
    kind = "ours" if name in _MAIN else "plain"
    drawing.box(x - _WIDTH / 2, top[name], _WIDTH, _HEIGHT, kind)
    drawing.text(x, top[name] + 22, name, kind, anchor="middle", size=14)
  return drawing
