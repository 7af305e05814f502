"""The first cell installs flaxshard on the packages of Colab's runtimes."""

from concurrent import futures
import glob
import json
import os
import pathlib
import re
import shutil
import subprocess

import make_notebooks
import pytest

_ROOT = make_notebooks.FOLDER.parent
_SOURCE = make_notebooks.FOLDER / "quick_start.py"
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
    cells = make_notebooks.read(_SOURCE).cells
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

  # notebooks_test.py trains longer.
  source = _SOURCE.read_text()
  assert "range(900)" in source
  short = source.replace("range(900)", "range(200)")
  output = runtime.run(runtime.python, "-c", short).stdout
  assert output.startswith("8 x cpu\n")
  (accuracy,) = re.findall(r"^accuracy: ([\d.]+)", output, re.M)
  assert float(accuracy) >= 0.9
