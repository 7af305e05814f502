"""Restoring checkpoints with Flax's DynamicScale or optax's wrappers."""

from collections.abc import Mapping
import dataclasses
import functools
import logging
from typing import Any, ClassVar

import flax
from flax.training import checkpoints
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.checkpoint import migrate

STEP = 7
ADAM = optax.adam(0.125)
PARAMS = {
  "w": np.arange(8, dtype=np.float32).reshape(2, 4),
  "half": np.ones(3, np.float16),
}
SCALED = fs.LossScale("dynamic")


class FlaxState(flax_train_state.TrainState):
  """As in Flax's ImageNet and WMT examples."""

  dynamic_scale: Any = None


def flax_state(tx=ADAM, dynamic_scale=None, params=PARAMS, **fields):
  """Returns a state after three steps, in which every leaf has changed."""
  params = jax.tree.map(jnp.asarray, params)
  state = FlaxState.create(
    apply_fn=None, params=params, tx=tx, dynamic_scale=dynamic_scale
  )
  for _ in range(3):
    state = _train_step(state)
  return state.replace(**fields)


@jax.jit
def _train_step(state):
  return state.apply_gradients(grads=state.params)


def ours(tx=ADAM, wrappers=(SCALED,), **kwargs):
  params = jax.tree.map(lambda x: jnp.zeros_like(jnp.asarray(x)), PARAMS)
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, **kwargs
  )


def scaled_steps(state):
  """Two finite steps of Flax's DynamicScale, and one that overflows first."""

  @jax.jit
  def step(state, x):
    grad_fn = state.dynamic_scale.value_and_grad(lambda p: (p["w"] * x).sum())
    scale, finite, _, grads = grad_fn(state.params)
    # DynamicScale unscales in float32; the float16 slots must stay float16.
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    new = state.apply_gradients(grads=grads)
    keep = lambda a, b: jnp.where(finite, a, b)
    return new.replace(
      params=jax.tree.map(keep, new.params, state.params),
      opt_state=jax.tree.map(keep, new.opt_state, state.opt_state),
      dynamic_scale=scale,
    )

  for x in (np.inf, 1.0, 1.0):
    state = step(state, np.float32(x))
  return state


def save_v0(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=ocp.args.StandardSave(state))


def save_flax(path, state):
  checkpoints.save_checkpoint(str(path), jax.device_get(state), STEP)


def save_msgpack(path, state):
  was = flax.config.flax_use_orbax_checkpointing
  flax.config.update("flax_use_orbax_checkpointing", False)
  try:
    save_flax(path, state)
  finally:
    flax.config.update("flax_use_orbax_checkpointing", was)
  assert (path / f"checkpoint_{STEP}").is_file()


def assert_same(given, wanted):
  given, wanted = jax.tree.leaves(given), jax.tree.leaves(wanted)
  for x, y in zip(given, wanted, strict=True):
    assert isinstance(x, jax.Array)
    assert x.dtype == jnp.asarray(y).dtype and not x.weak_type
    np.testing.assert_array_equal(x, y)


