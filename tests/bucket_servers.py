"""Local servers of Google Cloud Storage and of S3."""

from collections.abc import Iterator
import contextlib
import gc
import hashlib
from http import server
from importlib import util
import pathlib
import subprocess
import sys
import threading
from urllib import parse

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def start() -> Iterator[None]:
  """Starts a server of Google with a bucket; sets the environment to use it.

  Skips the tests if the packages of the extra `test-buckets` are missing.
  """
  # gcsfs reads its environment when it is imported.
  if not all(map(util.find_spec, ("gcp_storage_emulator", "gcsfs"))):
    pytest.skip("needs flaxshard[test-buckets]")
  program = pathlib.Path(__file__).parent / "gcs_server.py"
  process = subprocess.Popen(
    [sys.executable, str(program), BUCKET],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  try:
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
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
    process.kill()
    process.communicate()


class _S3(server.BaseHTTPRequestHandler):
  """S3 with conditional writes.

  Buckets are in the path. An ETag is a digest of the content, as in S3: the
  same content written again has the same one.
  """

  protocol_version = "HTTP/1.1"
  # Otherwise a body waits 40 ms for the client to acknowledge the headers.
  disable_nagle_algorithm = True

  def _respond(self) -> None:
    url = parse.urlparse(self.path)
    name = parse.unquote(url.path).strip("/")
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    with self.server.lock:
      if "/" in name:
        status, body = self._do(name, body)
        self.server.requests.append((self.command, name, status))
      else:
        status, body = 200, self._list(name, dict(parse.parse_qsl(url.query)))
    self.send_response(status)
    if body is not None:
      self.send_header("ETag", _etag(body))
    answer = (body or b"") if self.command == "GET" else b""
    self.send_header("Content-Length", str(len(answer)))
    self.end_headers()
    self.wfile.write(answer)

  do_GET = do_HEAD = do_PUT = do_DELETE = _respond

  def _do(self, name: str, body: bytes) -> tuple[int, bytes | None]:
    """Returns the status and the content of an object after a request."""
    objects: dict[str, bytes] = self.server.objects
    found = objects.get(name)
    wanted, unwanted = self.headers["If-Match"], self.headers["If-None-Match"]
    if found is None and (wanted or self.command in ("GET", "HEAD")):
      return 404, None
    if found is not None and (wanted or _etag(found)) != _etag(found):
      return 412, None
    if found is not None and unwanted in ("*", _etag(found)):
      return 304 if self.command in ("GET", "HEAD") else 412, None
    if self.command == "DELETE":
      objects.pop(name, None)
      return 204, None
    if self.command == "PUT":
      objects[name] = found = body
    return 200, found

  def _list(self, bucket: str, query: dict[str, str]) -> bytes:
    """Returns the answer of ListObjectsV2."""
    names = [name.removeprefix(f"{bucket}/") for name in self.server.objects]
    contents = "".join(
      f"<Contents><Key>{name}</Key></Contents>"
      for name in sorted(names)
      if name.startswith(query.get("prefix", ""))
      and name > query.get("start-after", "")
    )
    return f"<ListBucketResult>{contents}</ListBucketResult>".encode()

  log_message = lambda *args: None


def _etag(content: bytes) -> str:
  return f'"{hashlib.md5(content).hexdigest()}"'


@contextlib.contextmanager
def start_s3() -> Iterator[server.ThreadingHTTPServer]:
  """Starts a server of S3, and sets the environment to use it.

  Its `requests` are the method, the object and the status of each.
  """
  httpd = server.ThreadingHTTPServer(("127.0.0.1", 0), _S3)
  httpd.daemon_threads = True
  httpd.objects, httpd.requests, httpd.lock = {}, [], threading.Lock()
  threading.Thread(target=httpd.serve_forever, args=(0.01,)).start()
  with pytest.MonkeyPatch.context() as patch:
    url = f"http://127.0.0.1:{httpd.server_port}"
    patch.setenv("AWS_ENDPOINT_URL", url)
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    yield httpd
  httpd.shutdown()
  httpd.server_close()
