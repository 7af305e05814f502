"""Sessions of users: one chip beside virtual devices, and the Stop button."""

import asyncio
import pathlib
import re
import threading
import time

import make_notebooks
import nbclient
import nbformat
import notebook_outputs
import pytest

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
# A shorter run.
_SHORTER = ("num_train_steps = 200", "num_train_steps = 100")


def _read(name: str, *replaced: tuple[str, str]) -> nbformat.NotebookNode:
  """Returns a notebook with other texts in its cells."""
  notebook = make_notebooks.read(make_notebooks.FOLDER / f"{name}.py")
  for old, new in replaced:
    cells = [x for x in notebook.cells if old in x["source"]]
    assert cells, old
    for cell in cells:
      cell["source"] = cell["source"].replace(old, new)
  return notebook


def _add_one_chip(notebook: nbformat.NotebookNode) -> None:
  notebook.cells.insert(0, nbformat.v4.new_code_cell(_ONE_CHIP))


@pytest.fixture(autouse=True)
def _package_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("PYTHONPATH", str(make_notebooks.FOLDER.parent))
  for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
    monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_notebook_runs_with_one_chip(tmp_path: pathlib.Path) -> None:
  notebook = _read("replicas_and_shardings")
  _add_one_chip(notebook)
  make_notebooks.execute(notebook, tmp_path, timeout=300)
  _, first, second, *_ = notebook_outputs.code_cells(notebook)
  assert notebook_outputs.stdout(first).startswith("1 x cpu\n")
  assert notebook_outputs.stdout(second) == "8 devices: cpu\n"


@pytest.mark.slow
def test_stop_button_interrupts_a_run_that_resumes(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the run's workdir
  notebook = _read(
    "language_model",
    _SHORTER,
    # The user presses the button, so the hook only makes the run wait for it.
    (
      "    os.kill(os.getpid(), signal.SIGINT)\n",
      "    pathlib.Path('reached').touch()\n  if step >= 75:\n"
      "    import time; time.sleep(0.2)\n",
    ),
  )
  last = next(
    number
    for number, cell in enumerate(notebook.cells)
    if "difference" in cell["source"] and cell["cell_type"] == "code"
  )
  del notebook.cells[last + 1 :]
  _add_one_chip(notebook)
  client = nbclient.NotebookClient(
    notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
  )

  def press_stop() -> None:
    while not (tmp_path / "reached").exists():
      time.sleep(0.05)
    asyncio.run(client.km.interrupt_kernel())

  user = threading.Thread(target=press_stop, daemon=True)
  user.start()
  client.execute()
  user.join()
  results = notebook_outputs.results(notebook)
  # A lost interrupt would let the run end, 25 steps of 0.2 seconds later.
  assert 75 <= results["stopped after steps"] < 100
  assert results["steps after resuming"] == 100
  assert results["difference"] == 0
  warnings = "".join(
    output.get("text", "")
    for cell in notebook_outputs.code_cells(notebook)
    for output in cell["outputs"]
  )
  assert re.search(r"SIGINT: saved step \d+ in", warnings)
