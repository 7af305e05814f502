"""CrossShard: what it reduces, what that compiles to, what it refuses."""

import dataclasses
import math
import re
import tempfile
import warnings

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard import divergence

P = jax.sharding.PartitionSpec

GROUPINGS = {
  "all": None,
  "one group": (tuple(range(8)),),
  "one group, reordered": ((5, 2, 7, 0, 1, 6, 3, 4),),
  "halves": ((0, 1, 2, 3), (4, 5, 6, 7)),
  "strided": ((0, 2, 4, 6), (1, 3, 5, 7)),
  "interleaved": ((0, 7), (1, 6), (2, 5), (3, 4)),
  "reordered": ((6, 3), (0, 5), (7, 2), (4, 1)),
  "pairs": ((0, 1), (2, 3), (4, 5), (6, 7)),
  "irregular": ((0, 3, 5, 6), (7, 1, 4, 2)),
  "alone": tuple((i,) for i in range(8)),
}
HALVES = GROUPINGS["strided"]
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)

pytestmark = pytest.mark.filterwarnings("ignore:CrossShard. the replicas")


@pytest.fixture(scope="module")
def strategy():
  return fs.Strategy()


def make_params():
  return {
    "w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3),
    "b": np.full(3, 0.5, np.float32),
  }


def loss_fn(params, x):
  return ((jnp.tanh(x @ params["w"]) + params["b"]) ** 2).mean()


def train_step(state, x):
  return state.minimize(loss_fn, x)


def create(strategy, *wrappers, tx=None, **kwargs):
  return fs.TrainState.create(
    **{
      "apply_fn": None,
      "params": make_params(),
      "tx": optax.sgd(1.0) if tx is None else tx,
      "wrappers": wrappers,
      "strategy": strategy,
      **kwargs,
    }
  )


def on_each(x):
  """What the devices hold of an array that is whole on each."""
  return [np.asarray(shard.data) for shard in x.addressable_shards]


def group_of(replica, groups):
  groups = groups or [range(8)]
  return sorted(next(group for group in groups if replica in group))


def rows_of(replicas):
  """The rows of X that some of eight replicas have."""
  return np.concatenate([X[2 * i : 2 * i + 2] for i in replicas])


def local_gradients():
  """One replica's after the other, by `jax.grad` on its part of the batch."""
  grad = jax.jit(jax.grad(loss_fn))
  return [jax.device_get(grad(make_params(), rows_of([i]))) for i in range(8)]


def trained(params, batches, tx):
  """Plain optax on whole batches."""
  opt_state = tx.init(params)
  for x in batches:
    updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state)
    params = optax.apply_updates(params, updates)
  return params


def assert_close(a, b, rtol=1e-5):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b
  )


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@dataclasses.dataclass(frozen=True)
class Collective:
  kind: str
  nbytes: int
  groups: tuple | None


def collectives(text):
  """The collectives of a compiled program: kind, bytes and groups of each."""
  kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+"
  found = []
  for line in text.splitlines():
    match = re.search(rf" = (.*?) ({kinds})(?:-start)?\(", line)
    if not match:
      continue
    nbytes = 0
    for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1]):
      bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
      shape = [int(d) for d in dims.split(",") if d]
      nbytes += bits // 8 * math.prod(shape)
    groups = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if groups:
      groups = tuple(
        tuple(map(int, group.split(",")))
        for group in re.findall(r"\{([\d,]+)\}", groups[1])
      )
    found.append(Collective(match[2], nbytes, groups))
  return found


