"""The examples in the docstrings run, and say what is so."""

import doctest
import importlib

import pytest

# Module name and how many of its examples there are at least: a docstring that
# lost its example, or whose example doctest no longer finds, is noticed.
MODULES = {
  "flaxshard.checkpoint": 1,
  "flaxshard.create": 1,
  "flaxshard.data": 1,
  "flaxshard.distribute": 3,
  "flaxshard.elementwise": 1,
  "flaxshard.divergence": 1,
  "flaxshard.integrity": 1,
  "flaxshard.logical_devices": 2,
  "flaxshard.models": 1,
  "flaxshard.models.cnn": 1,
  "flaxshard.models.resnet": 1,
  "flaxshard.models.transformer": 1,
  "flaxshard.gradients": 2,
  "flaxshard.input_pipeline.iterators": 1,
  "flaxshard.input_pipeline.sharding": 1,
  "flaxshard.partitioning.annotations": 1,
  "flaxshard.partitioning.coordinates": 1,
  "flaxshard.partitioning.describe": 1,
  "flaxshard.partitioning.device_assignment": 2,
  "flaxshard.partitioning.mesh": 4,
  "flaxshard.partitioning.rules": 3,
  "flaxshard.partitioning.specs": 1,
  "flaxshard.partitioning.topology": 3,
  "flaxshard.slots": 1,
  "flaxshard.optimizer": 1,
  "flaxshard.policy": 1,
  "flaxshard.registry": 2,
  "flaxshard.replica": 2,
  "flaxshard.strategy": 6,
  "flaxshard.train_state": 1,
  "flaxshard.trees": 1,
  "flaxshard.values": 1,
  "flaxshard.wrappers": 0,
  "flaxshard.wrappers.agn": 1,
  "flaxshard.wrappers.base": 1,
  "flaxshard.wrappers.config": 2,
  "flaxshard.wrappers.cross_shard": 1,
  "flaxshard.wrappers.loss_scale": 3,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
  module = importlib.import_module(name)
  tests = [t for t in doctest.DocTestFinder().find(module) if t.examples]
  assert len(tests) >= MODULES[name]
  results = doctest.testmod(module)
  assert results.failed == 0
  assert results.attempted == sum(len(t.examples) for t in tests)
