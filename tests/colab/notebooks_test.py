"""The notebooks equal their sources, run, and install flaxshard on Colab."""

from concurrent import futures
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess

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


_ROOT = make_notebooks.FOLDER.parent
_QUICK_START = make_notebooks.FOLDER / "quick_start.py"
_LIST = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({x.metadata["Name"].lower(): x.version for x in found}))
"""
# A machine with a TPU has such files.
_FAKE_TPU = """
import glob

glob.glob = lambda path: ["/dev/accel0"] if path == "/dev/accel*" else []
"""
_ADDED = {"clu", "flaxshard", "ml-collections", "tensorboardx"}
# What the cell replaces on a runtime, besides flax, jax and jaxlib.
_REPLACED = {
  "cpu": set(),
  # NVIDIA's libraries stay: PyTorch needs their exact versions.
  "gpu": {"jax-cuda12-pjrt", "jax-cuda12-plugin"},
  "tpu": {"libtpu"},
}


def _name(name):
  return re.sub("[-_.]+", "-", name).lower()


def _pinned(name):
  text = pathlib.Path(__file__).with_name(name).read_text()
  return dict(re.findall(r"^([\w-]+)==(.*)$", text, re.M))


# What a runtime has beside, or in place of, the packages of the CPU runtime.
_FURTHER = {
  "cpu": {},
  "gpu": _pinned("colab_gpu.txt"),
  "tpu": _pinned("colab_tpu.txt"),
}


def _python313():
  versions = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
  installed = sorted(glob.glob(f"{versions}/versions/3.13*/bin/python"))
  for path in filter(None, map(shutil.which, ["python3.13", *installed])):
    # A shim of pyenv exists but does not start.
    if not subprocess.run([path, "-c", ""], capture_output=True).returncode:
      return path
  return None


class _Runtime:
  """A virtual environment with the packages of Colab's CPU runtime."""

  def __init__(self, folder, base):
    self._folder = folder
    self.python = str(folder / "colab" / "bin" / "python")
    others = ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")
    given = os.environ | {"PIP_NO_COMPILE": "1"}  # faster
    self._environment = {k: given[k] for k in given if k not in others}
    self.run(base, "-m", "venv", str(folder / "colab"))
    pip = (self.python, "-m", "pip")
    uv = os.environ.get("UV") or shutil.which("uv")
    # uv takes a tenth of the time.
    installer = (uv, "pip") if uv else pip
    pins = _pinned("colab_constraints.txt").items()
    packages = [f"{name}=={version}" for name, version in pins]
    variables = {"VIRTUAL_ENV": str(folder / "colab")}
    self.run(*installer, "install", "--quiet", *packages, **variables)
    # A wheel: pip would build one each time.
    self.run(*pip, "wheel", "--quiet", "--no-deps", str(_ROOT))
    (wheel,) = folder.glob("flaxshard-*.whl")
    self._environment["FLAXSHARD_SOURCE"] = wheel.as_uri()

  def run(self, *arguments, check=True, **variables):
    result = subprocess.run(
      arguments,
      cwd=self._folder,
      env={**self._environment, **variables},
      capture_output=True,
      text=True,
      timeout=900,
    )
    assert not check or result.returncode == 0, result.stderr
    return result

  def run_first_cell(self, before="", **variables):
    cells = make_notebooks.read(_QUICK_START).cells
    first = next(x["source"] for x in cells if x["cell_type"] == "code")
    code = f"{before}\n{first}"
    return self.run(self.python, "-c", code, check=False, **variables)

  def installed(self):
    found = json.loads(self.run(self.python, "-c", _LIST).stdout)
    return {_name(name): version for name, version in found.items()}


def _register(folder, packages):
  """Lets pip believe that packages are installed: a GPU needs gigabytes."""
  for name, version in packages.items():
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    (info / "RECORD").touch()


def _would_install(runtime, hardware, folder):
  """Returns the packages that the first cell would install there."""
  report, programs = folder / "report.json", folder / "bin"
  programs.mkdir(parents=True)
  if hardware == "gpu":
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    (programs / "nvidia-smi").chmod(0o755)
  _register(folder / "packages", _FURTHER[hardware])
  result = runtime.run_first_cell(
    _FAKE_TPU if hardware == "tpu" else "",
    PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
    # Found before the same packages of the virtual environment.
    PYTHONPATH=str(folder / "packages"),
    PIP_DRY_RUN="1",
    PIP_REPORT=str(report),
  )
  # pip has resolved and installed nothing.
  assert result.stderr.endswith("No module named 'flaxshard'\n"), result.stderr
  found = json.loads(report.read_text())["install"]
  metadata = [package["metadata"] for package in found]
  return {_name(x["name"]): x["version"] for x in metadata}


@pytest.mark.slow
def test_first_cell_upgrades_colab_packages_and_quick_start_runs(tmp_path):
  base = _python313()
  if base is None:
    pytest.skip("needs Python 3.13, as on Colab")
  runtime = _Runtime(tmp_path, base)
  before = runtime.installed()
  assert _pinned("colab_constraints.txt").items() <= before.items()

  # Side by side: they wait for the network.
  with futures.ThreadPoolExecutor() as pool:
    found = pool.map(
      lambda hardware: _would_install(runtime, hardware, tmp_path / hardware),
      _REPLACED,
    )
  for (hardware, plugins), new in zip(_REPLACED.items(), found, strict=True):
    replaced = set(new) & set(before | _FURTHER[hardware])
    assert replaced == {"flax", "jax", "jaxlib", *plugins}, hardware
    assert set(new) - replaced == _ADDED, hardware
    for name in {"jaxlib", *_REPLACED["gpu"]} & set(new):
      assert new[name] == new["jax"], name
  assert runtime.installed() == before

  # A session that has imported JAX before its first cell.
  result = runtime.run_first_cell("import jax")
  message = result.stderr.splitlines()[-1]
  assert message.startswith("AssertionError: Restart the session"), message
  assert runtime.installed() == before

  result = runtime.run_first_cell()
  assert result.returncode == 0, result.stderr
  after = runtime.installed()
  assert set(after) - set(before) == _ADDED
  changed = {name for name in before if after.get(name) != before[name]}
  assert changed == {"flax", "jax", "jaxlib"}

  # `test_notebook_runs` trains longer.
  source = _QUICK_START.read_text()
  assert "range(900)" in source
  short = source.replace("range(900)", "range(200)")
  output = runtime.run(runtime.python, "-c", short).stdout
  assert output.startswith("8 x cpu\n")
  (accuracy,) = re.findall(r"^accuracy: ([\d.]+)", output, re.M)
  assert float(accuracy) >= 0.9
