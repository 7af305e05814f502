"""Pages name what exists: public names, files, messages, TensorFlow's methods.

Links between pages are checked where the site is built, in .ci/extras.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re

import page_blocks
from page_blocks import ROOT
import pytest

import flaxshard

_DOCS = ROOT / "docs"
_PICTURES = _DOCS / "pictures"


def _texts(folders, *suffixes):
  """Returns the texts of files by their paths."""
  return {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for pattern in ("*", *(f"{folder}/**/*" for folder in folders))
    for path in ROOT.glob(pattern)
    if path.suffix in suffixes
  }


def _resolve(path):
  """Returns the object of a dotted name; None for an attribute of instances."""
  root, *names = path.split(".")
  value = importlib.import_module("flaxshard" if root == "fs" else root)
  for i, name in enumerate(names):
    if hasattr(value, name):
      value = getattr(value, name)
    elif inspect.ismodule(value):
      value = importlib.import_module(f"{value.__name__}.{name}")
    else:
      # Set by __init__, and so in the annotations of a dataclass.
      annotations = [vars(c).get("__annotations__", {}) for c in value.__mro__]
      assert i == len(names) - 1 and any(name in a for a in annotations), path
      return None
  return value


# The pages in docs/api have every public name.

_ENTRIES = re.findall(
  r"^\.\. (?:auto|py:)\w+:: (flaxshard\.[\w.]+)$",
  "\n".join(path.read_text() for path in (_DOCS / "api").glob("*.md")),
  re.M,
)
# Modules whose names users write, also those without `__all__`.
_MODULES = {info.name for info in pkgutil.iter_modules(flaxshard.__path__)}
_MODULES = _MODULES - {"__main__", "examples"} | {"config", "optimizers"}


def _public_names(module):
  own = [
    name
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__
  ]
  return getattr(module, "__all__", [x for x in own if x[0] != "_"])


def test_public_names_have_one_entry():
  assert len(_ENTRIES) == len(set(_ENTRIES)) > 120
  assert dir(flaxshard) == sorted(flaxshard.__all__)
  names = set(flaxshard.__all__) - {"__version__"} - _MODULES
  paths = [f"flaxshard.{name}" for name in sorted(names)]
  for module in sorted(_MODULES):
    found = _resolve(f"flaxshard.{module}")
    public = _public_names(found)
    assert public and inspect.ismodule(found), module
    paths += [f"flaxshard.{module}.{name}" for name in public]
  # A name may have its entry by another name.
  objects = [_resolve(path) for path in _ENTRIES]
  missing = [path for path in paths if path not in _ENTRIES]
  assert [
    path for path in missing if not any(_resolve(path) is x for x in objects)
  ] == []


# Addresses of the repository and of the site.

_FOLDERS = "benchmarks colab configs docs examples flaxshard launch".split()


def _missing(address, folder, suffix=""):
  """Returns the files that name an address of the web without a file here."""
  texts = _texts(_FOLDERS, *".md .py .ipynb .toml .yaml .sh".split())
  found = [(x, y) for x in texts for y in re.findall(address, texts[x])]
  assert found
  return [x for x in found if not (folder / f"{x[1]}{suffix}").exists()]


def test_addresses_of_the_web_lead_to_files_and_pages():
  repository = (
    r"https://github\.com/flaxshard/flaxshard/(?:blob|tree|raw)/main/"
  )
  site = r"https://flaxshard\.github\.io/flaxshard/"
  assert _missing(repository + r"([\w./-]+\w)", ROOT) == []
  assert _missing(site + r"([\w/]+)\.html", _DOCS, ".md") == []
  # The help of an installed wheel names pages that its reader can open.
  program = (ROOT / "flaxshard" / "__main__.py").read_text()
  assert re.search(site + r"guides/training\.html", program)


# The headings of troubleshooting pages have messages of the code.


def _constants():
  """Returns the constant parts of all texts of the package and notebooks."""
  for source in _texts(["flaxshard", "colab"], ".py").values():
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_messages_in_headings_exist():
  constants = "\n".join(_constants())
  folder = _DOCS / "troubleshooting"
  for path in (folder.with_suffix(".md"), *folder.glob("*.md")):
    outputs = " ".join(x.text for x in page_blocks.read(path).blocks)
    known = " ".join(outputs.split()) + "\n" + constants
    headings = re.findall(r"^### .*$", path.read_text(), re.M)
    assert headings, path
    quoted = [x for line in headings for x in re.findall("`([^`]+)`", line)]
    parts = [part.strip() for x in quoted for part in x.split("...")]
    assert [part for part in parts if part not in known] == []


# The stored pictures are what their scripts draw, of the code as it is.


def test_stored_pictures_are_drawn_by_the_script(monkeypatch):
  monkeypatch.syspath_prepend(str(_PICTURES))
  drawn = importlib.import_module("make_pictures").draw()
  stored = {path.name: path.read_text() for path in _PICTURES.glob("*.svg")}
  assert sorted(stored) == sorted(drawn)
  old = [name for name in drawn if stored[name] != drawn[name]]
  assert not old, f"run python docs/pictures/make_pictures.py: {old}"


# The pages on TensorFlow: tables are complete, names exist.

_GUIDES = _DOCS / "guides"
_SIGNATURES = ROOT / "tests" / "testdata" / "tensorflow_signatures.json"
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


def test_every_class_has_a_table():
  assert set(_TABLES) == set(_CLASSES)


@pytest.mark.parametrize("name", _CLASSES)
def test_methods_and_arguments_have_a_row_with_a_name_or_a_reason(name):
  wanted = [
    member if argument is None else f"{member}({argument})"
    for member, arguments in _CLASSES[name].items()
    for argument in [None, *(arguments or [])]
  ]
  listed = []
  for cell, here in _TABLES[name]:
    for member, arguments in re.findall(r"`(\w+)(?:\(([^)]*)\))?`", cell):
      each = [f"{member}({a})" for a in arguments.split(", ") if a]
      listed += each or [member]
    found = re.findall(r"`((?:fs|jax|optax)\.[\w.]+)(?:\((\w+)=\))?`", here)
    assert found or here.startswith("None: "), cell
    for path, argument in found:
      value = _resolve(path)
      if argument:
        assert argument in inspect.signature(value).parameters, here
  assert sorted(listed) == sorted(wanted)
