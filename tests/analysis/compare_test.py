import pathlib
import runpy

from given_plans import build
from given_plans import create_collective
from given_plans import create_plan
from given_plans import GIB
import ml_collections
import pytest

import flaxshard as fs
from flaxshard.analysis import compare
from flaxshard.train import config as config_lib

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits.py"


def names(comparison):
  return [candidate.name for candidate in comparison.candidates]


def test_the_fastest_that_fits_is_first():
  comparison = fs.compare_plans(
    {
      "slow": create_plan(seconds=2.0),
      "too large": create_plan(seconds=0.5, peak=9 * GIB),
      "fast": create_plan(seconds=1.0),
      "unknown": create_plan(seconds=0.1, hbm=None),
    }
  )
  assert names(comparison) == ["fast", "slow", "unknown", "too large"]
  assert comparison.best.name == "fast"
  assert comparison["slow"].cost.step_seconds == 2.0
  assert comparison.best.examples_per_second == 64.0


def test_batches_of_different_sizes_compare_by_examples_per_second():
  plans = {
    "small": create_plan(seconds=1.0, batch_size=64),
    "large": create_plan(seconds=1.5, batch_size=128),
  }
  assert names(fs.compare_plans(plans)) == ["large", "small"]
  plans["unknown"] = create_plan(seconds=1.2, batch_size=None)
  assert names(fs.compare_plans(plans)) == ["small", "unknown", "large"]


def test_without_times_the_least_memory_is_first_and_nothing_is_best():
  comparison = fs.compare_plans(
    {
      "a": create_plan(seconds=None, peak=5 * GIB),
      "b": create_plan(seconds=None, peak=4 * GIB),
    }
  )
  assert names(comparison) == ["b", "a"]
  assert comparison.best is None
  assert "examples/s" not in str(comparison)


def test_the_table_says_by_how_much_a_plan_does_not_fit():
  traffic = [create_collective(3 * 2**20)]
  comparison = fs.compare_plans(
    {
      "fits": create_plan(traffic=traffic),
      "large": create_plan(peak=9 * GIB),
      "larger": create_plan(
        peak=12 * GIB, peak_is_lower_bound=True, temporaries=None
      ),
    }
  )
  lines = str(comparison).splitlines()
  assert lines[2].split()[:2] == ["*", "fits"]
  assert "50%" in lines[2] and "3.0 MiB" in lines[2]
  assert "112%" in lines[3] and "over by 1.0 GiB" in lines[3]
  assert ">=150%" in lines[4] and "over by >=4.0 GiB" in lines[4]
  page = comparison._repr_html_()
  assert "<table" in page and "<svg" in page


def test_to_dict_is_plain():
  import json

  rows = fs.compare_plans({"a": create_plan()}).to_dict()
  row = json.loads(json.dumps(rows))[0]
  assert (row["name"], row["best"], row["error"]) == ("a", True, None)
  assert row["plan"]["cost"]["step_seconds"] == 1.0


def test_unknown_names_are_key_errors():
  comparison = fs.compare_plans({"fsdp": create_plan()})
  with pytest.raises(KeyError, match="Did you mean 'fsdp'"):
    comparison["fspd"]
  with pytest.raises(KeyError, match="0 is not one of 'fsdp'"):
    comparison[0]


def test_a_batch_that_does_not_divide_is_a_row_with_its_reason():
  comparison = fs.compare_plans(build, batch_size=[9, 16], features=[2])
  assert names(comparison) == ["16", "9"]
  first, last = comparison.candidates
  assert first.plan.batch_size == 16
  assert first.plan.memory.state["params"] == (4 * 2 + 2) * 4
  assert (last.plan, last.fits) == (None, False)
  assert "9" in last.error and last.error in str(comparison)
  with pytest.raises(KeyError, match="no plan"):
    comparison["9"]


def test_all_combinations_of_meshes_and_options_are_rows():
  comparison = fs.compare_plans(
    build,
    meshes=[{"replica": 8}, {"replica": 4, "model": 2}],
    features={"narrow": 2, "wide": 16},
  )
  assert sorted(names(comparison)) == [
    "replica=4 model=2, narrow",
    "replica=4 model=2, wide",
    "replica=8, narrow",
    "replica=8, wide",
  ]
  wide = comparison["replica=4 model=2, wide"]
  assert wide.mesh == {"replica": 4, "model": 2}
  assert wide.memory.state["params"] == (4 * 16 + 16) * 4


