"""Objects in buckets that are written if they have a certain version.

TensorStore does it by a generation in Google Cloud Storage, and by an ETag in
S3. So of several programs that replace one version, only one succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import tensorstore as ts

from flaxshard.core import files

# Seconds that a request may take.
_REQUEST_SECONDS = 10.0


def open_object(path: str) -> ts.KvStore:
  """Returns the store of one object.

  Args:
    path: Path of the object in a bucket.
  """
  context = {
    f"{driver}_request_retries": {"max_retries": 4, "max_delay": "2s"}
    for driver in ("gcs", "s3")
  }
  spec = {**files.tensorstore_spec(path), "context": context}
  if spec["driver"] == "s3":
    spec["use_conditional_write"] = True
  with _as_oserror():
    return ts.KvStore.open(spec).result(timeout=_REQUEST_SECONDS)


def read(store: ts.KvStore) -> Any:
  """Returns the object: its `state`, its `value`, and its version."""
  with _as_oserror():
    return store.read("").result(timeout=_REQUEST_SECONDS)


def write(
  store: ts.KvStore,
  content: bytes | None,
  version: bytes,
  is_own: Callable[[bytes], bool],
) -> bytes | None:
  """Writes the object if it has the given version.

  Args:
    store: The object.
    content: The new content, different from any other; None deletes the object.
    version: The version to replace, or that of a missing object.
    is_own: Returns whether this process has written a content.

  Returns:
    The new version, or None if the object has another version.

  Raises:
    OSError: The object cannot be read or written.
  """
  with _as_oserror():
    stamp = store.write("", content, if_equal=version).result(
      timeout=_REQUEST_SECONDS
    )
  if stamp.generation:
    return stamp.generation
  now = read(store)
  # After a lost answer, this process has replaced the version itself.
  return now.stamp.generation if is_own(now.value) else None


@contextlib.contextmanager
def _as_oserror() -> Iterator[None]:
  """Raises the errors of TensorStore, which have several types, as OSErrors."""
  try:
    yield
  except Exception as e:
    raise OSError(f"{type(e).__name__}: {e}") from e
