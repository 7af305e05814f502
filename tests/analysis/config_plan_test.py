"""Plans of configs, and `python -m flaxshard --plan`."""

import importlib
import json
import logging
import pathlib

import jax
import pytest
import tiny

from configs import lm_1b
from flaxshard.analysis import config_plan
from flaxshard.analysis import print_plans
from flaxshard.partitioning import compile_only
from flaxshard.tasks import load
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import program as program_lib
from flaxshard.train import setup as setup_lib

_without_compiler = pytest.mark.skipif(
  compile_only.has_libtpu(), reason="would compile"
)


@_without_compiler
def test_without_the_compiler_a_plan_has_the_bytes_of_the_state():
  plan = config_plan.plan_config(tiny.config(), "v5e:2x4")
  assert plan.topology == "v5e:2x4"
  assert plan.mesh == {"replica": 8}
  assert plan.memory.state["loss_scale"] == 16
  # Two images of 64 floats, and their labels.
  assert plan.memory.batch == 2 * (64 * 4 + 4)
  unknown = plan.memory.temporaries, plan.memory.peak, plan.memory.fits
  assert unknown == (None, None, None)
  assert (plan.traffic, plan.compiler) == (None, None)
  for fact in ("unknown", "flaxshard[tpu]"):
    assert fact in str(plan)


def test_a_plan_and_a_run_have_the_same_arguments():
  config = config_lib.check(
    tiny.config(mesh={"rules": ({"name": "fsdp", "min_size": 64},)})
  )
  setup = setup_lib.create_setup(config, devices.create_strategy(config))
  loaded = load.load(config, shapes_only=True)
  program = program_lib.create_program(config, setup.strategy, loaded)
  for planned, run in zip(
    jax.tree.leaves(program.abstract_state),
    jax.tree.leaves(setup.abstract_state),
    strict=True,
  ):
    assert (planned.shape, planned.dtype) == (run.shape, run.dtype)
    assert planned.sharding == run.sharding
  with iter(setup.train_batches()) as batches:
    batch = next(batches)
  planned = program.arguments[program_lib.BATCH]
  for key, x in batch.items():
    assert (x.shape, x.dtype) == (planned[key].shape, planned[key].dtype)
    assert x.sharding.is_equivalent_to(planned[key].sharding, x.ndim)


@pytest.mark.slow
@_without_compiler
def test_several_topologies_are_compared_and_written(tmp_path, capsys, caplog):
  config = tiny.config(mesh={"virtual_devices": 8})
  with caplog.at_level(logging.INFO, "flaxshard"):
    print_plans.print_plans(config, "v5e:2x2, v5e:2x4", str(tmp_path))
  printed = capsys.readouterr().out
  assert "v5e:2x2" in printed and "v5e:2x4" in printed
  values = json.loads((tmp_path / "plan.json").read_text())
  assert [v["mesh"]["replica"] for v in values.values()] == [4, 8]
  assert "v5e:2x4" in (tmp_path / "plan.html").read_text()
  assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
  assert caplog.text.count("virtual_devices=8") == 1
  assert caplog.text.count("planned v5e") == 2


@pytest.mark.parametrize(
  ("topologies", "fact"),
  [("v5e:2x2,", "--plan=v5e:2x2,"), ("v5e:2x2,v5e:2x4", "8 replicas")],
)
def test_all_topologies_are_checked_before_the_first_is_planned(
  topologies, fact, caplog
):
  config = tiny.config(batch_size=12)
  with (
    caplog.at_level(logging.INFO, "flaxshard"),
    pytest.raises(ValueError) as e,
  ):
    print_plans.print_plans(config, topologies, None)
  assert fact in str(e.value)
  assert "planned" not in caplog.text


