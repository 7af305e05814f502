"""Custom Orbax managers: save_args, restore and item_handlers."""

import checkpoint_states as states
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1
import pytest

import flaxshard as fs
from flaxshard.checkpoint import __main__ as inspection


def test_plain_item_names_the_item_of_the_train_state(tmp_path):
  state = states.change_leaves(states.flax_state())
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(
      3,
      args=ocp.args.Composite(
        train=ocp.args.StandardSave(state),
        other=ocp.args.StandardSave({"x": jnp.ones(1)}),
      ),
    )
  restored = fs.checkpoint.restore(
    tmp_path, states.our_state("none"), plain_item="train"
  )
  states.assert_same(states.plain_fields(restored), states.plain_fields(state))
  assert inspection.main([str(tmp_path)]) == 1
  # A Checkpointer cannot read it, and does not rename it.
  with fs.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="only 'other', 'train': plain_item"):
      checkpointer.restore(restored)
    assert checkpointer.save(4, restored)
    assert checkpointer.all_steps() == [3, 4]


def test_custom_manager_saves_and_restores(tmp_path):
  state, target = (
    states.change_leaves(states.our_state("both")),
    states.our_state("both"),
  )
  options = ocp.CheckpointManagerOptions(
    step_prefix="step", step_format_fixed_length=6
  )
  with ocp.CheckpointManager(tmp_path, options=options) as manager:
    for step in (1, 20):
      manager.save(
        step,
        args=ocp.args.Composite(
          **fs.checkpoint.save_args(state.replace(step=jnp.int32(step))),
          more=ocp.args.JsonSave({"a": 1}),
        ),
      )
      # `restore` waits for the save that still runs.
      restored = fs.checkpoint.restore(manager, target)
      assert int(restored.step) == step
    assert int(fs.checkpoint.restore(manager, target, 1).step) == 1
  assert (tmp_path / "step_000020" / "wrappers").is_dir()
  assert int(fs.checkpoint.restore(str(tmp_path), target).step) == 20


def test_manager_with_item_handlers_restores_with_orbax(tmp_path):
  state = states.change_leaves(states.our_state("loss_scale"))
  states.write_own_manager(tmp_path, state)
  template = jax.tree.map(
    ocp.utils.to_shape_dtype_struct, state.without_wrappers()
  )
  handlers = fs.checkpoint.item_handlers()
  with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
    assert sorted(manager.item_metadata(states.STEP).keys()) == [
      "default",
      "wrappers",
    ]
    read = manager.restore(
      states.STEP,
      args=ocp.args.Composite(
        default=ocp.args.StandardRestore(template),
        wrappers=ocp.args.PyTreeRestore(),
      ),
    )
    states.assert_same(
      states.plain_fields(read["default"]), states.plain_fields(state)
    )
    scale = read["wrappers"]["loss_scale"]["scale"]
    assert scale == state.wrapper_states["loss_scale"].scale
    manager.save(states.STEP + 1, args=fs.checkpoint.save_args(state))
  assert (tmp_path / str(states.STEP + 1) / "wrappers").is_dir()


def test_training_checkpointer_of_orbax_v1(tmp_path):
  state = states.change_leaves(states.flax_state())
  with ocp_v1.training.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(states.STEP, state)
    restored = fs.checkpoint.restore(
      checkpointer, states.our_state("loss_scale")
    )
  states.assert_same(states.plain_fields(restored), states.plain_fields(state))
