"""AGN in the training loop: the shipped DiLoCo config, shortened."""

import numpy as np
import pytest
import tiny

from configs import digits_diloco
from flaxshard import data
from flaxshard import train
from flaxshard.train import charts


@pytest.mark.slow
def test_replicas_differ_between_commits_and_the_center_is_evaluated(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(charts, "plot", lambda *args: None)
  config = digits_diloco.get_config()
  loss_scale, (agn, arguments) = config.wrappers
  arguments = {**arguments, "communication_period": 4}
  config.update(
    wrappers=(loss_scale, (agn, arguments)),
    model={"name": "cnn", "features": (), "dense": 8},
    num_train_steps=6,
    log_every_steps=3,
    eval_every_steps=3,
    checkpoint_every_steps=100,
    writer="none",
  )
  config.mesh.replica = 2
  state = train.train_and_evaluate(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert [row["commits"] for row in rows] == [0, 1]

  agn_state = state.wrapper_states["agn"]
  assert int(agn_state.local_step) == 6
  # Two steps after the commit, each replica has its own parameters.
  copies = np.asarray(agn_state.local_params["head"]["kernel"])
  assert copies.shape[0] == 2
  assert not np.array_equal(copies[0], copies[1])
  momentum = agn_state.outer_opt_state[0].trace["head"]["kernel"]
  assert float(np.abs(momentum).max()) > 0

  held_out = data.digits().eval
  logits = state.apply_fn({"params": state.params}, held_out.inputs)
  accuracy = (np.argmax(logits, -1) == held_out.labels).mean()
  assert rows[-1]["eval_accuracy"] == pytest.approx(accuracy)