@pytest.fixture
def logged_notes(caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  return lambda: [
    r.getMessage().split(": ", 1)[-1]
    for r in caplog.records
    if r.name.startswith("flaxshard") and "no digests" not in r.getMessage()
  ]


# A field `dynamic_scale`.


@pytest.mark.parametrize("save", [save_v0, save_flax, save_msgpack])
def test_dynamic_scale_becomes_loss_scale(save, tmp_path, logged_notes):
  plain = scaled_steps(
    flax_state(dynamic_scale=dynamic_scale_lib.DynamicScale())
  )
  assert float(plain.dynamic_scale.scale) == 2.0**15
  assert int(plain.dynamic_scale.fin_steps) == 2
  save(tmp_path, plain)
  restored = fs.checkpoint.restore(tmp_path, ours())
  for field in ("step", "params", "opt_state"):
    assert_same(getattr(restored, field), getattr(plain, field))
  scale = restored.wrapper_states["loss_scale"]
  assert_same(
    scale, type(scale)(np.float32(2.0**15), *map(np.int32, (2, 0, 0)))
  )
  assert logged_notes() == [
    "its field 'dynamic_scale' becomes the state of wrapper 'loss_scale'"
  ]
  # Training continues from there.
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  new = step(restored)
  assert int(new.wrapper_states["loss_scale"].good_steps) == 3


@pytest.mark.parametrize("save", [save_v0, save_msgpack])
def test_unused_dynamic_scale_becomes_loss_scale(save, tmp_path):
  # Its counter and scale are Python numbers then.
  scale = dynamic_scale_lib.DynamicScale(scale=1024.0)
  save(tmp_path, flax_state(dynamic_scale=scale))
  restored = fs.checkpoint.restore(tmp_path, ours())
  scale = restored.wrapper_states["loss_scale"]
  assert_same(scale, type(scale)(np.float32(1024), *map(np.int32, (0, 0, 0))))


@pytest.mark.parametrize("wrappers", [(), (fs.LossScale("auto"),)])
def test_dynamic_scale_is_left_without_loss_scale(
  wrappers, tmp_path, logged_notes
):
  scale = dynamic_scale_lib.DynamicScale()
  plain = flax_state(dynamic_scale=scale, params={"w": PARAMS["w"]})
  save_v0(tmp_path, plain)
  state = fs.TrainState.create(
    apply_fn=None, params={"w": jnp.zeros((2, 4))}, tx=ADAM, wrappers=wrappers
  )
  # "auto" finds nothing to scale here, so it has no state.
  assert not jax.tree.leaves(state.wrapper_states)
  restored = fs.checkpoint.restore(tmp_path, state)
  assert_same(restored.params["w"], plain.params["w"])
  assert logged_notes() == ["it has a field 'dynamic_scale': left alone"]


def test_loss_scale_starts_fresh_without_dynamic_scale(tmp_path, logged_notes):
  save_v0(tmp_path, flax_state())  # the field is None: float32, say
  restored = fs.checkpoint.restore(tmp_path, ours())
  assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
  assert logged_notes() == [
    "it has no state of wrapper 'loss_scale': that starts fresh"
  ]


def test_state_with_a_dynamic_scale_field_restores_it(tmp_path, logged_notes):
  scale = dynamic_scale_lib.DynamicScale(
    fin_steps=jnp.int32(5), scale=jnp.float32(8.0)
  )
  save_v0(tmp_path, flax_state(dynamic_scale=scale))
  fresh = dynamic_scale_lib.DynamicScale(
    fin_steps=jnp.int32(0), scale=jnp.float32(1.0)
  )
  state = ours(wrappers=(), dynamic_scale=fresh)
  restored = fs.checkpoint.restore(tmp_path, state)
  assert_same(restored.dynamic_scale, scale)
  assert logged_notes() == []


def test_unknown_dynamic_scale_raises(tmp_path):
  save_v0(tmp_path, flax_state(dynamic_scale={"factor": jnp.float32(2.0)}))
  with pytest.raises(
    ValueError, match=r"dynamic_scale/factor: float32\[\], where nothing is exp"
  ):
    fs.checkpoint.restore(tmp_path, ours())


class CountingState(flax_train_state.TrainState):
  """A plain train state with a field that a wrapper knows."""

  skips: Any


@dataclasses.dataclass(frozen=True)
class Skips(fs.wrappers.Base):
  """A custom wrapper that migrates one leaf of its state."""

  foreign_paths: ClassVar[Mapping[str, str]] = {"skips/count": "total"}

  def init(self, params, tx):
    return {"total": jnp.int32(0), "recent": jnp.int32(1)}


def test_custom_wrapper_migrates_its_foreign_paths(tmp_path):
  plain = CountingState.create(
    apply_fn=None, params=PARAMS, tx=ADAM, skips={"count": jnp.int32(5)}
  )
  save_v0(tmp_path, plain)
  state = ours(wrappers=(Skips(),))
  state = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  restored = fs.checkpoint.restore(tmp_path, state).wrapper_states["skips"]
  assert {k: int(x) for k, x in restored.items()} == {"total": 5, "recent": 1}
  # No other wrapper knows the field.
  with pytest.raises(ValueError, match="skips/count: int32"):
    fs.checkpoint.restore(tmp_path, ours())


# optax's wrappers around the whole optimizer.


def finite(tx):
  return optax.apply_if_finite(tx, 3)


def multi(tx):
  return optax.MultiSteps(tx, 2)


def skipping(tx):
  return optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite)


AROUND = {
  "bare": lambda tx: tx,
  "finite": finite,
  "multi": multi,
  "skipping": skipping,
  "multi_in_finite": lambda tx: finite(multi(tx)),
  "finite_in_multi": lambda tx: multi(finite(tx)),
}
NAMES = {"finite": "optax.apply_if_finite", "multi": "optax.MultiSteps"}