GRADIENT_BYTES = 4 * (15 + 3)


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_values_and_traffic(strategy, name, reduction) -> None:
  """By NumPy; one collective, of the gradients' bytes, for any groups."""
  groups = GROUPINGS[name]
  state = create(strategy, fs.CrossShard(reduction, groups))
  step = strategy.jit(train_step)
  x = strategy.shard_batch(X)
  new, _ = step(state, x)
  local = local_gradients()
  combine = {"mean": np.mean, "sum": np.sum}[reduction]
  for key, before in make_params().items():
    for i, held in enumerate(on_each(new.params[key])):
      grads = [local[j][key] for j in group_of(i, groups)]
      wanted = before - combine(grads, axis=0)
      np.testing.assert_allclose(held, wanted, rtol=1e-5, atol=1e-6)
  assert int(new.step) == 1

  (one,) = collectives(step.lower(state, x).compile().as_text())
  assert (one.kind, one.nbytes) == ("all-reduce", GRADIENT_BYTES)
  everyone = (tuple(range(8)),)
  if groups is None or len(groups) == 1:
    assert one.groups in (None, everyone)
  else:
    assert sorted(map(sorted, one.groups)) == sorted(map(sorted, groups))


@pytest.mark.parametrize("groups", [None, HALVES, GROUPINGS["interleaved"]])
def test_mean_over_replicas_is_one_replica_with_the_whole_batch(
  strategy, groups
) -> None:
  """At one learning rate, for an optimizer with momentum; in each group."""
  tx = optax.adam(0.1)
  state = create(strategy, fs.CrossShard("mean", groups), tx=tx)
  batches = [X, X[::-1].copy(), 2 * X]
  for x in batches:
    state, _ = strategy.run(train_step, args=(state, strategy.shard_batch(x)))
  for i in range(8):
    mine = [2 * j + k for j in group_of(i, groups) for k in (0, 1)]
    wanted = trained(make_params(), [x[mine] for x in batches], tx)
    held = {key: on_each(p)[i] for key, p in state.params.items()}
    assert_close(held, wanted, rtol=1e-4)


def test_sum_is_the_mean_with_a_learning_rate_of_n_times(strategy) -> None:
  x = strategy.shard_batch(X)
  of_sum, _ = strategy.run(
    train_step,
    args=(create(strategy, fs.CrossShard("sum"), tx=optax.sgd(0.01)), x),
  )
  of_mean, _ = strategy.run(
    train_step,
    args=(create(strategy, fs.CrossShard("mean"), tx=optax.sgd(0.08)), x),
  )
  assert_close(of_sum.params, of_mean.params)


def test_mean_is_what_no_wrapper_does(strategy) -> None:
  x = strategy.shard_batch(X)
  bare, _ = strategy.run(train_step, args=(create(strategy), x))
  state = create(strategy, fs.CrossShard())
  wrapped, _ = strategy.run(train_step, args=(state, x))
  assert_equal(jax.device_get(bare.params), jax.device_get(wrapped.params))
  assert wrapped.wrapper_states == {"cross_shard": ()}


def test_clipping_before_and_after_the_reduction(strategy) -> None:
  limit = 0.05
  clip = optax.clip_by_global_norm(limit)
  local = local_gradients()

  def clipped(grads):
    return clip.update(grads, clip.init(grads))[0]

  def clip_first(state, x):
    _, grads = state.value_and_grad(loss_fn, x)
    return state.apply_gradients(grads=clipped(grads))

  def mean(trees):
    return jax.tree.map(lambda *g: np.mean(g, axis=0), *trees)

  assert min(optax.tree.norm(g) for g in local) > limit
  x = strategy.shard_batch(X)
  wanted = {
    "reduce, then clip": clipped(mean(local)),
    "clip, then reduce": mean([clipped(g) for g in local]),
  }
  after = create(strategy, fs.CrossShard(), tx=optax.chain(clip, optax.sgd(1)))
  before = create(strategy, fs.CrossShard())
  outside = create(strategy, Clip(limit), fs.CrossShard())
  found = {
    "reduce, then clip": strategy.run(train_step, args=(after, x))[0],
    "clip, then reduce": strategy.run(clip_first, args=(before, x)),
    "a wrapper": strategy.run(train_step, args=(outside, x))[0],
  }
  wanted["a wrapper"] = wanted["clip, then reduce"]
  for name, new in found.items():
    update = jax.tree.map(np.subtract, make_params(), new.params)
    assert_close(update, wanted[name], rtol=1e-4)
  with pytest.raises(AssertionError):  # they differ
    assert_close(wanted["reduce, then clip"], wanted["clip, then reduce"])


