"""Reports of a run: rows, TensorBoard, the picture, profiles, the console."""

import contextlib
import io
import logging
import pathlib
import struct
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import report

_draw = report.draw  # which is not called for other tests


def write_rows(path, last_step, rows):
  file = report.MetricsFile(str(path.parent), last_step)
  for step, row in rows.items():
    file.write(step, row)
  file.close()
  return path.read_text().splitlines()


def test_rows_are_json_and_a_resumed_run_replaces_later_ones(tmp_path, caplog):
  path = tmp_path / "metrics.jsonl"
  nonfinite = {"a": np.nan, "b": -np.inf, "c": None, "d": 0.0, "e": 0}
  lines = write_rows(path, 0, {2: nonfinite, 4: {"x": 0.5}, 6: {"x": 0.25}})
  assert lines[0] == (
    '{"step": 2, "a": null, "b": null, "c": null, "d": 0.0, "e": 0}'
  )
  # The last write of a process that was killed.
  path.write_text(path.read_text() + '{"step": 8, "lo')
  kept = write_rows(path, 4, {6: {"x": 0.0}})
  assert kept == [*lines[:2], '{"step": 6, "x": 0.0}']
  # The temporary file is gone.
  assert list(path.parent.iterdir()) == [path]
  (message,) = caplog.messages
  assert str(path) in message and '{"step": 8, "lo' in message


def read_events(folder):
  """Returns the events in the event files of a folder.

  A record is its length, a checksum of that, the event and a checksum of it.
  """
  from tensorboardX.proto import event_pb2

  events = []
  for file in sorted(pathlib.Path(folder).glob("events.out.tfevents.*")):
    content = file.read_bytes()
    while content:
      (length,) = struct.unpack("<Q", content[:8])
      events.append(event_pb2.Event.FromString(content[12 : 12 + length]))
      content = content[16 + length :]
  return events


def test_tensorboard_has_the_metrics_side_by_side(tmp_path):
  config = config_lib.check(tiny.config(writer="tensorboard"))
  with report.open_report(config, str(tmp_path), 4) as write_row:
    write_row(6, {"train_loss": 0.5, "loss_scale": 2.0**15, "absent": None})
    write_row(8, {"eval_accuracy": 0.25, "skipped_steps": 3})
  events = read_events(tmp_path)
  # What a run before this one wrote later is dropped.
  assert [e.step for e in events if e.session_log.status] == [5]
  scalars = [
    (e.step, value.tag, value.simple_value)
    for e in events
    for value in e.summary.value
  ]
  assert scalars == [
    (6, "loss/train", 0.5),
    (6, "loss_scale", 2.0**15),
    (8, "accuracy/eval", 0.25),
    (8, "skipped_steps", 3.0),
  ]
  assert [row["step"] for row in tiny.rows(tmp_path)] == [6, 8]


ROWS = {
  2: {"train_loss": 2.0, "learning_rate": 0.1, "learning_rate/head": 0.5},
  4: {"train_loss": 1.0, "eval_loss": 1.5, "loss_scale": 2.0},
  # A row with an evaluation only, and one with a non-finite loss.
  5: {"eval_loss": 1.25, "eval_fid": 3.0},
  6: {"train_loss": None, "loss_scale": None, "commits": 1, "skipped_steps": 0},
}


def test_each_metric_is_drawn(tmp_path, monkeypatch, caplog):
  from matplotlib import figure
  from matplotlib import image

  # Pyplot would choose a GUI backend and keep every figure.
  monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
  figures = []
  save = figure.Figure.savefig

  def keep_and_save(self, *args, **kwargs):
    figures.append(self)
    save(self, *args, **kwargs)

  monkeypatch.setattr(figure.Figure, "savefig", keep_and_save)
  write_rows(tmp_path / "metrics.jsonl", 0, ROWS)
  _draw(tiny.config(), str(tmp_path))
  drawn = {
    (ax.get_ylabel(), line.get_label()): line.get_xydata().tolist()
    for ax in figures[0].axes
    for line in ax.get_lines()
  }
  assert drawn == {
    ("loss", "train_loss"): [[2, 2.0], [4, 1.0]],
    ("loss", "eval_loss"): [[4, 1.5], [5, 1.25]],
    ("fid", "eval_fid"): [[5, 3.0]],
    ("learning rate", "learning_rate"): [[2, 0.1]],
    ("learning rate", "learning_rate/head"): [[2, 0.5]],
    ("loss scale", "loss_scale"): [[4, 2.0]],
    ("commits", "commits"): [[6, 1]],
  }
  # Something is drawn: not one color.
  assert np.ptp(image.imread(tmp_path / "training.png")[..., :3]) > 0.5
  # A run that has no row yet, and a picture that cannot be written.
  (tmp_path / "metrics.jsonl").unlink()
  (tmp_path / "training.png").unlink()
  (tmp_path / "training.png").mkdir()
  _draw(tiny.config(), str(tmp_path))
  assert "training.png cannot be written" in caplog.text