def kinds(name):
  return {
    NAMES[part.replace("skipping", "multi")]
    for part in name.split("_in_")
    if part != "bare"
  }


def layers(opt_state):
  """Returns the states around an optimizer by kind, and the optimizer's."""
  found = {}
  while True:
    if hasattr(opt_state, "total_notfinite"):
      found["optax.apply_if_finite"] = opt_state._replace(inner_state=())
      opt_state = opt_state.inner_state
    elif hasattr(opt_state, "acc_grads"):
      found["optax.MultiSteps"] = opt_state._replace(inner_opt_state=())
      opt_state = opt_state.inner_opt_state
    else:
      return found, opt_state


@functools.cache
def trained(source):
  return flax_state(AROUND[source](ADAM))


@pytest.mark.parametrize(
  ("source", "target"),
  [
    ("bare", "finite_in_multi"),
    ("finite", "multi"),
    ("finite_in_multi", "multi_in_finite"),
    ("multi", "multi_in_finite"),
    ("multi_in_finite", "bare"),
  ],
)
def test_optimizer_layers_are_put_on_and_taken_off(
  source, target, tmp_path, logged_notes
):
  plain = trained(source)
  save_v0(tmp_path, plain)
  state = ours(AROUND[target](ADAM))
  restored = fs.checkpoint.restore(tmp_path, state)
  assert_same(restored.params, plain.params)
  has, core = layers(plain.opt_state)
  got, got_core = layers(restored.opt_state)
  fresh, _ = layers(state.opt_state)
  assert_same(got_core, core)
  assert list(got) == list(fresh)
  for kind, layer in got.items():
    assert_same(layer, has.get(kind, fresh[kind]))
  notes = [m for m in logged_notes() if "optax" in m]
  assert len(notes) == len(kinds(source) ^ kinds(target))
  for kind in kinds(source) - kinds(target):
    more = " and accumulated gradients" if "Multi" in kind else ""
    note = f"{kind} around its optimizer is taken off, with its counts{more}"
    assert note in notes
  for kind in kinds(target) - kinds(source):
    assert f"it has no state of {kind}: that starts fresh" in notes
  if source == "bare":  # the restored state can be trained
    jax.block_until_ready(restored.apply_gradients(grads=restored.params))


@pytest.mark.parametrize(
  ("source", "save"),
  [("skipping", save_flax), ("finite", save_msgpack)],
)
def test_optimizer_layers_in_flax_files_are_taken_off(source, save, tmp_path):
  tx = optax.sgd(0.1)  # which has no state
  plain = flax_state(AROUND[source](tx), dynamic_scale_lib.DynamicScale())
  save(tmp_path, plain)
  restored = fs.checkpoint.restore(tmp_path, ours(tx))
  assert_same(restored.params, plain.params)
  assert restored.opt_state == tx.init(PARAMS)
  assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**16
  tx = optax.sgd(0.1, momentum=0.9)
  with pytest.raises(ValueError, match=r"opt_state/0/trace/half: missing"):
    fs.checkpoint.restore(tmp_path, ours(tx))


def test_multi_steps_with_other_fields_raises(tmp_path):
  # No state can be made up for it.
  save_v0(tmp_path, flax_state(multi(ADAM)))
  with pytest.raises(ValueError, match=r"skip_state/num_not_finite: missing, "):
    fs.checkpoint.restore(tmp_path, ours(skipping(ADAM)))


def test_fresh_leaves_can_be_donated(tmp_path):
  save_v0(tmp_path, trained("bare"))
  state = ours(multi(ADAM))
  restored = fs.checkpoint.restore(tmp_path, state)
  overwrite = jax.jit(
    lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
  )
  jax.block_until_ready(overwrite(restored.opt_state))
  assert_same(state.opt_state, multi(ADAM).init(state.params))


# Layouts that are not known.


@pytest.mark.parametrize(
  ("tx", "difference"),
  [
    (
      optax.chain(optax.identity(), ADAM),
      r"opt_state/0/count: missing, where int32\[\] is expected",
    ),
    (
      optax.adam(0.1, mu_dtype=jnp.bfloat16),
      r"opt_state/0/mu/half: dtype bfloat16, where float16 is expected",
    ),
  ],
)
def test_unknown_optimizer_raises(tx, difference, tmp_path):
  save_v0(tmp_path, flax_state(tx))
  with pytest.raises(ValueError, match=difference) as e:
    fs.checkpoint.restore(tmp_path, ours())
  assert str(tmp_path) in str(e.value)


