import re

from given_plans import create_collective
from given_plans import create_plan
from given_plans import GIB
import pytest

from flaxshard.analysis import charts

PLANS = {
  "one": create_plan(
    traffic=[
      create_collective(2**20),
      create_collective(2**21, "dcn", "parameter"),
    ],
    outputs=100,
    program=20,
    padding=5,
    unused=25,
    arguments=10,
  ),
  "too large": create_plan(
    seconds=None, peak=9 * GIB, peak_is_lower_bound=True, temporaries=None
  ),
  "unknown": create_plan(seconds=None, peak=None),
}


def test_parts_of_the_memory():
  assert charts.memory_parts(PLANS["one"]) == {
    "params": GIB,
    "opt_state": 2 * GIB,
    "batch": 1024,
    "outputs, program, padding": 110,
    "temporaries": GIB - 1024,
  }
  # What the compiler says beyond the arguments.
  parts = charts.memory_parts(PLANS["too large"])
  assert parts["temporaries"] == 6 * GIB - 1024
  assert "temporaries" not in charts.memory_parts(PLANS["unknown"])


def test_parts_of_the_traffic():
  assert charts.traffic_parts(PLANS["one"]) == {
    ("ICI", "gradients"): 2**20,
    ("DCN", "parameter"): 2**21,
  }


def test_picture_is_written(tmp_path):
  path = tmp_path / "plans.png"
  figure = charts.plot_plans(PLANS, str(path))
  assert path.read_bytes().startswith(b"\x89PNG")
  memory, traffic, time = figure.axes
  # A bar is as long as the bytes of its part.
  widths = {
    bars.get_label(): [bar.get_width() for bar in bars]
    for bars in memory.containers
  }
  assert widths["opt_state"] == [2, 2, 2]
  assert widths["temporaries"] == pytest.approx([1, 6, 0], abs=1e-5)
  assert memory.get_xlabel() == "GiB"
  notes = [text.get_text() for text in memory.texts]
  assert notes == [
    "50% of HBM",
    "≥ 112% of HBM: too large",
    "temporaries unknown",
  ]
  sent = {bars.get_label(): bars[0].get_width() for bars in traffic.containers}
  assert sent == {"ICI: gradients": 1, "DCN: parameter": 2}
  assert [text.get_text() for text in time.texts] == ["unknown"] * 2


def test_picture_in_a_notebook_is_svg():
  svg = charts.svg_if_possible(PLANS)
  assert re.match(r"<svg [^>]*viewBox", svg) and svg.endswith("</svg>\n")
  assert charts.svg_if_possible({}) == ""


def test_a_plan_draws_itself(tmp_path):
  path = tmp_path / "plan.png"
  PLANS["one"].plot(str(path))
  assert path.read_bytes().startswith(b"\x89PNG")
  assert PLANS["one"]._repr_html_().count("<svg") == 1


def test_no_plans_are_an_error():
  with pytest.raises(ValueError, match="no plan"):
    charts.plot_plans({})
