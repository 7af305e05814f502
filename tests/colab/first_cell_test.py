"""The first cell installs flaxshard on the packages of Colab's runtime."""

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
_COLAB = pathlib.Path(__file__).with_name("colab_constraints.txt")
_LIST = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({x.metadata["Name"].lower(): x.version for x in found}))
"""


def _python313() -> str | None:
  versions = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
  candidates = [
    "python3.13",
    *sorted(glob.glob(f"{versions}/versions/3.13*/bin/python")),
  ]
  for path in filter(None, map(shutil.which, candidates)):
    # A shim of pyenv exists but does not start.
    if not subprocess.run([path, "-c", ""], capture_output=True).returncode:
      return path
  return None


@pytest.mark.slow
def test_first_cell_upgrades_colab_packages_and_quick_start_runs(
  tmp_path: pathlib.Path,
) -> None:
  base = _python313()
  if base is None:
    pytest.skip("needs Python 3.13, as on Colab")
  python = tmp_path / "colab" / "bin" / "python"
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")
  }
  environment["FLAXSHARD_SOURCE"] = _ROOT.as_uri()
  environment["PIP_NO_COMPILE"] = "1"  # faster

  def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    result = subprocess.run(
      arguments,
      cwd=tmp_path,
      env=environment,
      capture_output=True,
      text=True,
      timeout=900,
    )
    if check:
      assert result.returncode == 0, result.stderr
    return result

  def installed() -> dict[str, str]:
    return json.loads(run(str(python), "-c", _LIST).stdout)

  run(base, "-m", "venv", str(tmp_path / "colab"))
  run(str(python), "-m", "pip", "install", "--quiet", "-r", str(_COLAB))
  before = installed()
  pinned = dict(re.findall(r"^([\w-]+)==(.*)$", _COLAB.read_text(), re.M))
  assert pinned.items() <= before.items()

  # A session that has imported packages before its first cell.
  cells = make_notebooks.read(_SOURCE).cells
  first = next(c["source"] for c in cells if c["cell_type"] == "code")
  (tmp_path / "session.py").write_text(f"import jax\nimport optax\n{first}")
  result = run(str(python), "session.py", check=False)
  message = result.stderr.splitlines()[-1]
  assert message.startswith("RuntimeError: pip replaced packages"), message
  assert "Restart the session" in message
  replaced = dict(re.findall(r"([\w-]+) ([\d.]+\d) by", message))

  after = installed()
  assert "flaxshard" in after
  upgraded = {name for name in before if after.get(name) != before[name]}
  assert upgraded & set(pinned) == {"flax", "jax", "jaxlib"}
  # Upgraded, but not imported: flax.
  assert replaced == {name: before[name] for name in ("jax", "jaxlib")}

  output = run(str(python), str(_SOURCE)).stdout
  assert output.startswith("Hardware: a CPU that emulates 8 devices.")
  (accuracy,) = re.findall(r"^accuracy: ([\d.]+)", output, re.M)
  assert float(accuracy) >= 0.96
