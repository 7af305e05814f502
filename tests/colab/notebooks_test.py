"""The notebooks equal their sources, run, and print the expected results."""

import os
import re

import make_notebooks
import nbformat
import pytest

_SOURCES = make_notebooks.sources()
_BADGE = "https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/"
# Lowest and highest traffic and accuracy of the rows of agn_and_diloco.
_COMMITS = {
  "data parallel": ((12_012, 12_013), (0.93, 0.99)),
  "AGN 4": ((3_003, 3_003), (0.95, 0.99)),
  "AGN 8": ((1_501, 1_502), (0.95, 0.99)),
  "AGN 16": ((751, 751), (0.93, 0.98)),
  "local SGD 4": ((3_003, 3_003), (0.91, 0.99)),
  "local SGD 16": ((751, 751), (0.91, 0.99)),
  "local SGD 64": ((188, 188), (0.91, 0.99)),
  "DiLoCo 4": ((3_003, 3_003), (0.91, 0.99)),
  "DiLoCo 16": ((751, 751), (0.92, 0.99)),
  "DiLoCo 64": ((188, 188), (0.92, 0.99)),
}
# Lowest and highest value of each line `name: number` that a notebook prints in
# cells with the tag "result".
_RESULTS = {
  "quick_start": {
    "applied steps": (885, 897),
    "skipped steps": (3, 15),
    "accuracy": (0.96, 1.0),
    "change of parameters": (0, 0),
    "steps counted": (0, 0),
    "scale, new over old": (0.5, 0.5),
    "steps skipped": (1, 1),
    "zeros without a scale": (0.19, 1.0),
    "zeros with a scale": (0.0, 0.18),
  },
  "replicas_and_shardings": {
    "replicas, difference": (0, 0),
    "replicas, bytes per device": (307_280, 307_280),
    "global view, difference": (0, 1e-5),
    "global view, bytes per device": (307_280, 307_280),
    "rules, difference": (0, 1e-5),
    "rules, bytes per device": (153_680, 153_680),
    "FSDP, difference": (0, 1e-5),
    "FSDP, bytes per device": (77_904, 77_904),
  },
  "agn_and_diloco": {
    "distance after step 1": (0.003, 0.005),
    "distance after step 2": (0.006, 0.01),
    "distance after step 3": (0.009, 0.015),
    "distance after step 4": (0, 0),
    "commits": (1, 1),
    **{f"{name}, KiB": kib for name, (kib, _) in _COMMITS.items()},
    **{f"{name}, accuracy": x for name, (_, x) in _COMMITS.items()},
  },
  "language_model": {
    "stopped after steps": (75, 80),
    "steps after resuming": (200, 200),
    "difference": (0, 0),
    "held-out loss": (2.1, 2.6),
    "English, before": (2.9, 4.5),
    "English, after": (2.3, 2.8),
    "trained parameters": (20_992, 20_992),
    "frozen parameters": (136_960, 136_960),
    "parameters after merging": (136_960, 136_960),
  },
  "custom_task": {
    "held-out error": (0.03, 0.045),
    "clipped steps": (1, 100),
    "error of the mean": (0.0768, 0.0768),
    "difference of the exported model": (0, 1e-5),
  },
}
# The row of the plan that a cell prints.
_PLAN = r"all-reduce +replica .*0\.0625 "


def test_every_source_has_its_notebook_and_its_results():
  stored = make_notebooks.FOLDER.glob("*.ipynb")
  names = {source.stem for source in _SOURCES}
  assert names == set(_RESULTS) == {path.stem for path in stored}


def _code_cells(notebook):
  return [cell for cell in notebook.cells if cell["cell_type"] == "code"]


def _stdout(cell):
  return "".join(
    output["text"]
    for output in cell["outputs"]
    if output["output_type"] == "stream" and output["name"] == "stdout"
  )


def _check(notebook, name):
  """Compares what a notebook has printed with the table of results."""
  cells = _code_cells(notebook)
  assert _stdout(cells[0]).startswith("8 x cpu\n")
  outputs = [output for cell in cells for output in cell["outputs"]]
  assert sum("image/png" in x.get("data", {}) for x in outputs) == 1
  assert "Warning:" not in "".join(x.get("text", "") for x in outputs)
  tagged = [x for x in cells if "result" in x["metadata"].get("tags", [])]
  printed = "".join(map(_stdout, tagged))
  results = dict(re.findall(r"^(\S.*?): +(-?[\d.,e+-]+)$", printed, re.M))
  assert set(results) == set(_RESULTS[name])
  for result, (low, high) in _RESULTS[name].items():
    value = float(results[result].replace(",", ""))
    assert low <= value <= high, (result, value)
  if name == "agn_and_diloco":
    assert re.search(_PLAN, printed), printed


_EACH = pytest.mark.parametrize("source", _SOURCES, ids=lambda path: path.stem)


@_EACH
def test_stored_notebook_is_its_source_with_outputs_and_a_badge(source):
  stored = nbformat.read(source.with_suffix(".ipynb"), 4)
  nbformat.validate(stored)
  _check(stored, source.stem)
  for cell in _code_cells(stored):
    cell["outputs"], cell["execution_count"] = [], None
  notebook = make_notebooks.read(source)
  assert stored == notebook
  assert f"]({_BADGE}{source.stem}.ipynb)" in notebook.cells[0]["source"]
  first = _code_cells(make_notebooks.read(_SOURCES[0]))[0]
  assert _code_cells(notebook)[0] == first


# One notebook makes plans with the TPU compiler.
@pytest.mark.tpu
@_EACH
def test_notebook_runs(source, tmp_path, monkeypatch):
  root = str(make_notebooks.FOLDER.parent)
  monkeypatch.setenv("PYTHONPATH", root, prepend=os.pathsep)
  notebook = make_notebooks.read(source)
  make_notebooks.execute(notebook, tmp_path, timeout=300)
  _check(notebook, source.stem)


# A session with one chip and eight virtual devices of the CPU: the chip is
# another CPU client, of which JAX thinks first. An array on the chip cannot
# be used beside one on the CPU, as on a TPU or a GPU.
_ONE_CHIP = """
import glob
import os

os.environ["JAX_PLATFORMS"] = "one_chip,cpu"
find = glob.glob
glob.glob = lambda path, **options: (
  ["/dev/accel0"] if path == "/dev/accel*" else find(path, **options)
)

import jax
from jax.extend import backend
import jaxlib.xla_client

backend.register_backend_factory(
  "one_chip",
  lambda: jaxlib.xla_client.make_cpu_client(num_devices=1),
  priority=1000,
)
jax.default_backend = lambda: "tpu"
"""


@pytest.mark.slow
def test_notebook_runs_with_one_chip(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(make_notebooks.FOLDER.parent))
  for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
    monkeypatch.delenv(name, raising=False)
  source = make_notebooks.FOLDER / "replicas_and_shardings.py"
  notebook = make_notebooks.read(source)
  notebook.cells.insert(0, nbformat.v4.new_code_cell(_ONE_CHIP))
  make_notebooks.execute(notebook, tmp_path, timeout=300)
  _, first, second, *_ = _code_cells(notebook)
  assert _stdout(first).startswith("1 x cpu\n")
  assert _stdout(second) == "8 devices: cpu\n"
