"""A server of Google Cloud Storage for tests, with generation preconditions.

`gcp-storage-emulator` ignores preconditions and the bounds of a list, answers
one request at a time and omits the header of an object's generation. This
program adds them:

    python gcs_server.py BUCKET [ADDRESS]

It prints its port.
"""

import functools
from http import server
import io
import json
import re
import sys
import threading
from urllib import parse

from gcp_storage_emulator import exceptions
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator import storage as storage_lib
from gcp_storage_emulator.handlers import buckets

_OBJECT = re.compile(r".*/b/([^/]+)/o(?:/(.+))?")
# In the first part of a multipart upload.
_NAME = re.compile(rb'"name": ?("[^"]+")')
_lock = threading.Lock()


class _Storage(storage_lib.Storage):
  bounds: tuple[str | None, str | None] = None, None

  def get_file_list(self, *args, **kwargs):
    found, prefixes = super().get_file_list(*args, **kwargs)
    start, end = self.bounds
    return [
      x
      for x in found
      if (start is None or x["name"] >= start)
      and (end is None or x["name"] < end)
    ], prefixes


class _Handler(emulator.RequestHandler):
  protocol_version = "HTTP/1.1"
  # Otherwise a body waits 40 ms for the client to acknowledge the headers.
  disable_nagle_algorithm = True

  def _respond(self, method: str) -> None:
    url = parse.urlparse(self.path)
    query = dict(parse.parse_qsl(url.query))
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    if query.get("uploadType") == "multipart":
      query["name"] = json.loads(_NAME.search(body)[1])
    # Kept open: the connection stays open for the next request.
    connection = self.rfile, self.wfile
    self.rfile, self.wfile = io.BytesIO(body), io.BytesIO()
    try:
      self._check_and_handle(method, url.path, query)
    finally:
      answer = self.wfile.getvalue()
      self.rfile, self.wfile = connection
    # Without the lock: a client on a slow link holds no other one up.
    self.wfile.write(answer)

  def _check_and_handle(
    self, method: str, path: str, query: dict[str, str]
  ) -> None:
    with _lock:
      self._generation = generation = self._find_generation(path, query)
      wanted = query.get("ifGenerationMatch", generation)
      unwanted = query.get("ifGenerationNotMatch")
      if wanted == generation and unwanted != generation:
        self.storage.bounds = query.get("startOffset"), query.get("endOffset")
        emulator.Router(self).handle(method)
        return
    self.send_response(304 if method == "GET" and unwanted else 412)
    self.send_header("Content-Length", "0")
    self.end_headers()

  def _find_generation(self, path: str, query: dict[str, str]) -> str:
    match = _OBJECT.fullmatch(path)
    name = match and (parse.unquote(match[2] or "") or query.get("name"))
    if not name:
      return "0"
    try:
      return self.storage.get_file_obj(match[1], name)["generation"]
    except exceptions.NotFound:
      return "0"

  def end_headers(self) -> None:
    if self.command == "GET" and self._generation != "0":
      self.send_header("x-goog-generation", self._generation)
    super().end_headers()

  do_GET = functools.partialmethod(_respond, "GET")
  do_POST = functools.partialmethod(_respond, "POST")
  do_PUT = functools.partialmethod(_respond, "PUT")
  do_DELETE = functools.partialmethod(_respond, "DELETE")
  do_PATCH = functools.partialmethod(_respond, "PATCH")

  def log_message(self, *args) -> None:
    pass


def main() -> None:
  storage = _Storage(use_memory_fs=True)
  buckets.create_bucket(sys.argv[1], storage)
  address = sys.argv[2] if sys.argv[2:] else "127.0.0.1"
  httpd = server.ThreadingHTTPServer(
    (address, 0), functools.partial(_Handler, storage)
  )
  httpd.daemon_threads = True
  print(httpd.server_port, flush=True)
  httpd.serve_forever()


if __name__ == "__main__":
  main()