@dataclasses.dataclass(frozen=True)
class Clip:
  """Clips gradients by their norm, as a wrapper."""

  limit: float

  def init(self, params, tx):
    return ()

  def working_params(self, state, params):
    return params

  def scale_loss(self, state, loss):
    return loss

  def unscale_gradients(self, state, grads):
    return grads

  def apply(self, state, target, grads, next):
    clip = optax.clip_by_global_norm(self.limit)
    return next(target, clip.update(grads, clip.init(grads))[0]), state

  def partition_specs(self, state):
    return ()


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("groups", [None, HALVES])
def test_beside_loss_scale(strategy, groups, outside) -> None:
  """Overflow on one replica of one group has all skip, in either order."""
  cross = fs.CrossShard("mean", groups)
  scale = fs.LossScale(fs.DynamicLossScale(2.0**4, growth_interval=2))
  wrappers = (scale, cross) if outside else (cross, scale)
  state = create(strategy, *wrappers)
  bare = create(strategy, cross)
  step = strategy.jit(train_step)
  good = strategy.shard_batch(X)
  bad = X.copy()
  bad[11] = np.inf  # of replica 5

  new, _ = step(state, strategy.shard_batch(bad))
  for key, before in make_params().items():
    for held in on_each(new.params[key]):
      np.testing.assert_array_equal(held, before)
  found = [on_each(x) for x in new.wrapper_states["loss_scale"]]
  assert np.array_equal(found, np.repeat([[8.0], [0], [1], [1]], 8, axis=1))
  assert int(new.step) == 0

  new, _ = step(new, good)
  wanted, _ = step(bare, good)
  for key in new.params:
    assert_close(on_each(new.params[key]), on_each(wanted.params[key]))

  found = collectives(step.lower(state, good).compile().as_text())
  sizes = sorted(c.nbytes for c in found)
  # The flag is a collective of its own unless reduced gradients carry it.
  flag = [] if groups is None and not outside else [4]
  assert sizes == [*flag, GRADIENT_BYTES]
  assert {c.kind for c in found} == {"all-reduce"}


def test_run_steps(strategy) -> None:
  groups = GROUPINGS["reordered"]
  wrappers = (fs.CrossShard("mean", groups), fs.LossScale("dynamic"))
  tx = optax.adam(0.1)
  batches = [X, X[::-1].copy(), 2 * X]
  shards = [strategy.shard_batch(x) for x in batches]
  state = create(strategy, *wrappers, tx=tx)
  looped, _ = strategy.run_steps(train_step, state, shards)
  for x in shards:
    state, _ = strategy.run(train_step, args=(state, x))
  for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(state), strict=True):
    np.testing.assert_allclose(on_each(a), on_each(b), rtol=1e-5, atol=1e-6)
  assert int(looped.step) == 3
  assert not np.array_equal(*on_each(looped.params["w"])[:2])


