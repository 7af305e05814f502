"""Counts the hosts of the Cloud TPU slices that this machine belongs to.

JAX's own detection connects them; flaxshard only has to know whether there are
several.

References:
  https://docs.cloud.google.com/tpu/docs/jax-pods
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import re
import urllib.error
import urllib.request

_METADATA_URL = (
  "http://{host}/computeMetadata/v1/instance/attributes/{attribute}"
)


def read_metadata(host: str, attribute: str) -> str:
  """Returns an attribute of this virtual machine, "" if it has none.

  Args:
    host: Google Cloud's metadata server.
    attribute: Name of the attribute.
  """
  request = urllib.request.Request(
    _METADATA_URL.format(host=host, attribute=attribute),
    headers={"Metadata-Flavor": "Google"},
  )
  try:
    with urllib.request.urlopen(request, timeout=10) as response:
      return response.read().decode()
  except (urllib.error.URLError, TimeoutError):
    return ""


def num_hosts(
  environ: Mapping[str, str],
  read: Callable[[str, str], str] = read_metadata,
) -> int:
  """Returns the number of hosts, over all slices; 0 without TPUs.

  Args:
    environ: The environment variables, after JAX was imported.
    read: Reads an attribute of the virtual machine.

  Example:
    >>> num_hosts({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a,b"})
    2
  """
  # JAX sets it while it is imported, where it finds TPU chips and libtpu.
  if environ.get("TPU_ML_PLATFORM") != "JAX":
    return 0
  asks_server = "TPU_SKIP_MDS_QUERY" not in environ
  server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
  hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get(
    "TPU_WORKER_HOSTNAMES", ""
  )
  if not hosts and "TPU_PROCESS_ADDRESSES_PATH" in environ:
    with open(environ["TPU_PROCESS_ADDRESSES_PATH"], encoding="utf-8") as f:
      hosts = f.read().strip()
  if not hosts and asks_server:
    hosts = read(server, "worker-network-endpoints")
  slices = environ.get("MEGASCALE_NUM_SLICES", "")
  if not slices and asks_server:
    # A line such as MEGASCALE_NUM_SLICES: '2'.
    match = re.search(
      r"^MEGASCALE_NUM_SLICES:\s*'?(\d+)", read(server, "tpu-env"), re.M
    )
    slices = match[1] if match else ""
  return len(hosts.split(",")) * int(slices or 1)
