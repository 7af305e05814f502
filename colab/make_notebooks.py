"""Makes the notebooks of this folder from the .py files beside them.

    python colab/make_notebooks.py quick_start

executes a notebook and stores it with its outputs; without a name, all. Edit
the .py files, in jupytext's percent format, never the .ipynb files. Needs
`pip install '.[test,tpu]'`.
"""

from __future__ import annotations

import argparse
import pathlib

import nbformat

FOLDER = pathlib.Path(__file__).parent


def sources() -> list[pathlib.Path]:
  """Returns the .py files that are notebooks."""
  own = pathlib.Path(__file__).name
  return sorted(path for path in FOLDER.glob("*.py") if path.name != own)


def read(source: pathlib.Path) -> nbformat.NotebookNode:
  """Returns the notebook of a .py file, without outputs.

  Args:
    source: A file in percent format.
  """
  # Imported here, as nbclient below: they take a second.
  import jupytext

  notebook = jupytext.read(source, fmt="py:percent")
  # jupytext's metadata have its version, and its cell ids are random.
  notebook.metadata = nbformat.from_dict(
    {
      "accelerator": "TPU",
      "colab": {"gpuType": "V5E1", "provenance": []},
      "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
      },
      "language_info": {"name": "python"},
    }
  )
  notebook.nbformat, notebook.nbformat_minor = 4, 5
  for number, cell in enumerate(notebook.cells):
    cell["id"] = f"cell-{number}"
    cell["metadata"].pop("lines_to_next_cell", None)
  return notebook


def execute(
  notebook: nbformat.NotebookNode,
  folder: pathlib.Path,
  timeout: float | None = None,
) -> nbformat.NotebookNode:
  """Executes a notebook from top to bottom, and returns it with its outputs.

  Args:
    notebook: The notebook.
    folder: The working directory of its kernel.
    timeout: Seconds a cell may take, None for any time.

  Raises:
    nbclient.exceptions.CellExecutionError: A cell raised an exception.
  """
  import nbclient

  client = nbclient.NotebookClient(
    notebook,
    timeout=timeout,
    record_timing=False,
    coalesce_streams=True,  # of a progress bar, keep the last state
    resources={"metadata": {"path": str(folder)}},
  )
  metadata = notebook.metadata.copy()
  client.execute()
  notebook.metadata = metadata  # without the version of the kernel
  return notebook


def main() -> None:
  """Writes the notebooks."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("names", nargs="*", help="such as quick_start; or all")
  names = parser.parse_args().names
  for source in sources():
    if not names or source.stem in names:
      notebook = execute(read(source), FOLDER)
      nbformat.write(notebook, source.with_suffix(".ipynb"))
      print(source.with_suffix(".ipynb"))


if __name__ == "__main__":
  main()
