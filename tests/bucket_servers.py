"""Starts a local server of Google Cloud Storage for a test file."""

from collections.abc import Iterator
import contextlib
import gc
from importlib import util
import pathlib
import subprocess
import sys

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def start() -> Iterator[None]:
  """Starts the server with a bucket, and sets the environment to use it.

  Skips the tests if the packages of the extra `test-buckets` are missing.
  """
  # gcsfs reads its environment when it is imported.
  if not all(map(util.find_spec, ("gcp_storage_emulator", "gcsfs"))):
    pytest.skip("needs flaxshard[test-buckets]")
  program = pathlib.Path(__file__).parent / "gcs_server.py"
  server = subprocess.Popen(
    [sys.executable, str(program), BUCKET],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  try:
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    with pytest.MonkeyPatch.context() as patch:
      for name, value in {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        # gcsfs would look for credentials at each of its calls.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
      }.items():
        patch.setenv(name, value)
      from flaxshard.core import files

      files.absolute(f"gs://{BUCKET}")  # sets options of gcsfs
      yield
  finally:
    # What is garbage may have a file in the bucket, and closes it here.
    gc.collect()
    server.kill()
    server.communicate()