def test_topologies_are_named_in_the_rows(monkeypatch):
  monkeypatch.setattr(compare.plan_lib, "plan", lambda *args: create_plan())
  topologies = [fs.Topology.named("v5e:2x2"), "v5p:2x2x1"]
  comparison = fs.compare_plans(build, topologies)
  assert sorted(names(comparison)) == ["v5e:2x2", "v5p:2x2x1"]


def test_without_options_the_step_is_planned_on_this_machine():
  (candidate,) = fs.compare_plans(build).candidates
  assert candidate.name == "this machine"
  assert candidate.plan.device_kind == "cpu"


def test_when_nothing_can_be_built_the_first_reason_is_raised():
  with pytest.raises(ValueError, match=r"none of the combinations.*9"):
    fs.compare_plans(build, batch_size=[9, 17])


@pytest.mark.parametrize(
  "args, kwargs, error, words",
  [
    (({},), {}, ValueError, "no plans"),
    (({"a": 1},), {}, TypeError, "'a' must be a plan"),
    (({"a": create_plan()}, ["v5e:2x2"]), {}, ValueError, "already"),
    ((3,), {}, TypeError, "got 3"),
    ((build, "v5e:2x2"), {}, TypeError, "topologies .* got 'v5e:2x2'"),
    ((build, ["v5e:2x2"] * 2), {}, ValueError, "topologies .* look the same"),
    ((build,), {"meshes": {"replica": 2}}, TypeError, "meshes .* got 2"),
    ((build,), {"mesh": [{}]}, TypeError, "mean 'meshes'"),
    ((build,), {"batch_size": 8}, TypeError, "batch_size .* got 8"),
    ((build,), {"batch_size": []}, ValueError, "batch_size has no values"),
    ((build,), {"batch_size": [8, 8]}, ValueError, "look the same"),
    ((ml_collections.ConfigDict(),), {}, ValueError, "needs topologies"),
  ],
)
def test_invalid_arguments(args, kwargs, error, words):
  with pytest.raises(error, match=words):
    compare.compare_plans(*args, **kwargs)


@pytest.fixture
def planned(monkeypatch):
  """Records the configs that are planned, and plans nothing."""
  found = []

  def plan_config(config, topology):
    config = config_lib.check(config)
    found.append((topology, config))
    return create_plan(
      batch_size=config.batch_size, peak=(1 + config.batch_size / 64) * GIB
    )

  monkeypatch.setattr("flaxshard.analysis.config_plan.plan_config", plan_config)
  return found


def load_config():
  return runpy.run_path(str(CONFIG))["get_config"]()


def test_fields_of_a_config_are_options(planned):
  config = load_config()
  comparison = fs.compare_plans(
    config,
    ["v5e:2x2", "v5e:2x4"],
    meshes=[{"replica": 2}, {"replica": 4}],
    **{"mesh.rules": [(), ("fsdp",)], "model.features": {"wide": (64, 128)}},
  )
  assert len(comparison.candidates) == len(planned) == 8
  assert {topology for topology, _ in planned} == {"v5e:2x2", "v5e:2x4"}
  assert {c.mesh.replica for _, c in planned} == {2, 4}
  assert {c.mesh.rules for _, c in planned} == {(), ("fsdp",)}
  assert {c.model.features for _, c in planned} == {(64, 128)}
  assert "v5e:2x4, replica=4, fsdp" in names(comparison)
  # The given config is as it was.
  assert config.to_dict() == load_config().to_dict()


def test_invalid_value_of_a_field_is_a_row(planned):
  comparison = fs.compare_plans(load_config(), ["v5e:2x2"], batch_size=[64, 0])
  assert [c.plan is None for c in comparison.candidates] == [False, True]
  assert "batch_size" in comparison.candidates[1].error
  with pytest.raises(ValueError, match='"modell" was not found'):
    fs.compare_plans(load_config(), ["v5e:2x2"], **{"modell.features": [2]})


def test_largest_batch_of_a_config(planned):
  tries = []
  found = fs.largest_batch(
    load_config(),
    "v5e:2x2",
    on_try=tries.append,
    within=0,
    **{"mesh.replica": 2},
  )
  # (1 + n / 64) GiB of 8 GiB.
  assert found.batch_size == 7 * 64
  assert all(t.batch_size % 2 == 0 for t in tries)
  assert {c.mesh.replica for _, c in planned} == {2}
