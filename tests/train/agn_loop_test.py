"""AGN in the training loop: the configs that come with it, shortened."""

import importlib

import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard import train
from flaxshard.train import charts


@pytest.fixture(scope="module", autouse=True)
def no_plots():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(charts, "plot", lambda rows, path: None)
    yield


def shortened(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  loss_scale, (agn, arguments) = config.wrappers
  config.wrappers = (
    loss_scale,
    (agn, {**arguments, "communication_period": 4}),
  )
  config.model = {"name": "cnn", "features": (4,), "dense": 8}
  config.num_train_steps = 6
  config.log_every_steps = config.eval_every_steps = 3
  config.checkpoint_every_steps = 100
  config.writer = "none"
  return config


def test_agn(tmp_path) -> None:
  whole = str(tmp_path)
  state = train.train_and_evaluate(shortened("digits_agn"), whole)
  assert [row["commits"] for row in tiny.rows(whole)] == [0, 1]
  own = state.wrapper_states["agn"].local_params["head"]["kernel"]
  copies = np.asarray(own)
  assert copies.shape[0] == 8
  assert not np.array_equal(copies[0], copies[1])  # two steps after a commit
  # What is evaluated is the center.
  held_out = data.digits().eval
  logits = state.apply_fn({"params": state.params}, held_out.inputs)
  accuracy = (np.argmax(logits, -1) == held_out.labels).mean()
  assert tiny.rows(whole)[-1]["eval_accuracy"] == pytest.approx(accuracy)


def test_diloco(tmp_path) -> None:
  state = train.train_and_evaluate(shortened("digits_diloco"), str(tmp_path))
  own = state.wrapper_states["agn"]
  assert (int(own.local_step), int(own.commits)) == (6, 1)
  momentum = own.outer_opt_state[0].trace["head"]["kernel"]
  assert float(np.abs(momentum).max()) > 0
