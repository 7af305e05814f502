"""Bytes of commits from host to host, in plans."""

import jax
import jax.numpy as jnp
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard.analysis import config_plan
from flaxshard.analysis import host_commit_bytes
from flaxshard.train import config as config_lib
from flaxshard.train import ranks


def create(**arguments):
  return fs.TrainState.create(
    apply_fn=None,
    params={"a": jnp.zeros((16, 32)), "b": jnp.zeros((1024,))},
    tx=optax.adam(0.1),
    wrappers=[fs.AGN(4, "mean", transport="host", **arguments)],
  )


@pytest.mark.parametrize(
  ("arguments", "counts"),
  [
    ({}, [4 * 1536]),
    ({"commit_dtype": "bfloat16"}, [2 * 1536]),
    # A scale of four bytes for each 256 numbers.
    ({"commit_dtype": "int8"}, [1536 + 4 * 6]),
    ({"commit_dtype": "int4"}, [768 + 4 * 6]),
    ({"fragments": 2}, [4 * 512, 4 * 1024]),
    ({"fragments": 2, "fragment_offset": 0}, [4 * 1536]),
  ],
)
def test_bytes_of_the_commits_of_a_period(arguments, counts):
  state = create(**arguments)
  # And one number for each leaf: whether it had a gradient.
  counts = [count + 4 * 2 for count in counts]
  assert host_commit_bytes.count(state) == counts
  abstract = jax.eval_shape(lambda: create(**arguments))
  assert host_commit_bytes.count(abstract) == counts


def test_the_plan_of_a_worker_has_its_commits():
  agn = {"communication_period": 4, "transport": "host", "commit": "mean"}
  config = config_lib.check(
    tiny.config(
      precision="float32",
      wrappers=(("agn", agn),),
      mesh={"replica": 8, "per_replica": True},
    )
  )
  config = ranks.config_of_worker(config, 2)
  plan = config_plan.plan_config(config, "v5e:2x2")
  assert plan.mesh == {"replica": 4}
  assert plan.batch_size == 8
  [note] = [n for n in plan.notes if "host to host" in n]
  assert "2.4 KiB per 4 local steps" in note
