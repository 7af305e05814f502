"""A stand-in for IPython, which the tests do not need to be installed."""

import sys
import types


class Shell:
  """The parts of IPython's shell that flaxshard uses.

  Args:
    monkeypatch: Pytest's fixture.
    notebook: Whether to be a Jupyter kernel, or IPython in a terminal.
  """

  def __init__(self, monkeypatch, notebook=True):
    self.config = {"IPKernelApp": {}} if notebook else {}
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: self
    monkeypatch.setitem(sys.modules, "IPython", module)
