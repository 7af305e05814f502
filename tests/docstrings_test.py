"""The examples in the docstrings run and show the true results."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import flaxshard

# Examples that train, or compile for more than a fifth of a second.
_SLOW = (".data", "models.images", "models.transformer", "state.train_state")
_SLOW += ("core.indexed_slices", "nnx.optimizer", "sparse.lookups")
_SLOW += ("sparse.optimizer", "strategy.strategy", "wrappers.loss_scale")
_SLOW += ("state.lora", "replicas.context")


def _count(module):
  """Returns the number of lines of examples that are run."""
  lines = map(str.strip, inspect.getsource(module).splitlines())
  return sum(x.startswith(">>> ") and "+SKIP" not in x for x in lines)


def _public():
  """Returns where what users import is defined."""
  found = [getattr(flaxshard, name) for name in flaxshard.__all__]
  for module in filter(inspect.ismodule, tuple(found)):
    found += [getattr(module, name) for name in dir(module)]
  code = (x for x in found if inspect.isclass(x) or inspect.isfunction(x))
  return tuple(f"{x.__module__}.{x.__name__}." for x in code)


def _cases():
  """Yields the modules that have examples."""
  for info in pkgutil.walk_packages(flaxshard.__path__, "flaxshard."):
    if not info.name.endswith("__main__"):
      module = importlib.import_module(info.name)
      if _count(module):
        marks = [pytest.mark.slow] if info.name.endswith(_SLOW) else []
        yield pytest.param(module, marks=marks, id=info.name)


@pytest.mark.parametrize("module", list(_cases()))
def test_examples(module):
  runner = doctest.DocTestRunner()
  for test in doctest.DocTestFinder().find(module):
    if f"{test.name}.".startswith(_public()):  # as in a fresh file
      test.globs = {"__name__": "__main__"}
    runner.run(test)
  results = runner.summarize()
  assert results.failed == 0
  # doctest overlooks some docstrings, so the number of examples is compared.
  # From Python 3.13 on, `attempted` includes the skipped examples.
  ran = results.attempted - getattr(results, "skipped", 0)
  assert ran == _count(module)