@pytest.mark.parametrize(
  ("taken", "start", "stop"),
  [
    (range(1, 6), 2, 4),
    # A run that is resumed within the range; a worker that jumps over its ends.
    (range(3, 6), 3, 4),
    ((1, 3, 5), 3, 5),
  ],
)
def test_profile_traces_the_given_steps(
  tmp_path, monkeypatch, taken, start, stop
):
  events = []

  @contextlib.contextmanager
  def trace(path):
    events.append((f"start before {step}", path))
    yield
    events.append(f"stop before {step}")

  monkeypatch.setattr(jax.profiler, "trace", trace)
  for steps in ((2, 3), ()):
    with report.profile_steps(steps, str(tmp_path)) as before_step:
      for step in taken:
        before_step(step, jnp.zeros(()))
  path = str(tmp_path / "profile")
  assert events == [(f"start before {start}", path), f"stop before {stop}"]


# The console.

LOG = logging.getLogger("flaxshard.train.loop")


@contextlib.contextmanager
def handlers(*root_handlers, level=logging.WARNING):
  """Replaces the root logger's handlers, which pytest adds, and its level."""
  root = logging.getLogger()
  before = root.handlers, root.level
  root.handlers = list(root_handlers)
  root.setLevel(level)
  try:
    yield
  finally:
    root.handlers, _ = before
    root.setLevel(before[1])


def plain_handler():
  """The handler that absl adds while Orbax is imported."""
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
  return handler


@pytest.mark.parametrize("make_handlers", [list, lambda: [plain_handler()]])
def test_lines_are_printed_once_if_logging_is_not_configured(
  capsys, make_handlers
):
  with handlers(*make_handlers()):
    with contextlib.suppress(KeyError), console.show_log():
      # Piped output has no bar and no escape codes.
      with console.progress_bar(0, 4) as update:
        update(4, {"train_loss": 0.123456})
        LOG.info("step 20: loss=0.5")
      LOG.warning("careful")
      raise KeyError
    LOG.info("after the run")
  out, err = capsys.readouterr()
  lines = [line.partition(" ")[2] for line in err.split("\n")]
  assert (out, lines) == ("", ["step 20: loss=0.5", "careful", ""])
  assert not {"\r", "\x1b"} & set(err)
  log = logging.getLogger("flaxshard")
  assert (log.handlers, log.level, log.propagate) == ([], 0, True)


def test_configured_logging_stays_as_it_is(capsys):
  seen = io.StringIO()
  with handlers(logging.StreamHandler(seen), level=logging.INFO):
    with console.show_log():
      LOG.info("step 20")
  with handlers(logging.StreamHandler(seen)), console.show_log():
    LOG.info("step 40 is not asked for")
  with handlers(plain_handler(), level=logging.ERROR), console.show_log():
    LOG.warning("not asked for either")
  log = logging.getLogger("flaxshard")
  log.setLevel(logging.WARNING)
  try:
    with handlers(plain_handler()), console.show_log():
      LOG.info("step 60 is not asked for")
  finally:
    log.setLevel(logging.NOTSET)
  assert seen.getvalue() == "step 20\n"
  assert capsys.readouterr() == ("", "")


def test_a_python_warning_is_shown_once_although_filters_change():
  def trace(text):
    warnings.warn(text, UserWarning, stacklevel=1)
    with warnings.catch_warnings():  # as libraries do; Python forgets
      warnings.simplefilter("ignore")

  with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("default")
    with console.show_log():
      for text in ("a", "a", "b", "a"):
        trace(text)
    trace("a")
  assert [str(w.message) for w in shown] == ["a", "b", "a"]