@pytest.mark.parametrize("groups", [None, ((0, 2), (3, 1))])
def test_replicas_of_two_logical_devices(groups) -> None:
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  put = lambda x, *spec: jax.device_put(
    x, jax.NamedSharding(strategy.mesh, P(*spec))
  )
  w = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
  b = np.ones(4, np.float32)
  params = {"w": put(w, None, "model"), "b": put(b)}
  state = create(strategy, fs.CrossShard("sum", groups), params=params)
  step = strategy.jit(train_step)
  x = strategy.shard_batch(X)
  new, _ = step(state, x)
  assert new.params["w"].sharding.spec == P(None, "model")
  for shard in new.params["w"].addressable_shards:
    replica = int(np.argwhere(strategy.mesh.devices == shard.device)[0][0])
    group = next(g for g in groups or [range(4)] if replica in g)
    grads = [
      jax.grad(loss_fn)({"w": w, "b": b}, X[4 * i : 4 * i + 4])["w"]
      for i in group
    ]
    wanted = (w - sum(grads))[shard.index]
    np.testing.assert_allclose(shard.data, wanted, rtol=1e-5, atol=1e-6)

  found = collectives(step.lower(state, x).compile().as_text())
  gradients = [c for c in found if c.nbytes >= 4 * 10]
  (one,) = gradients  # a half of w, and the bias: whole, or a half too
  assert one.kind == "all-reduce"
  assert one.nbytes in (4 * (10 + 4), 4 * (10 + 2))
  if groups:
    assert {frozenset(g) for g in one.groups} == {
      frozenset(2 * i + half for i in g) for g in groups for half in (0, 1)
    }


def test_collections_are_averaged_within_groups(strategy) -> None:
  state = create(
    strategy,
    fs.CrossShard("sum", HALVES),
    batch_stats={"mean": np.zeros(2), "count": np.int32(0)},
  )

  def step(state, x):
    stats = {
      "mean": x[0, :2],
      "count": fs.get_replica_context().replica_id_in_sync_group + 7,
    }
    _, grads = state.value_and_grad(loss_fn, x)
    return state.apply_gradients(grads=grads, batch_stats=stats)

  new = strategy.run(step, args=(state, strategy.shard_batch(X)))
  firsts = X[::2, :2]  # the first row of each replica
  for i, held in enumerate(on_each(new.batch_stats["mean"])):
    wanted = firsts[group_of(i, HALVES)].mean(0)
    np.testing.assert_allclose(held, wanted, rtol=1e-5)
  assert [int(x) for x in on_each(new.batch_stats["count"])] == [7, 8] * 4


def test_leaves_without_a_gradient_and_leaves_to_overwrite(strategy) -> None:
  fp8 = "_overwrite_with_gradient"
  params = {
    "params": {"w": np.ones(2, np.float32), "frozen": np.ones(2, np.float32)},
    fp8: {"scale": np.zeros((), np.float32)},
  }
  state = create(strategy, fs.CrossShard("sum", HALVES), params=params)

  def step(state, x):
    i = fs.get_replica_context().replica_id_in_sync_group
    return state.apply_gradients(
      grads={
        "params": {"w": x[0, :2], "frozen": None},
        fp8: {"scale": i.astype(jnp.float32)},
      }
    )

  new = strategy.run(step, args=(state, strategy.shard_batch(X)))
  for i in range(8):
    wanted = 1 - X[::2, :2][group_of(i, HALVES)].sum(0)
    w = on_each(new.params["params"]["w"])[i]
    np.testing.assert_allclose(w, wanted, rtol=1e-5, atol=1e-6)
    assert on_each(new.params["params"]["frozen"])[i].tolist() == [1, 1]
    assert on_each(new.params[fp8]["scale"])[i] == 6 + i % 2  # the largest


def test_gradients_that_agree_are_not_reduced(strategy) -> None:
  state = create(strategy, fs.CrossShard("sum"))

  def step(state, x):
    _, grads = state.value_and_grad(loss_fn, x)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads, skip_gradients_aggregation=True)

  x = strategy.shard_batch(X)
  new = strategy.run(step, args=(state, x))
  wanted, _ = strategy.run(
    train_step, args=(create(strategy, fs.CrossShard("mean")), x)
  )
  assert_close(new.params, wanted.params)


def test_one_replica() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:1])
  for groups in (None, ((0,),)):
    state = create(strategy, fs.CrossShard("sum", groups))
    new, _ = strategy.run(train_step, args=(state, X))
    assert_close(new.params, trained(make_params(), [X], optax.sgd(1.0)))


