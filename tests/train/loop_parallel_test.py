"""The training loop over replicas and logical devices, on tiny runs."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import optax
import pytest
import tiny
import xla_flags

from flaxshard import data
from flaxshard import train
from flaxshard.train import loop
from flaxshard.train import charts

P = jax.sharding.PartitionSpec

_ROOT = pathlib.Path(__file__).parents[2]
_FACTORIES = "train_parallel_factories:"

IMAGES = data.digits()
SPATIAL = {"logical_devices": 8, "split": {"inputs": (1, 2, 4, 1)}}
# Megatron-LM (Shoeybi et al., 2019), as in configs/lm_text_tensor_parallel.py.
TENSOR_PARALLEL = {
  "axes": (("model", 2),),
  "rules": (
    ("(query|key|value|mlp_in)/kernel", (None, "model")),
    ("(query|key|value|mlp_in)/bias", ("model",)),
    ("(out|mlp_out)/kernel", ("model", None)),
    ("embed/embedding", ("model", None)),
    ("head/kernel", (None, "model")),
  ),
}
FSDP = {"rules": ({"name": "fsdp", "min_size": 64},)}
BOTH = {
  "axes": TENSOR_PARALLEL["axes"],
  "rules": (*TENSOR_PARALLEL["rules"], *FSDP["rules"]),
}


def digits() -> data.Splits:
  """Digits; 20 are held out, which is no multiple of a batch."""
  return data.Splits(
    IMAGES.train,
    data.Arrays(IMAGES.eval.inputs[:20], IMAGES.eval.labels[:20]),
    10,
  )


def tokens() -> data.Splits:
  """A random walk over 32 tokens, in windows of 8; 19 are held out."""
  steps = np.random.default_rng(0).integers(0, 3, 800)
  walk = (np.cumsum(steps) % 32).astype(np.int32)
  return data.Splits(
    data.Windows(walk[:640], 8), data.Windows(walk[640:], 8), 32
  )


def spoiled() -> data.Splits:
  """Digits of which training example 3 is infinite."""
  inputs = np.array(IMAGES.train.inputs[:64])
  inputs[3] = np.inf
  return data.Splits(
    data.Arrays(inputs, IMAGES.train.labels[:64]), digits().eval, 10
  )


def mislabelled() -> data.Splits:
  """Digits of which training example 900 has a label that is none."""
  labels = np.array(IMAGES.train.labels)
  labels[900] = 10
  return data.Splits(
    data.Arrays(IMAGES.train.inputs, labels), digits().eval, 10
  )


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Makes the factories here nameable in configs; draws no plots."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, _FACTORIES[:-1], sys.modules[__name__])
    patch.setattr(charts, "plot", lambda rows, path: None)
    yield


def config(mesh, **fields):
  defaults = dict(
    data={"name": f"{_FACTORIES}digits"},
    mesh=mesh,
    precision="float32",
    wrappers=(),
    num_train_steps=4,
    eval_every_steps=2,
    checkpoint_every_steps=2,
  )
  return tiny.config(**{**defaults, **fields})


def transformer(mesh, **fields):
  model = dict(num_layers=1, num_heads=2, embed_dim=16, mlp_dim=32)
  return config(
    mesh,
    model={"name": "transformer", "max_length": 8, **model},
    data={"name": f"{_FACTORIES}tokens"},
    optimizer={"name": "sgd", "momentum": 0.9},
    **fields,
  )


def assert_same_rows(given, wanted, rtol=1e-4):
  """What the runs in two workdirs have written is the same, but for rounding.

  Args:
    given: A workdir.
    wanted: A workdir.
    rtol: The relative tolerance.
  """
  given, wanted = tiny.untimed_rows(given), tiny.untimed_rows(wanted)
  assert [r["step"] for r in given] == [r["step"] for r in wanted] == [2, 4]
  for a, b in zip(given, wanted, strict=True):
    assert {"train_loss", "eval_loss", "eval_accuracy"} < set(a)
    assert a == pytest.approx(b, rel=rtol)


def at_step_2(workdir, copy):
  """Copies a run of four steps as it stood after two."""
  shutil.copytree(workdir, copy)
  shutil.rmtree(os.path.join(copy, "checkpoints", "4"))
  return str(copy)


@pytest.fixture(scope="module")
def images_alone(tmp_path_factory):
  """The CNN on one device: its workdir, and its last state."""
  workdir = str(tmp_path_factory.mktemp("images"))
  return workdir, train.train_and_evaluate(config({"replica": 1}), workdir)


@pytest.fixture(scope="module")
def text_alone(tmp_path_factory):
  """The transformer on one device: its workdir, and its last state."""
  workdir = str(tmp_path_factory.mktemp("text"))
  return workdir, train.train_and_evaluate(transformer({"replica": 1}), workdir)


@pytest.fixture
def lowered(monkeypatch):
  """Collects the train steps that are compiled."""
  steps = []
  original = loop._compile
  monkeypatch.setattr(
    loop, "_compile", lambda step: (steps.append(step), original(step))
  )
  return steps


def test_evaluation_counts_every_example_once(images_alone) -> None:
  """By hand; other meshes are compared with this run."""
  workdir, state = images_alone
  held_out = digits().eval
  logits = state.apply_fn({"params": state.params}, held_out.inputs)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, held_out.labels
  )
  row = tiny.rows(workdir)[-1]
  assert row["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
  correct = np.argmax(logits, -1) == held_out.labels
  assert row["eval_accuracy"] == pytest.approx(correct.mean())


@pytest.mark.parametrize(
  "mesh",
  [
    SPATIAL,
    {
      "logical_devices": 4,
      "split": {"inputs": (2, 2, 1, 1), "labels": (4,)},
      "per_replica": True,
    },
  ],
)
def test_images_train_as_on_one_device(
  mesh, images_alone, lowered, tmp_path
) -> None:
  wanted, state_alone = images_alone
  state = train.train_and_evaluate(config(mesh), str(tmp_path))
  assert_same_rows(str(tmp_path), wanted)
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    assert x.sharding.is_fully_replicated, path
    assert len(x.sharding.device_set) == 8, path
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3),
    jax.device_get(state.params),
    jax.device_get(state_alone.params),
  )
  if mesh == SPATIAL:
    text = lowered[0].compile().as_text()
    # Neighbours exchange the borders of their pieces ...
    assert "collective-permute" in text
    # ... and nobody gets whole images, nor the first layer's.
    gathered = re.findall(r"= (\S+) all-gather", text)
    assert not [s for s in gathered if re.match(r"f32\[16,8,8,[14]\]", s)]


def test_one_device_goes_on_as_eight_replicas(images_alone, tmp_path) -> None:
  workdir = at_step_2(images_alone[0], tmp_path / "run")
  state = train.train_and_evaluate(config({}), workdir)
  assert_same_rows(workdir, images_alone[0])
  assert len(state.params["head"]["kernel"].sharding.device_set) == 8


@pytest.mark.parametrize(
  "mesh, kernel, bias",
  [
    (TENSOR_PARALLEL, P(None, "model"), P("model")),
    ({**BOTH, "per_replica": True}, P("replica", "model"), P("model")),
  ],
)
def test_text_trains_as_on_one_device(
  mesh, kernel, bias, text_alone, tmp_path, caplog
) -> None:
  state = train.train_and_evaluate(transformer(mesh), str(tmp_path))
  assert_same_rows(str(tmp_path), text_alone[0])
  mlp = state.params["block0"]["mlp_in"]
  assert mlp["kernel"].sharding.spec == kernel
  assert mlp["bias"].sharding.spec == bias
  gathers = "is gathered for every step" in caplog.text
  assert gathers == ("per_replica" in mesh)
  # The optimizer's slots lie as their parameters do.
  for x, like in zip(
    jax.tree.leaves(optax.tree.get(state.opt_state, "trace")),
    jax.tree.leaves(state.params),
    strict=True,
  ):
    assert x.sharding == like.sharding


def test_fsdp_trains_as_on_one_device_and_goes_on_there(
  text_alone, tmp_path
) -> None:
  workdir = str(tmp_path / "eight")
  state = train.train_and_evaluate(transformer(FSDP), workdir)
  assert_same_rows(workdir, text_alone[0])
  kernel = state.params["block0"]["mlp_in"]["kernel"]
  assert kernel.sharding.spec == P(None, "replica")
  assert {s.data.shape for s in kernel.addressable_shards} == {(16, 4)}

  workdir = at_step_2(workdir, tmp_path / "one")
  state = train.train_and_evaluate(transformer({"replica": 1}), workdir)
  assert_same_rows(workdir, text_alone[0])
  assert len(state.params["head"]["kernel"].sharding.device_set) == 1


def test_replicas_with_statistics_and_dropout_resume_exactly(tmp_path) -> None:
  """However far ahead the data has been read when a checkpoint is saved."""
  fields = dict(
    model={"name": "normed:Normed"},
    wrappers=(("loss_scale", {"scale": "dynamic"}),),
  )
  mesh = {"per_replica": True, "replica": 4}
  workdir = str(tmp_path / "a")
  state = train.train_and_evaluate(config(mesh, **fields), workdir)
  copy = at_step_2(workdir, tmp_path / "b")
  resumed = train.train_and_evaluate(config(mesh, **fields), copy)
  for a, b in zip(
    jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert tiny.untimed_rows(copy) == tiny.untimed_rows(workdir)
  mean = state.batch_stats["BatchNorm_0"]["mean"]
  assert mean.sharding.is_fully_replicated
  assert np.abs(mean).max() > 0


def test_one_replica_without_a_finite_loss_stops_all(tmp_path) -> None:
  mesh = {
    "per_replica": True,
    "axes": (("model", 2),),
    # Only the devices of that replica look for what is not finite, together.
    "rules": (("dense/kernel", (None, "model")), ("head/kernel", ("model",))),
  }
  with pytest.raises(FloatingPointError) as e:
    train.train_and_evaluate(
      config(mesh, data={"name": f"{_FACTORIES}spoiled"}), str(tmp_path)
    )
  match = re.match(r"step (\d): the loss is not finite; \d of 6", str(e.value))
  # Batches of 16 of 64 examples.
  assert 1 <= int(match[1]) <= 4
  assert "conv0/kernel" in str(e.value)
  assert str(match[1]) not in os.listdir(tmp_path / "checkpoints")


def test_a_bad_label_in_the_middle_ends_the_run(tmp_path) -> None:
  fields = dict(
    data={"name": f"{_FACTORIES}mislabelled"},
    num_train_steps=99,
    eval_every_steps=99,
    checkpoint_every_steps=5,
  )
  with pytest.raises(
    ValueError, match=r"labels must lie in \[0, 10\), got 0 to 10"
  ):
    train.train_and_evaluate(config({}, **fields), str(tmp_path))
  # What came before was trained on and saved.
  saved = [int(step) for step in os.listdir(tmp_path / "checkpoints")]
  assert 5 <= max(saved) <= 1437 // 16
  names = [thread.name for thread in threading.enumerate()]
  assert "flaxshard-prefetch" not in names


@pytest.mark.parametrize(
  "mesh, message",
  [
    ({"replica": 9}, "replica=9 with config.mesh.logical_devices=1 needs 9"),
    ({"replicas": 2}, "replicas is not a field"),
    ({"virtual_devices": 4}, "virtual_devices=4: JAX has started with 8"),
    ({"split": {"input": (1,)}}, r"split.input=\(1,\): a batch has inputs, l"),
    ({**SPATIAL, "logical_devices": 4}, "split.inputs=.* devices, 4, got 8"),
    ({"rules": ("fsdb",)}, r"rules\[0\]: unknown name 'fsdb'"),
    ({"rules": ("fsdp",)}, "rules: FSDP.* splits no parameter"),
    (
      {"rules": (("kernell", ("replica",)),)},
      r"rules\[0\]=.*matches no parameter.*conv0/kernel.*Did you mean",
    ),
    (
      {"rules": (("dense/kernel", (None, "model")),)},
      r"rules\[0\]=.*params\[dense/kernel\]: the mesh has no axis 'model'",
    ),
    (
      {"rules": (("conv0/kernel", ("replica",)),)},
      r"rules\[0\]=.*dimension 0, of size 3, cannot be divided by 8",
    ),
    ({"rules": (3,)}, r"rules\[0\] must be a rule, got 3"),
  ],
)
def test_a_bad_mesh_is_refused_before_anything_is_written(
  monkeypatch, tmp_path, mesh, message
) -> None:
  monkeypatch.setattr(loop, "_compile", lambda lowered: pytest.fail("compiled"))
  with pytest.raises(ValueError, match=rf"^config\.mesh\.{message}"):
    train.train_and_evaluate(config(mesh), str(tmp_path))
  assert os.listdir(tmp_path) == []


def test_virtual_devices_and_sigterm_from_the_command_line(tmp_path) -> None:
  """A process of its own, in which JAX does not know of eight devices."""
  workdir = tmp_path / "run"
  environment = {**os.environ, "XLA_FLAGS": xla_flags.FAST}
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "flaxshard", "--config=configs/digits.py"),
      f"--workdir={workdir}",
      *("--config.mesh.virtual_devices=8", "--config.mesh.logical_devices=2"),
      "--config.mesh.split={'inputs': (1, 2, 1, 1)}",
      *("--config.model.features=(4,)", "--config.model.dense=8"),
      *("--config.precision=float32", "--config.wrappers=()"),
      *("--config.writer=none", "--config.log_every_steps=2"),
      "--config.num_train_steps=100000",
    ],
    cwd=_ROOT,
    env=environment,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    deadline = time.monotonic() + 120
    while not (workdir / "metrics.jsonl").exists() or not tiny.rows(workdir):
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 128 + signal.SIGTERM
  assert "8 of 8 cpu devices, Strategy(replica=4, m0=2)" in log
  step = int(re.search(r"SIGTERM: saved step (\d+)", log)[1])
  assert str(step) in os.listdir(workdir / "checkpoints")
