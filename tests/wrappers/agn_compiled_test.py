"""The compiled AGN step: place and size of its collectives, its memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec
SIZE = 64
PARAMS = {
  f"layer{i}": {
    "w": np.eye(SIZE, dtype=np.float32),
    "b": np.zeros(SIZE, np.float32),
  }
  for i in range(3)
}
BYTES = 4 * sum(p.size for p in jax.tree.leaves(PARAMS))
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
OPS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def loss_fn(params, x):
  for layer in params.values():
    x = jnp.tanh(x @ layer["w"] + layer["b"])
  return (x**2).mean()


def step(state, x):
  return state.minimize(loss_fn, x)


@functools.cache
def all_devices():
  return fs.Strategy()


def create(strategy, wrappers, tx=ADAM, params=PARAMS):
  """Returns the step, a state, and a batch."""
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, strategy=strategy
  )
  x = strategy.shard_batch(np.ones((16, SIZE), np.float32))
  return strategy.jit(step, donate_argnums=0), state, x


@functools.cache
def compile_step(*wrappers, tx=ADAM):
  run, state, x = create(all_devices(), wrappers, tx)
  return run.lower(state, x).compile()


def collectives(text):
  """Returns `(computation, kind, bytes of the result)` of all collectives."""
  found, computation = [], None
  for line in text.splitlines():
    header = re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line)
    if header:
      computation = "entry" if header[1] else header[2]
    match = re.search(rf"= (.*?) ({OPS})(-start)?\(", line)
    if match:
      sizes = [
        np.dtype({"f32": "f4", "s32": "i4"}[dtype]).itemsize
        * int(np.prod([int(n) for n in shape.split(",") if n]))
        for dtype, shape in re.findall(r"(f32|s32)\[([\d,]*)\]", match[1])
      ]
      found.append((computation, match[2], sum(sizes)))
  return found


def by_kind(found):
  kinds = {}
  for _, kind, size in found:
    kinds[kind] = kinds.get(kind, 0) + size
  return kinds


def branches(text):
  """Returns the computations of conditionals' branches, and those they call."""
  names = set()
  for match in re.findall(
    r"(?:true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}",
    text,
  ):
    names |= {n.strip().lstrip("%") for n in ",".join(match).split(",") if n}
  calls = {}
  computation = None
  for line in text.splitlines():
    header = re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line)
    computation = header[2] if header else computation
    for called in re.findall(
      r"(?:calls|body|condition|to_apply)=%?(\S+?)[,} ]", line + " "
    ):
      calls.setdefault(computation, set()).add(called)
  while True:
    more = set().union(*(calls.get(n, set()) for n in names)) | names
    if more == names:
      return names
    names = more


def assert_all_in_branches(found, text):
  assert {name for name, _, _ in found} <= branches(text)


def test_a_combined_commit_is_one_reduction_inside_the_conditional():
  text = compile_step(fs.AGN(10, commit="mean")).as_text()
  found = collectives(text)
  assert [c[1:] for c in found] == [("all-reduce", BYTES)]
  assert_all_in_branches(found, text)


def test_a_sequential_commit_exchanges_the_parameters_twice():
  text = compile_step(fs.AGN(10)).as_text()
  found = collectives(text)
  assert_all_in_branches(found, text)
  # Eight divides every leaf. The all-gather is of the center and its slots.
  assert by_kind(found) == {"all-to-all": 2 * BYTES, "all-gather": 3 * BYTES}


@pytest.mark.slow
def test_a_sequential_commit_that_mixes_elements_reduces_in_a_loop():
  text = compile_step(fs.AGN(10), tx=CLIPPED).as_text()
  found = collectives(text)
  assert_all_in_branches(found, text)
  assert by_kind(found) == {"all-reduce": BYTES}  # the loop runs eight times


@pytest.mark.slow
def test_loss_scaling_adds_the_reduction_of_one_scalar():
  text = compile_step(fs.LossScale("dynamic"), fs.AGN(10, "mean")).as_text()
  outside = [
    (kind, size)
    for name, kind, size in collectives(text)
    if name not in branches(text)
  ]
  assert outside == [("all-reduce", 4)]


def test_memory_of_the_state_and_of_a_commit():
  plain = compile_step().memory_analysis()
  for commit, temporary in (("mean", 0.5), ("sequential", 2.5)):
    stats = compile_step(fs.AGN(10, commit=commit)).memory_analysis()
    # Center, two slots, local parameters, two slots, accumulator: seven.
    assert stats.argument_size_in_bytes < 7.1 * BYTES
    assert stats.alias_size_in_bytes > 7 * BYTES
    more = stats.temp_size_in_bytes - plain.temp_size_in_bytes
    assert more < temporary * BYTES


SPLIT = {"w": [P(None, "model"), P("model", None)], "b": [P("model"), P()]}


def split_params(strategy):
  return {
    name: {
      key: jax.device_put(
        x, jax.sharding.NamedSharding(strategy.mesh, SPLIT[key][i % 2])
      )
      for key, x in layer.items()
    }
    for i, (name, layer) in enumerate(PARAMS.items())
  }


@pytest.mark.parametrize(
  "commit", ["mean", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_logical_devices_exchange_their_shards(commit):
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  run, state, x = create(
    strategy, [fs.AGN(3, commit=commit)], params=split_params(strategy)
  )
  agn = state.wrapper_states["agn"]
  assert agn.local_params["layer1"]["w"].sharding.spec == P("replica", "model")
  text = run.lower(state, x).compile().as_text()
  per_device = sum(
    p.addressable_shards[0].data.nbytes for p in jax.tree.leaves(state.params)
  )
  over_replicas = [
    (kind, size)
    for line, (_, kind, size) in zip(
      re.findall(rf".* = .* (?:{OPS})(?:-start)?\(.*", text),
      collectives(text),
      strict=True,
    )
    if "{{0,2,4,6},{1,3,5,7}}" in line or "{'replica'}" in line
  ]
  total = sum(size for _, size in over_replicas)
  assert total == per_device * (1 if commit == "mean" else 5)
  if commit == "mean":
    return
  # The values are those of replicas with one device.
  whole = fs.Strategy(devices=jax.devices()[:4])
  run2, state2, x2 = create(whole, [fs.AGN(3, commit=commit)])
  for _ in range(4):
    state, _ = run(state, x)
    state2, _ = run2(state2, x2)
  agn, agn2 = state.wrapper_states["agn"], state2.wrapper_states["agn"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    (state.params, agn.local_params, agn.grad_accum),
    (state2.params, agn2.local_params, agn2.grad_accum),
  )
  assert agn.local_params["layer1"]["w"].sharding.spec == P("replica", "model")
