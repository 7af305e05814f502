"""Makes the notebooks of this folder from the .py files beside them.

    python colab/make_notebooks.py            # the text of all notebooks
    python colab/make_notebooks.py --execute  # and their pictures
    python colab/make_notebooks.py --execute quick_start

Edit the .py files, in jupytext's percent format, never the .ipynb files. The
cell with the tag "picture" keeps the picture of its last execution; no other
output is stored. Needs `pip install '.[test]'`.
"""

from __future__ import annotations

import argparse
import pathlib

import jupytext
import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parent
PICTURE = "picture"  # the tag of the cell that stores its picture


def sources() -> list[pathlib.Path]:
  """Returns the .py files that are notebooks."""
  own = pathlib.Path(__file__).name
  return sorted(path for path in FOLDER.glob("*.py") if path.name != own)


def read(source: pathlib.Path) -> nbformat.NotebookNode:
  """Returns the notebook of a .py file, without outputs.

  Args:
    source: A file in percent format.
  """
  notebook = jupytext.read(source, fmt="py:percent")
  # jupytext's metadata have its version, and its cell ids are random.
  notebook.metadata = nbformat.from_dict(
    {
      "colab": {"provenance": []},
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
    cell["metadata"] = nbformat.from_dict(
      {name: x for name, x in cell["metadata"].items() if name == "tags"}
    )
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
  client = nbclient.NotebookClient(
    notebook,
    timeout=timeout,
    coalesce_streams=True,  # of a progress bar, keep the last state
    resources={"metadata": {"path": str(folder)}},
  )
  return client.execute()


def is_picture(cell: nbformat.NotebookNode) -> bool:
  """Returns whether a cell stores its picture."""
  return PICTURE in cell["metadata"].get("tags", [])


def pictures(notebook: nbformat.NotebookNode) -> list[str]:
  """Returns the pictures in the cells with the tag, PNG in base64."""
  return [
    output["data"]["image/png"]
    for cell in notebook.cells
    if is_picture(cell)
    for output in cell["outputs"]
    if "image/png" in output.get("data", {})
  ]


def store_picture(notebook: nbformat.NotebookNode, png: str) -> None:
  """Stores a picture as the output of the cell with the tag.

  Args:
    notebook: A notebook without outputs; it is changed.
    png: PNG in base64.
  """
  (cell,) = filter(is_picture, notebook.cells)
  output = nbformat.v4.new_output("display_data", {"image/png": png})
  cell["outputs"] = [output]


def main() -> None:
  """Writes the notebooks."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("names", nargs="*", help="such as quick_start; or all")
  parser.add_argument("--execute", action="store_true")
  arguments = parser.parse_args()
  for source in sources():
    if arguments.names and source.stem not in arguments.names:
      continue
    target = source.with_suffix(".ipynb")
    if arguments.execute:
      found = pictures(execute(read(source), FOLDER))
    else:
      found = pictures(nbformat.read(target, 4)) if target.exists() else []
    notebook = read(source)
    if found:
      store_picture(notebook, found[-1])
    nbformat.write(notebook, target)
    print(f"{target}: {'a' if found else 'no'} picture")


if __name__ == "__main__":
  main()
