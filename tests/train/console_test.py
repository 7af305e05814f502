"""Log lines, warnings told once, and the progress bar."""

import contextlib
import io
import logging
import warnings

import pytest

from flaxshard.train import console

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
      LOG.info("step 20: loss=0.5")
      LOG.warning("careful")
      raise KeyError
    LOG.info("after the run")
  out, err = capsys.readouterr()
  lines = [line.partition(" ")[2] for line in err.splitlines()]
  assert (out, lines) == ("", ["step 20: loss=0.5", "careful"])
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
    with console.show_warnings_once():
      for text in ("a", "a", "b", "a"):
        trace(text)
    trace("a")
  assert [str(w.message) for w in shown] == ["a", "b", "a"]


ROW = {"train_loss": 0.123456, "train_accuracy": 0.98765}


def test_piped_output_has_no_bar_and_no_escape_codes(capsys):
  with handlers(plain_handler()), console.show_log():
    with console.progress_bar(0, 4) as update:
      update(4, ROW)
      LOG.info("step 4")
  _, err = capsys.readouterr()
  assert err.count("\n") == 1
  assert not {"\r", "\x1b"} & set(err)
