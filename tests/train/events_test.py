"""TensorBoard events: metrics and config."""

import pathlib
import struct

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
