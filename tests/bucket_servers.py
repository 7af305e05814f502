"""Starts local servers of Google Cloud Storage and S3 for a test file."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def start() -> Iterator[None]:
  """Starts both servers with a bucket, and sets the environment to use them.

  Skips the tests if the packages of the extra `test-buckets` are missing.
  """
  for package in ("gcp_storage_emulator", "moto.server", "gcsfs", "s3fs"):
    pytest.importorskip(package, reason="needs flaxshard[test-buckets]")
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    s3_port = s.getsockname()[1]
  gcs_server = pathlib.Path(__file__).parent / "gcs_server.py"
  commands = (
    [str(gcs_server), BUCKET],
    ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(s3_port)],
  )
  servers = [
    subprocess.Popen(
      [sys.executable, *command],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    for command in commands
  ]
  try:
    gcs_url = f"http://127.0.0.1:{int(servers[0].stdout.readline())}"
    _wait_for_port(servers[1], s3_port)
    with pytest.MonkeyPatch.context() as patch:
      for name, value in {
        "STORAGE_EMULATOR_HOST": gcs_url,
        "TENSORSTORE_GCS_HTTP_URL": gcs_url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        # gcsfs would look for credentials at each of its calls.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
      }.items():
        patch.setenv(name, value)
      from flaxshard.core import files

      files.filesystem("s3://").mkdir(BUCKET)
      yield
  finally:
    for server in servers:
      server.kill()
      server.communicate()


def _wait_for_port(server: subprocess.Popen, port: int) -> None:
  deadline = time.monotonic() + 60
  while True:
    assert server.poll() is None and time.monotonic() < deadline
    with contextlib.suppress(OSError):
      socket.create_connection(("127.0.0.1", port)).close()
      return
    time.sleep(0.1)


def child_environment(**variables: str) -> dict[str, str]:
  """Returns the environment of a program on CPU that uses the servers."""
  return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
