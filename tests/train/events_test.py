"""TensorBoard events: metrics and config."""

import importlib.util
import json
import pathlib
import struct

import pytest

from flaxshard.train import events


def read_values(folder):
  """Returns (step, value) of all summaries in the event files of a folder.

  A record is its length, a checksum of that, the event and a checksum of it.
  """
  from tensorboardX.proto import event_pb2

  values = []
  for file in sorted(pathlib.Path(folder).glob("events.out.tfevents.*")):
    content = file.read_bytes()
    while content:
      (length,) = struct.unpack("<Q", content[:8])
      event = event_pb2.Event.FromString(content[12 : 12 + length])
      values += [(event.step, value) for value in event.summary.value]
      content = content[16 + length :]
  return values


def read_events(folder):
  """Returns the scalars in a folder as (step, tag, value)."""
  return [(step, x.tag, x.simple_value) for step, x in read_values(folder)]


def test_tensorboard_events(tmp_path):
  write, close = events.event_writer("tensorboard", str(tmp_path))
  write(2, {"train_loss": 0.5, "loss_scale": 2.0**15, "absent": None})
  write(4, {"eval_accuracy": 0.25, "skipped_steps": 3})
  close()
  assert read_events(tmp_path) == [
    (2, "loss/train", 0.5),
    (2, "loss_scale", 2.0**15),
    (4, "accuracy/eval", 0.25),
    (4, "skipped_steps", 3.0),
  ]


def test_events_of_a_resumed_run_replace_later_events(tmp_path):
  from tensorboardX.proto import event_pb2

  write, close = events.event_writer("tensorboard", str(tmp_path), 4)
  write(6, {"train_loss": 0.5})
  close()
  (file,) = tmp_path.iterdir()
  start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  event = event_pb2.Event(step=5, session_log=start).SerializeToString()
  assert event in file.read_bytes()
  assert read_events(tmp_path) == [(6, "loss/train", 0.5)]


def test_events_carry_the_config(tmp_path):
  from tensorboardX.proto import plugin_hparams_pb2

  config = {
    "model": {"name": "cnn", "features": [32, 64]},
    "learning_rate": 0.5,
    "seed": 0,
    "resume": False,
  }
  _, close = events.event_writer("tensorboard", str(tmp_path), 4, config)
  close()
  values = {value.tag: (step, value) for step, value in read_values(tmp_path)}
  step, text = values["config/text_summary"]
  assert step == 4
  assert json.loads(text.tensor.string_val[0]) == config
  assert text.metadata.plugin_data.plugin_name == "text"
  _, start = values["_hparams_/session_start_info"]
  data = plugin_hparams_pb2.HParamsPluginData.FromString(
    start.metadata.plugin_data.content
  )
  hparams = data.session_start_info.hparams
  assert hparams["model.name"].string_value == "cnn"
  assert hparams["model.features"].string_value == "[32, 64]"
  assert hparams["learning_rate"].number_value == 0.5
  assert set(hparams) == {
    "model.name",
    "model.features",
    "learning_rate",
    "seed",
    "resume",
  }


def test_writer_none_writes_nothing(tmp_path):
  write, close = events.event_writer("none", str(tmp_path))
  write(2, {"train_loss": 0.5})
  close()
  assert list(tmp_path.iterdir()) == []


@pytest.fixture
def installed(monkeypatch):
  """Returns a function that makes packages look uninstalled."""
  find_spec = importlib.util.find_spec

  def uninstall(*names):
    monkeypatch.setattr(
      importlib.util,
      "find_spec",
      lambda name, *args: None if name in names else find_spec(name, *args),
    )

  return uninstall


@pytest.mark.parametrize(
  ("name", "package", "remedy"),
  [
    ("clu", "tensorflow", "pip install tensorflow tensorboard"),
    ("tensorboard", "tensorboardX", "pip install 'flaxshard[train]'"),
  ],
)
def test_a_missing_package_raises_with_the_remedy(
  tmp_path, installed, name, package, remedy
):
  installed(package)
  with pytest.raises(ImportError) as e:
    events.event_writer(name, str(tmp_path))
  message = str(e.value)
  assert message.startswith(f"config.writer={name!r} needs {package}")
  assert message.endswith(remedy)
  assert list(tmp_path.iterdir()) == []