def test_invalid_flax_file_raises(tmp_path):
  file = tmp_path / "checkpoint_3"
  file.write_bytes(b"\xc1 no msgpack")
  with pytest.raises(ValueError, match="checkpoint_3 is no checkpoint of Flax"):
    fs.checkpoint.restore(file, ours())
  file.write_bytes(flax.serialization.msgpack_serialize({"params": "text"}))
  with pytest.raises(ValueError, match="params must be an array, got 'text'"):
    fs.checkpoint.restore(tmp_path, ours())


# Files and meshes.


def write_flax(directory, step):
  (directory / f"checkpoint_{step}").write_bytes(
    flax.serialization.to_bytes(flax_state(step=step))
  )


def test_restores_the_given_flax_file(tmp_path):
  for step in (2, 10):
    write_flax(tmp_path, step)
  for given, step, wanted in (
    (tmp_path, None, 10),
    (tmp_path, 2, 2),
    (tmp_path / "checkpoint_2", None, 2),
    (str(tmp_path / "checkpoint_2"), None, 2),
  ):
    assert int(fs.checkpoint.restore(given, ours(), step).step) == wanted
  # Of two with the same number, that of a manager.
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "2", flax_state(step=22))
  assert int(fs.checkpoint.restore(tmp_path, ours(), 2).step) == 22


def test_checkpointer_continues_from_flax_files(tmp_path, caplog):
  for step in (2, 10, 11):
    write_flax(tmp_path, step)
  cut = tmp_path / "checkpoint_11"
  cut.write_bytes(cut.read_bytes()[:40])
  with fs.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    assert checkpointer.all_steps() == [2, 10, 11]
    state = checkpointer.restore(ours())
    assert int(state.step) == checkpointer.restored_step == 10
    assert f"step 11 is damaged, passed over: {cut}" in caplog.text
    assert int(checkpointer.restore(ours(), 2).step) == 2
    with pytest.raises(ValueError, match=r"step=3 .* which has step 10"):
      checkpointer.save(3, state)
    checkpointer.save(10, state)  # is there
    checkpointer.save(12, state.replace(step=state.step + 2))
    checkpointer.save(13, state.replace(step=state.step + 3))
    assert int(checkpointer.restore(ours()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
    # Of two with the same number, that of a manager.
    write_flax(tmp_path, 99)
    (tmp_path / "checkpoint_99").rename(tmp_path / "checkpoint_13")
    assert int(checkpointer.restore(ours()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
  # No file of Flax is renamed or deleted.
  names = sorted(path.name for path in tmp_path.iterdir())
  theirs = [f"checkpoint_{step}" for step in (10, 11, 13, 2)]
  assert names == ["13", *theirs]


@pytest.mark.parametrize("save", [save_v0, save_msgpack])
def test_restores_older_layouts_onto_a_mesh(save, tmp_path):
  plain = flax_state(finite(ADAM), dynamic_scale_lib.DynamicScale())
  save(tmp_path, plain)
  strategy = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
  state = fs.TrainState.create(
    apply_fn=None,
    params=jax.device_put(
      jax.tree.map(jnp.zeros_like, PARAMS),
      {
        "w": strategy_sharding(strategy, "replica", "model"),
        "half": strategy_sharding(strategy),
      },
    ),
    tx=multi(ADAM),
    wrappers=(SCALED,),
    strategy=strategy,
  )
  restored = fs.checkpoint.restore(tmp_path, state)
  assert_same(restored.params, plain.params)
  for x, y in zip(
    jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
  ):
    assert x.sharding == y.sharding
  (part, *_) = restored.params["w"].addressable_shards
  assert part.data.shape == (1, 1)


def strategy_sharding(strategy, *spec):
  return jax.sharding.NamedSharding(
    strategy.mesh, jax.sharding.PartitionSpec(*spec)
  )


# The mapping.


def test_maps_the_same_layer_twice():
  names = ("notfinite_count", "last_finite", "total_notfinite")
  saved = {("opt_state", n): 1 for n in names}
  saved |= {("opt_state", "inner_state", n): 2 for n in names}
  saved[("opt_state", "inner_state", "inner_state", "count")] = 3
  wanted = {("opt_state", n): 0 for n in names}
  wanted[("opt_state", "inner_state", "count")] = 0
  mapping = migrate.map_leaves(saved, wanted)
  assert mapping.rename(saved) == {
    **{("opt_state", n): 1 for n in names},
    ("opt_state", "inner_state", "count"): 3,
  }
  assert not mapping.fresh
  assert len(mapping.dropped) == 3
