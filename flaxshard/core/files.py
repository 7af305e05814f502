"""Files and directories, on a file system or in a bucket.

Paths that begin with `gs://` or `s3://` are read and written through fsspec
(gcsfs and s3fs), as `etils.epath` does for Orbax. All other paths go to `os`.
A bucket has no directories: one exists as long as an object begins with its
name. Writing an object is atomic, and renaming copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import io
import os
from typing import Any, IO

# Scheme: the protocol of fsspec, the packages to import, and our extra.
_SCHEMES = {
  "gs": ("gcs", ("gcsfs", "google.cloud.storage"), "gcs"),
  "s3": ("s3", ("s3fs",), "s3"),
}

Path = str | os.PathLike[str]


def is_bucket(path: Path) -> bool:
  """Returns whether a path is in a bucket: `gs://...` or `s3://...`."""
  return os.fspath(path).partition("://")[0] in _SCHEMES


def absolute(path: Path) -> str:
  """Returns an absolute path without a slash at its end.

  Args:
    path: A path; `~` is the home directory.

  Example:
    >>> absolute("gs://bucket/run/")
    'gs://bucket/run'
  """
  name = os.fspath(path)
  if is_bucket(name):
    scheme, _, rest = name.partition("://")
    return f"{scheme}://{os.path.normpath(rest)}"
  if "://" in name:
    return name  # for a message: it can be neither read nor written
  return os.path.abspath(os.path.expanduser(name))


def exists(path: Path) -> bool:
  """Returns whether a path exists; a link that leads nowhere does not."""
  if not is_bucket(path):
    return os.path.exists(path)
  return _call(path, lambda fs, name: fs.exists(name))


def lexists(path: Path) -> bool:
  """Returns whether a path exists; a link that leads nowhere does, too."""
  return exists(path) if is_bucket(path) else os.path.lexists(path)


def is_dir(path: Path) -> bool:
  """Returns whether a path is a directory."""
  if not is_bucket(path):
    return os.path.isdir(path)
  return _call(path, lambda fs, name: fs.isdir(name))


def is_file(path: Path) -> bool:
  """Returns whether a path is a file."""
  if not is_bucket(path):
    return os.path.isfile(path)
  return _call(path, lambda fs, name: fs.isfile(name))


def list_names(directory: Path) -> list[str]:
  """Returns the names of the entries of a directory.

  Raises:
    OSError: There is no such directory, or it cannot be read.
  """
  if not is_bucket(directory):
    return os.listdir(directory)
  listed = _call(directory, lambda fs, name: fs.ls(name, detail=False))
  names = {os.path.basename(path.rstrip("/")) for path in listed}
  # Some tools create an empty object named as the directory, with a slash.
  return sorted(names - {os.path.basename(absolute(directory))})


def find(directory: Path) -> dict[str, dict[str, Any]]:
  """Returns the objects in a directory of a bucket, in one listing.

  Args:
    directory: Path of a directory in a bucket.

  Returns:
    What the bucket tells of each object, such as `size`, by its full path.
  """
  scheme = os.fspath(directory).partition("://")[0]
  found = _call(directory, lambda fs, name: fs.find(name, detail=True))
  return {
    f"{scheme}://{path}": info
    for path, info in sorted(found.items())
    if not path.endswith("/")
  }


def files_in(directory: Path) -> list[str]:
  """Returns the paths of all files below a directory."""
  if is_bucket(directory):
    return list(find(directory))
  return [
    os.path.join(folder, name)
    for folder, _, names in os.walk(directory)
    for name in names
  ]


def size(path: Path) -> int:
  """Returns the number of bytes of a file."""
  if not is_bucket(path):
    return os.path.getsize(path)
  return int(_call(path, lambda fs, name: fs.info(name))["size"])


def open_to_read(path: Path) -> IO[bytes]:
  """Opens a file to read its bytes, without a buffer on a file system."""
  if not is_bucket(path):
    return open(path, "rb", buffering=0)
  return _call(path, lambda fs, name: fs.open(name, "rb"))


def read_bytes(path: Path) -> bytes:
  """Returns the content of a file."""
  if not is_bucket(path):
    with open(path, "rb") as f:
      return f.read()
  return _call(path, lambda fs, name: fs.cat_file(name))


def write_bytes(path: Path, content: bytes) -> None:
  """Writes a file; in a bucket, a reader sees the old or the new content."""
  if not is_bucket(path):
    with open(path, "wb") as f:
      f.write(content)
  else:
    _call(path, lambda fs, name: fs.pipe_file(name, content))


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
  """Opens a file of text that replaces `path` when the `with` block ends.

  After an error or a kill, `path` has its old content.

  Example:
    >>> import tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "file")
    >>> with atomic_write(path) as f:
    ...   written = f.write("text")
    >>> read_bytes(path)
    b'text'
  """
  if is_bucket(path):
    buffer = io.StringIO()
    yield buffer
    write_bytes(path, buffer.getvalue().encode())
    return
  temporary = f"{os.fspath(path)}.tmp"
  with add_filename_to_oserror(temporary), open(temporary, "w") as f:
    yield f
  # Atomic: a reader sees the old or the new content, never a part.
  os.replace(temporary, path)


@contextlib.contextmanager
def add_filename_to_oserror(path: str) -> Iterator[None]:
  """Adds the file name to an OSError that lacks one, as on a full disk."""
  try:
    yield
  except OSError as e:
    if e.filename is None:
      e.filename = path
    raise


def check_bucket(path: Path) -> None:
  """Raises an OSError unless the bucket of a path exists and can be described.

  In `gs://` buckets, Orbax asks for the description too, and so needs the
  permission `storage.buckets.get`.
  """
  name = _name_of(path).partition("/")[0]
  if os.fspath(path).startswith("gs://"):
    from google.cloud import storage
    from google.cloud.storage import retry

    few_attempts = retry.DEFAULT_RETRY.with_timeout(15.0)
    try:
      storage.Client().get_bucket(name, timeout=10.0, retry=few_attempts)
    except Exception as e:  # google.auth and google.api_core share no base
      raise OSError(f"bucket {name!r}: {e}") from e
  elif not _call(path, lambda fs, _: fs.exists(name)):
    raise OSError(f"there is no bucket {name!r}, or no permission to list it")


def make_dirs(directory: Path) -> None:
  """Creates a directory and its parents; does nothing in a bucket."""
  if not is_bucket(directory):
    os.makedirs(directory, exist_ok=True)


def remove(path: Path) -> None:
  """Removes a file."""
  if is_bucket(path):
    _call(path, lambda fs, name: fs.rm_file(name))
  else:
    os.remove(path)


def copy_files(directory: str, new_path: Path) -> None:
  """Copies all files below a directory of a file system to another place."""
  for path in files_in(directory):
    name = os.path.relpath(path, directory)
    write_bytes(os.path.join(new_path, name), read_bytes(path))


def rename(directory: Path, new_path: Path) -> None:
  """Renames a directory; in a bucket, copies its objects and removes them."""
  if not is_bucket(directory):
    os.rename(directory, new_path)
    return
  old, new = _name_of(directory), _name_of(new_path)

  def copy(fs: Any, name: str) -> None:
    fs.cp_file(name, new + name.removeprefix(old))

  for path in find(directory):
    _call(path, copy)
  remove_tree(directory)


def remove_tree(directory: Path) -> None:
  """Removes all objects of a directory in a bucket."""
  for path in find(directory):
    with contextlib.suppress(FileNotFoundError):
      remove(path)


def filesystem(path: Path) -> Any:
  """Returns fsspec's file system of a path in a bucket.

  Raises:
    ImportError: Its package is not installed; the message names our extra.
  """
  protocol, packages, extra = _SCHEMES[os.fspath(path).partition("://")[0]]
  try:
    import fsspec

    for package in packages:
      __import__(package)
  except ImportError as e:
    raise ImportError(
      f"{os.fspath(path)!r} needs the package {e.name}: "
      f"pip install 'flaxshard[{extra}]'."
    ) from e
  # Other processes and TensorStore write in the bucket, so a list of objects
  # that was kept in memory would be outdated. epath's instance shares this.
  settings = fsspec.config.conf.setdefault(protocol, {})
  settings.setdefault("use_listings_cache", False)
  return fsspec.filesystem(protocol)


def tensorstore_spec(path: Path) -> dict[str, Any]:
  """Returns TensorStore's specification of a key-value store in a bucket.

  Args:
    path: The path that the keys are appended to.
  """
  bucket, _, name = _name_of(path).partition("/")
  if os.fspath(path).startswith("gs://"):
    return {"driver": "gcs", "bucket": bucket, "path": name}
  spec = {"driver": "s3", "bucket": bucket, "path": name}
  # s3fs reads these variables itself; TensorStore does not.
  endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
    "AWS_ENDPOINT_URL"
  )
  region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
  if endpoint:
    spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
  return spec


def _call(path: Path, function: Callable[[Any, str], Any]) -> Any:
  """Calls a function with the file system of a bucket and a path in it.

  Raises:
    OSError: The function failed.
  """
  fs = filesystem(path)
  try:
    return function(fs, _name_of(path))
  except OSError as e:
    if e.filename is None:
      e.filename = os.fspath(path)
    raise
  # gcsfs and the libraries below it have exceptions of their own.
  except Exception as e:
    raise OSError(f"{os.fspath(path)}: {e}") from e


def _name_of(path: Path) -> str:
  """Returns the bucket and the name in it, without the scheme."""
  return os.fspath(path).partition("://")[2]
