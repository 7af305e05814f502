"""What a step with AGN compiles to: where collectives are, of what size."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import compilations

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
SMALL = 64  # bytes: flags and counters
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
OPS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def loss_fn(params, x):
  for layer in params.values():
    x = jnp.tanh(x @ layer["w"] + layer["b"])
  return (x**2).mean()


def step(state, x):
  return state.minimize(loss_fn, x)


def compiled(strategy, wrappers, tx=ADAM, params=PARAMS):
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, strategy=strategy
  )
  x = strategy.shard_batch(np.ones((16, SIZE), np.float32))
  run = strategy.jit(step, donate_argnums=0)
  return run, state, x


def collectives(text):
  """Returns `(computation, kind, bytes that come out)` of all collectives."""
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
  """Returns the computations that are branches of conditionals, and theirs."""
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


@pytest.fixture(scope="module")
def eight():
  return fs.Strategy()


@pytest.mark.parametrize("commit", ["mean", "sum"])
def test_one_reduction_of_the_parameters_inside_the_conditional(eight, commit):
  run, state, x = compiled(eight, [fs.AGN(10, commit=commit)])
  text = run.lower(state, x).compile().as_text()
  found = collectives(text)
  assert len(found) == 1
  assert found[0][1:] == ("all-reduce", BYTES)
  assert found[0][0] in branches(text)


def test_commits_in_turn_exchange_the_parameters_twice(eight):
  run, state, x = compiled(eight, [fs.AGN(10)])
  text = run.lower(state, x).compile().as_text()
  found = collectives(text)
  assert {name for name, _, _ in found} <= branches(text)
  kinds = by_kind(found)
  assert [kind for _, kind, _ in found].count("all-to-all") == 2
  # Every leaf divides by eight. All replicas need the center and its slots.
  assert kinds == {"all-to-all": 2 * BYTES, "all-gather": 3 * BYTES}


def test_commits_in_turn_of_other_optimizers(eight):
  run, state, x = compiled(eight, [fs.AGN(10)], tx=CLIPPED)
  text = run.lower(state, x).compile().as_text()
  found = collectives(text)
  assert {name for name, _, _ in found} <= branches(text)
  assert by_kind(found) == {"all-reduce": BYTES}  # in a loop: eight times


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_a_scalar_more_with_loss_scaling_around(eight, commit):
  run, state, x = compiled(
    eight, [fs.LossScale("dynamic"), fs.AGN(10, commit=commit)]
  )
  text = run.lower(state, x).compile().as_text()
  outside = [
    (kind, size)
    for name, kind, size in collectives(text)
    if name not in branches(text)
  ]
  assert outside == [("all-reduce", 4)]


def test_a_device_holds_its_own_copy_only(eight):
  _, state, _ = compiled(eight, [fs.AGN(10)])
  own = state.wrapper_states["agn"]
  for tree in (own.local_params, own.local_opt_state, own.grad_accum):
    for leaf in jax.tree.leaves(tree):
      shards = leaf.addressable_shards
      assert leaf.shape[0] == len(shards) == 8
      assert {shard.data.shape[0] for shard in shards} == {1}
  for leaf in jax.tree.leaves((state.params, state.opt_state)):
    assert leaf.sharding.is_fully_replicated


def test_memory(eight):
  plain, state, x = compiled(eight, [])
  bare = plain.lower(state, x).compile().memory_analysis()
  for commit, temporary in (("mean", 0.5), ("sequential", 2.5)):
    run, state, x = compiled(eight, [fs.AGN(10, commit=commit)])
    stats = run.lower(state, x).compile().memory_analysis()
    # Center, two slots, local copy, its two slots, accumulator: seven.
    assert stats.argument_size_in_bytes < 7.1 * BYTES
    assert stats.alias_size_in_bytes > 7 * BYTES
    more = stats.temp_size_in_bytes - bare.temp_size_in_bytes
    assert more < temporary * BYTES


def test_it_compiles_once(eight):
  run, state, x = compiled(eight, [fs.LossScale("dynamic"), fs.AGN(6)])
  state, _ = run(state, x)
  with compilations(0):
    for _ in range(7):
      state, _ = run(state, x)
  assert int(state.wrapper_states["agn"].commits) == 1


SPLIT = {"w": [P(None, "model"), P("model", None)], "b": [P("model"), P()]}


def split(strategy):
  return {
    name: {
      key: jax.device_put(
        x, jax.sharding.NamedSharding(strategy.mesh, SPLIT[key][i % 2])
      )
      for key, x in layer.items()
    }
    for i, (name, layer) in enumerate(PARAMS.items())
  }


@pytest.mark.parametrize("commit", ["mean", "sequential"])
def test_replicas_that_are_split_exchange_their_parts(commit):
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  run, state, x = compiled(
    strategy, [fs.AGN(3, commit=commit)], params=split(strategy)
  )
  own = state.wrapper_states["agn"]
  assert own.local_params["layer1"]["w"].sharding.spec == P("replica", "model")
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
  # The values are those of replicas of one device.
  whole = fs.Strategy(devices=jax.devices()[:4])
  run2, state2, x2 = compiled(whole, [fs.AGN(3, commit=commit)])
  for _ in range(4):
    state, _ = run(state, x)
    state2, _ = run2(state2, x2)
  own, own2 = state.wrapper_states["agn"], state2.wrapper_states["agn"]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    (state.params, own.local_params, own.grad_accum),
    (state2.params, own2.local_params, own2.grad_accum),
  )
  assert own.local_params["layer1"]["w"].sharding.spec == P("replica", "model")