@pytest.mark.parametrize(
  ("fields", "topology", "facts"),
  [
    ({}, "v5x:2x2", ("v5x",)),
    ({"batch_size": 12}, "v5e:2x4", ("config.batch_size=12", "8 replicas")),
    (
      {"mesh": {"axes": (("model", 3),), "replica": 4}},
      "v5e:2x4",
      ("config.mesh", "12 devices", "there are 8"),
    ),
  ],
)
def test_configs_that_do_not_fit_the_devices_raise(fields, topology, facts):
  with pytest.raises(ValueError) as e:
    config_plan.plan_config(tiny.config(**fields), topology)
  for fact in facts:
    assert fact in str(e.value)


def _small(config):
  """Makes `configs/lm_1b.py` a model of two small layers."""
  config.model.update(
    num_layers=2, embed_dim=32, num_heads=2, mlp_dim=64, max_length=16
  )
  config.data.update(
    path=str(pathlib.Path(config_plan.__file__).parent), length=16, eval_every=5
  )
  config.batch_size = 8
  config.schedule.warmup_steps = 0
  return config_lib.check(config)


def test_lm_1b_has_a_billion_parameters_split_by_its_rules():
  config = config_lib.check(lm_1b.get_config())
  loaded = load.load(config, shapes_only=True)
  params = program_lib.create_program(
    config,
    devices.create_compile_only_strategy(config, "v5p:4x4x8"),
    loaded,
  ).abstract_state.params
  count = sum(x.size for x in jax.tree.leaves(params))
  assert 1.0e9 < count < 1.05e9
  kernel = params["block8"]["mlp_in"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (3072 // 128, 12288)


@pytest.mark.slow
def test_lm_1b_trains_when_small():
  config = _small(lm_1b.get_config())
  config.unlock().mesh.update(axes=(("model", 2),), replica=2)
  setup = setup_lib.create_setup(config, devices.create_strategy(config))
  state, progress = setup.create_state(), setup.init_progress()
  kernel = state.params["block1"]["mlp_in"]["kernel"]
  assert kernel.sharding.spec == jax.P("replica", "model")
  step, rng = setup.init_step(1), setup.replicate(jax.random.key(0))
  losses = []
  with iter(setup.train_batches()) as batches:
    batch = next(batches)
    for _ in range(3):
      state, progress, step = setup.train_step(
        state, progress, batch, rng, step
      )
      losses.append(float(progress.metrics.compute()["loss"]))
  # The mean loss falls on one batch.
  assert losses[-1] < losses[0]


@_without_compiler
def test_the_largest_batch_needs_the_compiler():
  # The batch of the config need not fit: it is searched.
  config = tiny.config(batch_size=6)
  with pytest.raises(ValueError, match="compiler of TPU v5 lite"):
    print_plans.print_plans(config, "v5e:2x2", None, find_largest_batch=True)


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["digits", "digits_agn", "digits_spatial"])
def test_shipped_configs_have_plans(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  config.model.features = (4,)
  config.model.dense = 8
  plan = config_plan.plan_config(config, "v5e:2x4")
  assert plan.memory.fits
  assert plan.memory.peak > plan.memory.state_bytes
  assert plan.compiler is not None
  assert plan.findings is not None and not plan.findings
  if name == "digits":
    # The gradient of Flax's max pooling gathers the images of all devices.
    assert {c.kind for c in plan.traffic} == {"all-reduce"}
  conditional = [c for c in plan.traffic if c.in_conditional]
  if name == "digits_agn":
    # Outside of the conditional there is the flag of the loss scale alone.
    outside = [c.operand_bytes for c in plan.traffic if not c.in_conditional]
    assert conditional and sum(outside) <= 64
    assert plan.period == 10


@pytest.mark.tpu
def test_too_large_a_model_is_a_plan_that_does_not_fit():
  config = tiny.config(
    model={"name": "cnn", "features": (), "dense": 80_000_000}
  )
  plan = config_plan.plan_config(config, "v5e:2x2")
  assert plan.memory.fits is False
  assert plan.memory.excess > 2**30
  assert plan.findings.notes
  for text in (str(plan), plan._repr_html_()):
    assert "DOES NOT FIT" in text and plan.findings.notes[0] in text
