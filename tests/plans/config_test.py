"""Plans of configs, and `python -m flaxshard --plan`."""

import importlib
import json
import logging

import jax
import pytest
import tiny

from configs import lm_1b
from flaxshard.plans import config as config_plans
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import setup as setup_lib


def test_a_plan_and_a_run_have_the_same_arguments():
  setup = tiny.setup(
    tiny.config(mesh={"rules": ({"name": "fsdp", "min_size": 64},)})
  )
  program = setup_lib.Setup(setup.config, setup.strategy, shapes_only=True)
  planned, run = (jax.tree.leaves(x.abstract_state) for x in (program, setup))
  assert planned == run
  with setup.open_train_batches(None) as batches:
    batch = next(batches)
  planned = program.arguments[setup_lib.BATCH]
  for key, x in batch.items():
    assert (x.shape, x.dtype) == (planned[key].shape, planned[key].dtype)
    assert x.sharding.is_equivalent_to(planned[key].sharding, x.ndim)


@pytest.mark.tpu
def test_several_topologies_are_planned_and_written(tmp_path, capsys, caplog):
  config = tiny.config(mesh={"virtual_devices": 8})
  with caplog.at_level(logging.INFO, "flaxshard"):
    config_plans.print_plans(config, "v5e:2x2, v5e:2x4", str(tmp_path))
  printed = capsys.readouterr().out
  assert "v5e:2x2" in printed and "v5e:2x4" in printed
  assert printed.count("check for mistakes") == 2
  values = json.loads((tmp_path / "plan.json").read_text())
  assert [v["mesh"]["replica"] for v in values.values()] == [4, 8]
  assert caplog.text.count("planned v5e") == 2


@pytest.mark.tpu
def test_all_topologies_are_checked_before_the_first_is_planned(caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  print_plans = config_plans.print_plans
  with pytest.raises(ValueError, match=r"config.batch_size=12.*8 replicas"):
    print_plans(tiny.config(batch_size=12), "v5e:2x2,v5e:2x4", None)
  with pytest.raises(ValueError, match="v5x"):
    print_plans(tiny.config(batch_size=12), "v5e:2x2,v5x:2x2", None)
  assert "planned" not in caplog.text


@pytest.mark.tpu
def test_lm_1b_has_a_billion_parameters_split_by_its_rules():
  config = config_lib.check(lm_1b.get_config())
  strategy = devices.create_strategy(config, "v5p:4x4x8")
  setup = setup_lib.Setup(config, strategy, shapes_only=True)
  params = setup.abstract_state.params
  count = sum(x.size for x in jax.tree.leaves(params))
  assert 1.0e9 < count < 1.05e9
  kernel = params["block8"]["mlp_in"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (3072 // 128, 12288)


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["digits", "digits_agn", "digits_spatial"])
def test_shipped_configs_have_plans(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  config.model.features = (4,)
  config.model.dense = 8
  plan = config_plans.plan_config(config, "v5e:2x4")
  assert plan.memory.fits
  assert plan.memory.peak > plan.memory.state_bytes
  assert plan.findings is not None and not plan.findings
  if name == "digits":
    # The gradient of Flax's max pooling gathers the images of all devices.
    assert {c.kind for c in plan.traffic} == {"all-reduce"}
  if name == "digits_agn":
    # Outside of the conditional there is the flag of the loss scale alone.
    outside = [c.operand_bytes for c in plan.traffic if not c.in_conditional]
    assert len(outside) < len(plan.traffic) and sum(outside) <= 64
    assert plan.period == 10


@pytest.mark.tpu
def test_too_large_a_model_is_a_plan_that_does_not_fit():
  config = tiny.config(
    model={"name": "cnn", "features": (), "dense": 80_000_000}
  )
  plan = config_plans.plan_config(config, "v5e:2x2")
  assert plan.memory.fits is False
  assert plan.memory.excess > 2**30
  assert plan.findings.notes
  for fact in ("DOES NOT FIT", plan.findings.notes[0]):
    assert fact in str(plan)
