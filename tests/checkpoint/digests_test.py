"""Digests of a step's files, and the metadata beside them."""

import functools
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import threading
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import data
from flaxshard.checkpoint import digests as integrity
from flaxshard.checkpoint import metadata_item

P = jax.sharding.PartitionSpec


@functools.cache
def create(scaled=True):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.arange(6.0).reshape(2, 3)},
    tx=optax.adam(0.5),
    wrappers=[fs.LossScale("dynamic")] if scaled else [],
  )


def make_iterator():
  numbers = np.arange(12)
  source = data.Arrays(numbers * 2.0, numbers)
  splits = data.Splits(source, source, num_classes=12)
  return data.train_iterator(splits, batch_size=4, seed=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A step with every item."""
  path = tmp_path_factory.mktemp("saved")
  config = {"seed": 3, "model": {"name": "cnn"}}
  with checkpoint.Checkpointer(path, config=config) as checkpointer:
    checkpointer.save(3, create(), data=make_iterator())
  return path / "3"


@pytest.fixture
def step(saved, tmp_path):
  """A copy to damage, under another path, as in a moved workdir."""
  return shutil.copytree(saved, tmp_path / "elsewhere" / "3")


def digests(step):
  return json.loads((step / "flaxshard" / "digests.json").read_text())


def files(step):
  return sorted(
    str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()
  )


# Orbax writes these two after the digests; nothing reads them.
MARKS = ["commit_success.txt", "flaxshard/commit_success.txt"]


# What is saved.


def test_every_file_has_its_size_and_crc32(saved):
  named = digests(saved)["files"]
  rest = [
    *MARKS,
    "_CHECKPOINT_METADATA",
    "flaxshard/digests.json",
  ]
  assert sorted([*named, *rest]) == files(saved)
  for name, (size, crc) in named.items():
    content = (saved / name).read_bytes()
    assert (len(content), zlib.crc32(content)) == (size, crc)
  items = {name.split("/")[0] for name in named}
  assert items == {"default", "wrappers", "input_iterator", "flaxshard"}


def test_metadata_describe_the_step(saved):
  assert metadata_item.read_metadata(saved) == {
    "flaxshard": fs.__version__,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "step": 3,
    "state_step": 0,
    "items": ["default", "input_iterator", "wrappers"],
    "wrappers": [["loss_scale", {"scale": "dynamic"}]],
    "processes": 1,
    "devices": None,
    "mesh": None,
    "config": {"seed": 3, "model": {"name": "cnn"}},
  }


def test_metadata_of_a_mesh_and_of_a_wrapper_without_a_config():
  mesh = jax.make_mesh((4, 2), ("replica", "model"))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros(4)},
    tx=optax.sgd(0.1),
    wrappers=[fs.AGN(4, outer_tx=optax.sgd(0.7))],
  )
  params = jax.device_put(
    state.params, jax.sharding.NamedSharding(mesh, P("model"))
  )
  found = metadata_item.metadata(state.replace(params=params), 7, ["default"])
  assert found["mesh"] == {"replica": 4, "model": 2}
  assert found["devices"] == 8
  assert found["config"] is None
  (wrapper,) = found["wrappers"]
  assert wrapper.startswith("AGN(")


def test_orbax_reads_the_metadata_as_json(saved):
  names = ("default", "flaxshard")
  with ocp.CheckpointManager(saved.parent, item_names=names) as manager:
    args = ocp.args.Composite(flaxshard=ocp.args.JsonRestore())
    assert manager.restore(3, args=args).flaxshard["step"] == 3


_WITHOUT_US = """
import sys
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1

path = sys.argv[1]
with ocp.CheckpointManager(path) as manager:
  assert manager.latest_step() == 3
  restored = manager.restore(3)
assert sorted(restored) == ["opt_state", "params", "step"], restored
assert sorted(v1.load(path + "/3")) == ["opt_state", "params", "step"]
assert v1.load_checkpointables(path + "/3")["flaxshard"]["step"] == 3
assert "flaxshard" not in sys.modules
"""


@pytest.mark.slow
def test_process_without_flaxshard_reads_the_step(tmp_path):
  with checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    checkpointer.save(3, create())
  # Each restores all items, with the handlers that the step names.
  subprocess.run(
    [sys.executable, "-c", _WITHOUT_US, str(tmp_path / "checkpoints")],
    check=True,
    cwd=tmp_path,
    timeout=100,
  )


def test_state_without_wrappers_has_no_item_for_them(tmp_path):
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(0, create(scaled=False))
  assert metadata_item.read_metadata(tmp_path / "0")["items"] == ["default"]
  assert metadata_item.read_metadata(tmp_path / "0")["wrappers"] == []
  assert integrity.verify(tmp_path / "0")


def test_config_that_json_cannot_hold_raises(tmp_path):
  with pytest.raises(TypeError, match="config"):
    checkpoint.Checkpointer(tmp_path / "new", config={"f": print})
  assert not (tmp_path / "new").exists()


def test_metrics_of_orbax_have_digests_too(tmp_path):
  options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"])
  handlers = {
    "default": ocp.StandardCheckpointHandler(),
    "flaxshard": metadata_item.Handler(),
  }
  args = ocp.args.Composite(
    default=ocp.args.StandardSave(create().without_wrappers()),
    flaxshard=metadata_item.Save(
      metadata_item.metadata(create(), 1, ["default"])
    ),
  )
  with ocp.CheckpointManager(
    tmp_path, item_handlers=handlers, options=options
  ) as manager:
    manager.save(1, args=args, metrics={"loss": 0.5})
  assert "metrics/metrics" in digests(tmp_path / "1")["files"]
  assert integrity.verify(tmp_path / "1")


def test_digests_wait_for_the_metadata_of_the_step(tmp_path):
  # Another thread of Orbax completes the file while the digests are taken.
  item = tmp_path / "3" / "flaxshard"
  item.mkdir(parents=True)
  file = tmp_path / "3" / "_CHECKPOINT_METADATA"
  file.write_text('{"item_handl')
  complete = {"item_handlers": {"flaxshard": "json"}, "init": 5}
  handler = metadata_item.Handler()
  handler.save(item, metadata_item.Save({}))
  writer = threading.Timer(0.02, file.write_text, [json.dumps(complete)])
  writer.start()
  handler.finalize(item)
  writer.join()
  assert digests(tmp_path / "3")["step_metadata"] == complete
  assert integrity.verify(tmp_path / "3")


# Without digests.


def test_without_digests_only_sizes_are_compared(tmp_path, monkeypatch):
  read = []
  take = integrity.take
  monkeypatch.setattr(
    integrity, "take", lambda paths: read.extend(paths) or take(paths)
  )
  with checkpoint.Checkpointer(tmp_path, digests=False) as checkpointer:
    checkpointer.save(3, create())
    checkpointer.save(4, create())
  assert not read
  step = tmp_path / "4"
  for name, (size, crc) in digests(step)["files"].items():
    assert size == (step / name).stat().st_size
    assert crc is None or name == "flaxshard/metadata"
  assert not integrity.verify(step)
  flipped(step / "default" / "manifest.ocdbt")
  assert not integrity.verify(step)
  truncated_to_half(step / "default" / "manifest.ocdbt")
  with pytest.raises(integrity.Damaged, match=r"manifest\.ocdbt has "):
    integrity.verify(step)
  # Restoring passes the damaged step over.
  with checkpoint.Checkpointer(tmp_path, digests=False) as checkpointer:
    checkpointer.restore(create())
    assert checkpointer.restored_step == 3


def test_digests_must_be_a_boolean(tmp_path):
  with pytest.raises(TypeError, match="digests"):
    checkpoint.Checkpointer(tmp_path, digests="no")


# What is found.


def truncated_to_half(file: pathlib.Path):
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def truncated_to_nothing(file: pathlib.Path):
  file.write_bytes(b"")


def flipped(file: pathlib.Path):
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def removed(file: pathlib.Path):
  file.unlink()


DAMAGES = [truncated_to_half, truncated_to_nothing, flipped, removed]


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named(step, damage):
  assert integrity.verify(step)
  names = [name for name in files(step) if name not in MARKS]
  assert len(names) > 20
  for name in names:
    content = (step / name).read_bytes()
    damage(step / name)
    with pytest.raises(integrity.Damaged) as e:
      integrity.verify(step)
    assert str(e.value).startswith(f"{step / name} "), name
    (step / name).write_bytes(content)
  assert integrity.verify(step)


def test_message_has_digests_and_the_number_of_files(step):
  name = "default/_METADATA"
  size, crc = digests(step)["files"][name]
  flipped(step / name)
  now = zlib.crc32((step / name).read_bytes())
  with pytest.raises(integrity.Damaged) as e:
    integrity.verify(step)
  for fact in (str(step / name), f"{now:08x}", f"{crc:08x}"):
    assert fact in str(e.value)
  assert integrity.verify(step, contents=False)  # the size is unchanged
  truncated_to_half(step / name)
  (step / "wrappers" / "_METADATA").unlink()
  with pytest.raises(integrity.Damaged) as e:
    integrity.verify(step, contents=False)
  for fact in (str(step / name), f"{size // 2:,}", f"{size:,}", "1 more"):
    assert fact in str(e.value)


def test_parts_together_cover_all_files(step):
  for i in range(3):
    assert integrity.verify(step, i, 3)
  flipped(step / "wrappers" / "_METADATA")
  damaged = 0
  for i in range(3):
    try:
      integrity.verify(step, i, 3)
    except integrity.Damaged:
      damaged += 1
  assert damaged == 1


@pytest.mark.parametrize("item", ["default", "wrappers", "flaxshard"])
def test_missing_item_is_named(step, item):
  shutil.rmtree(step / item)
  with pytest.raises(integrity.Damaged, match=rf"^{step / item} is missing"):
    integrity.verify(step)


def test_changed_digests_are_damage(step):
  path = step / "flaxshard" / "digests.json"
  found = digests(step)
  found["files"].pop("wrappers/_METADATA")
  path.write_text(json.dumps(found))
  with pytest.raises(integrity.Damaged, match=r"its own crc32 differs"):
    integrity.verify(step)
  for text in ("5", "{}", "[]", '{"files": {}}'):
    path.write_text(text)
    with pytest.raises(integrity.Damaged, match=r"digests\.json is not"):
      integrity.verify(step)


def test_missing_or_empty_directory_is_damage(tmp_path):
  assert not integrity.is_empty(tmp_path / "3")
  with pytest.raises(integrity.Damaged, match="/3 is missing, or no directory"):
    integrity.verify(tmp_path / "3")
  (tmp_path / "3").mkdir()
  assert integrity.is_empty(tmp_path / "3")
  with pytest.raises(integrity.Damaged, match="/3 is empty"):
    integrity.verify(tmp_path / "3")


def test_plain_step_is_not_verified(tmp_path, caplog):
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(3, args=ocp.args.StandardSave(create(scaled=False)))
  with caplog.at_level(logging.INFO, "flaxshard"):
    assert not integrity.verify(tmp_path / "3")
  (record,) = caplog.records
  assert record.levelno == logging.INFO
  assert "has no digests" in record.getMessage()
  assert metadata_item.read_metadata(tmp_path / "3") is None
  # Its items are compared with the list of Orbax.
  shutil.rmtree(tmp_path / "3" / "default")
  with pytest.raises(integrity.Damaged, match="/3/default is missing"):
    integrity.verify(tmp_path / "3")


def test_set_aside_takes_the_next_free_name(tmp_path):
  names = []
  for i in range(3):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "file").write_text(str(i))
    names.append(pathlib.Path(integrity.set_aside(str(tmp_path / "3"))))
  assert [n.name for n in names] == ["3.damaged", "3.damaged_2", "3.damaged_3"]
  assert [(n / "file").read_text() for n in names] == ["0", "1", "2"]
