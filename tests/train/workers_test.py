"""A run of two workers that `--local_processes` starts."""

import jax
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard import train

pytestmark = pytest.mark.slow

# With dropout: the random streams of workers are those of replicas.
_CONFIG = """
import tiny

def get_config():
  agn = dict(communication_period=4, commit="mean", transport="store")
  return tiny.config(
    model={"name": "cnn", "features": (), "dense": 8, "dropout": 0.5},
    wrappers=(("agn", agn),), mesh={"replica": -1, "per_replica": True},
    precision="float32", num_train_steps=14, eval_every_steps=14,
    checkpoint_every_steps=6)
"""


def test_two_workers_end_like_two_replicas(programs, tmp_path):
  (tmp_path / "my_config.py").write_text(_CONFIG)
  arguments = ["--config=my_config.py", "--workdir=run", "--local_processes=2"]
  output = programs.start(tmp_path, *arguments).end()
  # Worker 0 alone prints rows and the result.
  assert output.count("step 14: eval_loss=") == 2
  assert output.count("[0]") > output.count("done: step 14: eval_loss=") == 1
  assert "is gone" not in output and "store only" not in output
  loaded = [fs.load(tmp_path / "run"), fs.load(tmp_path / "run/workers/1")]
  assert [x.step for x in loaded] == [14, 14]
  states = [x.state for x in loaded]
  jax.tree.map(np.testing.assert_array_equal, *(x.params for x in states))
  # Two local steps after the third commit, workers have their own parameters.
  agn = [x.wrapper_states["agn"] for x in states]
  assert [int(x.commits) for x in agn] == [3, 3]
  local = [x.local_params["head"]["kernel"] for x in agn]
  assert not np.array_equal(*local)

  config = fs.config.read(str(tmp_path / "my_config.py"))
  config.wrappers = (("agn", {"communication_period": 4, "commit": "mean"}),)
  config.mesh.replica = 2
  compiled = train.train_and_evaluate(config, str(tmp_path / "compiled"))
  wanted = compiled.wrapper_states["agn"].local_params["head"]["kernel"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    (states[0].params, local),
    (compiled.params, [*wanted]),
  )
  rows, wanted = tiny.rows(tmp_path / "run"), tiny.rows(tmp_path / "compiled")
  assert rows[-1]["eval_loss"] == pytest.approx(wanted[-1]["eval_loss"])
  assert [row["commits"] for row in rows] == [r["commits"] for r in wanted]
  workers = [row.get("commit_workers") for row in rows]
  assert workers == [None, 2, None, 2, None, 2, None]
