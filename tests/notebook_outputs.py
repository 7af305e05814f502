"""Cells of executed notebooks, and what they printed."""

import re

import nbformat


def code_cells(notebook: nbformat.NotebookNode) -> list:
  return [cell for cell in notebook.cells if cell["cell_type"] == "code"]


def stdout(cell: nbformat.NotebookNode) -> str:
  return "".join(
    output["text"]
    for output in cell["outputs"]
    if output["output_type"] == "stream" and output["name"] == "stdout"
  )


def printed(notebook: nbformat.NotebookNode) -> list[str]:
  """Returns the lines that cells with the tag "result" have printed."""
  return [
    line
    for cell in notebook.cells
    if "result" in cell["metadata"].get("tags", [])
    for line in stdout(cell).splitlines()
  ]


def results(notebook: nbformat.NotebookNode) -> dict[str, float]:
  """Returns the values of the printed lines `name: number`."""
  matches = [
    re.fullmatch(r"(\S.*?): +(-?[\d.,e+-]+)", line)
    for line in printed(notebook)
  ]
  return {m[1]: float(m[2].replace(",", "")) for m in matches if m}
