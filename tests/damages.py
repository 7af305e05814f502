"""Ways to damage a file of a step."""

import pathlib

# Orbax writes these two of a step last; nothing reads them.
MARKS = ["commit_success.txt", "flaxshard/commit_success.txt"]


def truncated_to_half(file: pathlib.Path):
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def truncated_to_nothing(file: pathlib.Path):
  file.write_bytes(b"")


def flipped(file: pathlib.Path):
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def removed(file: pathlib.Path):
  file.unlink()


ALL = [truncated_to_half, truncated_to_nothing, flipped, removed]
