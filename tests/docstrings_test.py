"""The examples in the docstrings run and show the true results."""

import doctest
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import optax
import pytest

import flaxshard


def examples(source):
  lines = (line.lstrip() for line in source.splitlines())
  return sum(x.startswith(">>> ") and "+SKIP" not in x for x in lines)


def modules():
  """Returns the modules that have examples, and how many lines of them."""
  found = {}
  for info in pkgutil.walk_packages(flaxshard.__path__, "flaxshard."):
    if not info.name.endswith("__main__"):
      module = importlib.import_module(info.name)
      if count := examples(inspect.getsource(module)):
        found[info.name] = count
  return found


MODULES = modules()

# What a reader of an example has imported.
_NAMES = {"fs": flaxshard, "jax": jax, "jnp": jnp, "optax": optax}

# Examples that train or compile for more than a second.
_SLOW = {
  "flaxshard.data.factories",
  "flaxshard.models.cnn",
  "flaxshard.models.resnet",
  "flaxshard.models.transformer",
  "flaxshard.state.train_state",
}


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name
    for name in MODULES
  ],
)
def test_examples(name):
  module = importlib.import_module(name)
  results = doctest.testmod(module, extraglobs=_NAMES)
  assert results.failed == 0
  # doctest overlooks some docstrings, so the number of examples is compared.
  # From Python 3.13 on, `attempted` includes the skipped examples.
  ran = results.attempted - getattr(results, "skipped", 0)
  assert ran == MODULES[name]
