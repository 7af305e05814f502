"""Built-in data: handwritten digits and text files."""

import numpy as np
import pytest

from flaxshard import data


def test_digits_are_scikit_learns_with_every_fifth_for_evaluation():
  # Here, since its import takes seconds.
  from sklearn import datasets

  splits = data.load({"name": "digits"})
  images, targets = datasets.load_digits(return_X_y=True)
  inputs = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
  is_eval = np.arange(1797) % 5 == 0
  assert splits.num_classes == 10
  for source, chosen in ((splits.train, ~is_eval), (splits.eval, is_eval)):
    np.testing.assert_array_equal(source.inputs, inputs[chosen])
    np.testing.assert_array_equal(source.labels, targets[chosen])
    assert source[0]["inputs"].dtype == np.float32
    assert source[0]["labels"].dtype == np.int32
  assert (splits.train.inputs.min(), splits.train.inputs.max()) == (0, 1)


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / "a.txt").write_bytes(b"abcdefgh")
  (tmp_path / "b.txt").write_bytes(b"held out")
  (tmp_path / "sub" / "c.txt").write_bytes("é!".encode())
  (tmp_path / "sub" / "d.txt").write_bytes(b"too")
  (tmp_path / "other.py").write_bytes(b"another suffix")
  return tmp_path


def test_text_windows_with_labels_one_byte_later(folder):
  splits = data.load(
    {
      "name": "text",
      "path": str(folder),
      "suffix": ".txt",
      "length": 5,
      "eval_every": 2,
    }
  )
  assert splits.num_classes == 256
  # Files are joined by a zero byte; a last incomplete window is left out.
  train = b"abcdefgh\0" + "é!".encode()
  evaluation = b"held out\0too"
  for source, joined in ((splits.train, train), (splits.eval, evaluation)):
    assert len(source) == 2
    for i in range(2):
      example = source[i]
      window = list(joined[5 * i : 5 * i + 6])
      assert example["inputs"].dtype == example["labels"].dtype == np.int32
      assert example["inputs"].tolist() == window[:-1]
      assert example["labels"].tolist() == window[1:]


@pytest.mark.parametrize(
  ("arguments", "facts"),
  [
    ({"path": "missing"}, "path.*missing"),
    ({"length": 12, "eval_every": 2}, "4 files.*'.txt'.*train.*13"),
    ({"length": 2, "eval_every": 5}, "eval.*0 bytes"),
    ({"length": 0}, "length.*1.*got 0"),
    ({"eval_every": "2"}, "eval_every.*got '2'"),
  ],
)
def test_invalid_text_arguments_raise(folder, arguments, facts):
  path = folder / arguments.pop("path", "")
  with pytest.raises(ValueError, match=facts):
    data.text(str(path), **{"suffix": ".txt", **arguments})
