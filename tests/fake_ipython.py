"""A stand-in for IPython, which the tests do not need to be installed."""

import sys
import types


class Shell:
  """The parts of IPython's shell that flaxshard uses, and what was shown.

  Args:
    monkeypatch: Pytest's fixture.
    notebook: Whether to be a Jupyter kernel, or IPython in a terminal.
  """

  def __init__(self, monkeypatch, notebook=True):
    self.execution_count = 1
    self.config = {"IPKernelApp": {}} if notebook else {}
    self.shown = []
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: self
    module.display = types.ModuleType("IPython.display")
    module.display.display = lambda data, raw: self.shown.append(data)
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