def test_no_replica_context_is_one_shard_and_a_warning() -> None:
  state = create(None, fs.CrossShard("sum", HALVES), fs.LossScale(2.0))
  step = jax.jit(train_step)
  with pytest.warns(UserWarning, match="outside of Strategy.run") as record:
    new, _ = step(state, X)
  assert len(record) == 1
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    step(new, X)  # compiled: nothing is said again
  assert_close(new.params, trained(make_params(), [X], optax.sgd(1.0)))


@pytest.mark.parametrize(
  "arguments, message",
  [
    (("max",), "CrossShard: reduction='max' is no reduction; allowed: 'sum', "),
    ((None,), "CrossShard: reduction=None is no reduction"),
    (("mean", ()), r"group_assignment=\(\) must have no empty group, and at"),
    (("mean", ((0, 1), ())), "must have no empty group"),
    (("mean", ((0, 1), (2,))), r"one size; the sizes are \[2, 1\]"),
    (("mean", ((0, 1), (1, 2))), r"; 1 is in \(0, 1\) and in \(1, 2\)"),
    (("mean", ((0, 0), (1, 2))), r"; 0 is twice in \(0, 0\)"),
    (("mean", ((0, -1), (1, 2))), "-1 is no replica: below 0"),
  ],
)
def test_what_can_never_be_is_refused_at_once(arguments, message) -> None:
  with pytest.raises(ValueError, match=message):
    fs.CrossShard(*arguments)


@pytest.mark.parametrize(
  "groups",
  [3, "01", ("01", "23"), (0, 1), ((0, 1.0), (2, 3)), ((True, False),), {0: 1}],
)
def test_groups_of_another_form_are_refused(groups) -> None:
  message = "CrossShard: group_assignment=.* must be a sequence of groups"
  with pytest.raises(TypeError, match=message):
    fs.CrossShard("mean", groups)


@pytest.mark.parametrize(
  "groups, message",
  [
    (((0, 1), (2, 3)), r"the 8 replicas, 0 to 7, .*; \(4, 5, 6, 7\) in no gr"),
    (((0, 1, 2, 3), (4, 5, 6, 8)), r"; \(7\) in no group, \(8\) no replica\."),
    ((tuple(range(9)),), r"; \(8\) no replica\."),
  ],
)
def test_groups_of_other_replicas_are_refused(
  strategy, groups, message
) -> None:
  wrapper = fs.CrossShard("mean", groups)
  with pytest.raises(ValueError, match=message):
    create(strategy, wrapper)
  state = create(None, wrapper, batch_stats={"m": np.zeros(5, np.float32)})
  with pytest.raises(ValueError, match=message):
    strategy.run(train_step, args=(state, strategy.shard_batch(X)))

  def with_collection(state, x):
    return state.apply_gradients(grads=state.params, batch_stats={"m": x[0]})

  with pytest.raises(ValueError, match=message):
    strategy.run(with_collection, args=(state, strategy.shard_batch(X)))


def test_groups_are_plain_tuples() -> None:
  wanted = fs.CrossShard("mean", HALVES)
  lists = [list(group) for group in HALVES]
  for groups in (lists, np.array(lists), [np.array(g) for g in lists]):
    wrapper = fs.CrossShard("mean", groups)
    assert wrapper == wanted and hash(wrapper) == hash(wanted)
    assert {type(i) for g in wrapper.group_assignment for i in g} == {int}


def test_configs() -> None:
  stack = (fs.CrossShard("sum", HALVES), fs.LossScale("dynamic"))
  config = fs.wrappers.to_config(stack)
  arguments = {"reduction": "sum", "group_assignment": HALVES}
  assert config[0] == ("cross_shard", arguments)
  assert fs.wrappers.from_config(config) == stack
  lists = [list(group) for group in HALVES]
  held = ml_collections.ConfigDict(
    {"wrappers": [("cross_shard", {**arguments, "group_assignment": lists})]}
  )
  assert fs.wrappers.from_config(held.wrappers) == stack[:1]
  assert fs.wrappers.from_config(["cross_shard"]) == (fs.CrossShard(),)
  with pytest.raises(ValueError, match=r"wrappers\[0\] \('cross_shard'\): Cro"):
    fs.wrappers.from_config([("cross_shard", {"reduction": "max"})])


