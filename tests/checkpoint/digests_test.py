"""Digests of a step's files, and the metadata beside them."""

import functools
import json
import shutil
import zlib

import damages
import grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.checkpoint import digests as integrity

P = jax.sharding.PartitionSpec


@functools.cache
def create(scaled=True):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.arange(6.0).reshape(2, 3)},
    tx=optax.adam(0.5),
    wrappers=[fs.LossScale("dynamic")] if scaled else [],
  )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A step with every item."""
  path = tmp_path_factory.mktemp("saved")
  config = {"seed": 3, "model": {"name": "cnn"}}
  with checkpoint.Checkpointer(path, config=config) as checkpointer:
    data = iter(grain.MapDataset.range(100).to_iter_dataset())
    checkpointer.save(3, create(), data=data)
  return path / "3"


@pytest.fixture
def step(saved, tmp_path):
  """A copy to damage, under another path, as in a moved workdir."""
  return shutil.copytree(saved, tmp_path / "elsewhere" / "3")


def digests(step):
  return json.loads((step / "flaxshard" / "digests.json").read_text())


def files(step):
  return sorted(
    str(p.relative_to(step))
    for p in step.rglob("*")
    if p.is_file() and p.name != "commit_success.txt"
  )


# What is saved.


def test_every_file_has_its_size_and_crc32(saved):
  named = digests(saved)["files"]
  rest = ["_CHECKPOINT_METADATA", "flaxshard/digests.json"]
  assert sorted([*named, *rest]) == files(saved)
  for name, (size, crc) in named.items():
    content = (saved / name).read_bytes()
    assert (len(content), zlib.crc32(content)) == (size, crc)
  items = {name.split("/")[0] for name in named}
  assert items == {"default", "wrappers", "input_iterator", "flaxshard"}


def test_metadata_describe_the_step(saved):
  assert integrity.read_metadata(saved) == {
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


# Without digests.


def test_without_digests_only_sizes_are_compared(tmp_path, monkeypatch):
  read = []
  digest = integrity.digest_file
  monkeypatch.setattr(
    integrity,
    "digest_file",
    lambda path, contents: (
      (contents and read.append(path)) or digest(path, contents=contents)
    ),
  )
  with checkpoint.Checkpointer(tmp_path, digests=False) as checkpointer:
    checkpointer.save(3, create())
    checkpointer.save(4, create())
  assert {file.rpartition("/")[2] for file in read} == {"metadata"}
  step = tmp_path / "4"
  for name, (size, crc) in digests(step)["files"].items():
    assert size == (step / name).stat().st_size
    assert crc is None or name == "flaxshard/metadata"
  assert not integrity.verify(step)
  damages.flipped(step / "default" / "manifest.ocdbt")
  assert not integrity.verify(step)
  damages.truncated_to_half(step / "default" / "manifest.ocdbt")
  with pytest.raises(integrity.Damaged, match=r"manifest\.ocdbt has "):
    integrity.verify(step)
  # Restoring passes the damaged step over.
  with checkpoint.Checkpointer(tmp_path, digests=False) as checkpointer:
    checkpointer.restore(create())
    assert checkpointer.restored_step == 3


# What is found.


@pytest.mark.parametrize("damage", damages.ALL)
def test_every_damaged_file_is_named(step, damage):
  assert integrity.verify(step)
  names = files(step)
  # Of Orbax's own metadata only the items are compared.
  if damage is damages.flipped:
    names.remove("_CHECKPOINT_METADATA")
  assert len(names) > 20
  for name in names:
    content = (step / name).read_bytes()
    damage(step / name)
    with pytest.raises(integrity.Damaged) as e:
      integrity.verify(step)
    assert str(e.value).startswith(f"{step / name} "), name
    (step / name).write_bytes(content)
  assert integrity.verify(step)


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
