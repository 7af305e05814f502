"""The pages on TensorFlow: tables are complete, names exist."""

import importlib
import inspect
import json
import pathlib
import re

import pytest

import flaxshard as fs

_ROOT = pathlib.Path(__file__).parents[2]
_GUIDES = _ROOT / "docs" / "guides"
_SIGNATURES = _ROOT / "tests" / "testdata" / "tensorflow_signatures.json"
_CLASSES = json.loads(_SIGNATURES.read_text())["classes"]
# The rows of the table below the heading of each class.
_TABLES = {
  heading: re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.M)
  for heading, section in re.findall(
    r"^## `(.*?)`$(.*?)(?=^## |\Z)",
    (_GUIDES / "tensorflow_tables.md").read_text(),
    re.M | re.S,
  )
}


def test_calls_of_the_tensorflow_program_exist():
  """The program itself was run with TensorFlow 2.21."""
  text = (_GUIDES / "tensorflow.md").read_text()
  program = re.search(r"```python\n(import tensorflow.*?)```", text, re.S)[1]
  compile(program, "tensorflow.md", "exec")
  for name, class_name in (
    ("strategy", "tf.distribute.TPUStrategy"),
    ("optimizer", "tf.keras.mixed_precision.LossScaleOptimizer (Keras 3)"),
  ):
    calls = set(re.findall(rf"\b{name}\.(\w+)\(", program))
    assert len(calls) >= 2
    assert calls <= _CLASSES[class_name].keys()


def test_every_class_has_a_table():
  assert set(_TABLES) == set(_CLASSES)


@pytest.mark.parametrize("name", _CLASSES)
def test_every_method_and_argument_has_one_row(name):
  wanted = [
    member if argument is None else f"{member}({argument})"
    for member, arguments in _CLASSES[name].items()
    for argument in [None, *(arguments or [])]
  ]
  listed = []
  for cell, _ in _TABLES[name]:
    for member, arguments in re.findall(r"`(\w+)(?:\(([^)]*)\))?`", cell):
      listed += [f"{member}({a})" for a in arguments.split(", ") if a] or [
        member
      ]
  assert sorted(listed) == sorted(wanted)


@pytest.mark.parametrize("name", _CLASSES)
def test_every_row_has_a_name_that_exists_or_a_reason(name):
  for cell, here in _TABLES[name]:
    found = re.findall(r"`((?:fs|jax|optax)\.[\w.]+)(?:\((\w+)=\))?`", here)
    assert found or here.startswith("None: "), cell
    for path, argument in found:
      value = _resolve(path)
      if argument:
        assert argument in inspect.signature(value).parameters, here


def _resolve(path):
  """Returns the object of a dotted name; None for an attribute of instances."""
  root, *names = path.split(".")
  value = fs if root == "fs" else importlib.import_module(root)
  for i, name in enumerate(names):
    if not hasattr(value, name):
      # Set by __init__, and so in the annotations of a dataclass.
      annotations = [vars(c).get("__annotations__", {}) for c in value.__mro__]
      assert i == len(names) - 1 and any(name in a for a in annotations), path
      return None
    value = getattr(value, name)
  return value