def test_groups_that_differ_are_told(strategy, capsys) -> None:
  told = r"reduced in groups \(0, 2, 4, 6\), \(1, 3, 5, 7\), .* replica 0, \(0"
  with pytest.warns(UserWarning, match=told):
    state = create(strategy, fs.CrossShard("mean", HALVES))
  with pytest.warns(UserWarning, match=told):
    strategy.run(train_step, args=(state, strategy.shard_batch(2 * X)))
  description = strategy.describe(state)
  assert re.search(told, capsys.readouterr().out.splitlines()[-1])
  assert re.search(told, description._repr_html_())

  many = fs.CrossShard("mean", [[i] for i in range(16)])
  assert "reduced in 16 groups of 1" in many.divergence()

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for groups in (None, GROUPINGS["one group, reordered"]):
      state = create(strategy, fs.CrossShard("mean", groups))
      strategy.run(train_step, args=(state, strategy.shard_batch(X)))
      assert strategy.describe(state).note is None


@pytest.fixture(scope="module")
def diverged():
  """A state, on two logical devices a replica, of groups that differ."""
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  split = jax.NamedSharding(strategy.mesh, P(None, "model"))
  params = {
    "w": jax.device_put(np.ones((5, 64), np.float32), split),
    "b": np.ones(64, np.float32),
  }
  state = create(
    strategy,
    fs.CrossShard("mean", ((1, 3), (0, 2))),
    params=params,
    tx=optax.sgd(1.0, momentum=0.9),
    rngs={"key": jax.random.key(3), "flag": np.array(True)},
  )
  state, _ = strategy.run(train_step, args=(state, strategy.shard_batch(X)))
  first = set(strategy.mesh.devices[0].flat)
  wanted = [
    {
      str(s.index): np.asarray(s.data)
      for s in data_of(x).addressable_shards
      if s.device in first
    }
    for x in jax.tree.leaves(carried(state))
  ]
  return state, wanted


def carried(state):
  return state.params, state.opt_state, state.rngs


def data_of(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x


def assert_everywhere(state, wanted):
  """Every device has what replica 0 had."""
  for x, parts in zip(jax.tree.leaves(carried(state)), wanted, strict=True):
    shards = data_of(x).addressable_shards
    assert len(shards) == 8
    for shard in shards:
      np.testing.assert_array_equal(shard.data, parts[str(shard.index)])


def test_the_state_of_replica_0_goes_to_all(diverged) -> None:
  state, wanted = diverged
  for x in (state.params["b"], *jax.tree.leaves(state.opt_state)):
    assert len({held.tobytes() for held in on_each(x)}) > 1
  new = divergence.of_first_replica(state)
  assert new.params["w"].sharding == state.params["w"].sharding
  assert_everywhere(new, wanted)


def test_a_checkpoint_has_the_group_of_replica_0(diverged, caplog) -> None:
  state, wanted = diverged
  directory = tempfile.mkdtemp()
  with caplog.at_level("INFO", "flaxshard"):
    with fs.Checkpointer(directory) as checkpointer:
      checkpointer.save(1, state)
      restored = checkpointer.restore(state)
  assert "step 1: CrossShard: " in caplog.text
  assert "the group of replica 0, (0, 2)." in caplog.text
  assert_everywhere(restored, wanted)
  plain = ocp.StandardCheckpointer().restore(f"{directory}/1/default")
  wanted = on_each(state.params["b"])[0]
  np.testing.assert_array_equal(plain["params"]["b"], wanted)
