"""Files on a file system; those in buckets are tested in bucket_test.py."""

import os
import sys

import pytest

from flaxshard.core import files


def test_paths_of_buckets():
  assert files.is_bucket("gs://bucket/run") and files.is_bucket("s3://bucket")
  assert not files.is_bucket("/gs/run") and not files.is_bucket("hdfs://run")
  assert files.absolute("gs://bucket/run/") == "gs://bucket/run"
  assert files.absolute("s3://bucket//run/../x") == "s3://bucket/x"
  assert files.absolute("~") == os.path.expanduser("~")
  assert files.absolute("run") == os.path.join(os.getcwd(), "run")


def test_atomic_write_keeps_the_old_content_after_an_error(tmp_path):
  path = tmp_path / "file"
  path.write_text("old")
  with pytest.raises(KeyError), files.atomic_write(path) as f:
    f.write("new")
    raise KeyError
  assert path.read_text() == "old"
  with files.atomic_write(path) as f:
    f.write("new")
  assert files.read_bytes(path) == b"new"


def test_files_and_directories(tmp_path):
  files.make_dirs(tmp_path / "a" / "b")
  files.write_bytes(tmp_path / "a" / "b" / "file", b"content")
  assert files.is_dir(tmp_path / "a") and not files.is_file(tmp_path / "a")
  assert files.size(tmp_path / "a" / "b" / "file") == 7
  files.rename(tmp_path / "a", tmp_path / "c")
  assert files.files_in(str(tmp_path)) == [str(tmp_path / "c" / "b" / "file")]
  files.copy_files(str(tmp_path / "c" / "b"), tmp_path)
  assert sorted(files.list_names(tmp_path)) == ["c", "file"]
  files.remove(tmp_path / "file")
  assert not files.exists(tmp_path / "file")
  (tmp_path / "link").symlink_to(tmp_path / "none")
  assert files.lexists(tmp_path / "link")
  assert not files.exists(tmp_path / "link")


@pytest.mark.parametrize(
  ("scheme", "package", "extra"),
  [("gs", "gcsfs", "flaxshard[gcs]"), ("s3", "s3fs", "flaxshard[s3]")],
)
def test_a_missing_package_names_the_extra(scheme, package, extra, monkeypatch):
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ImportError) as e:
    files.exists(f"{scheme}://bucket/run")
  assert package in str(e.value) and extra in str(e.value)
