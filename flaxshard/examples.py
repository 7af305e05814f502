"""The tasks of the example configs, such as `flaxshard.examples.vae`."""

import pathlib

_PACKAGED = pathlib.Path(__file__).parent / "examples"

# The wheel has the files in the package; in a checkout they stand beside it.
__path__ = [
  str(
    _PACKAGED
    if _PACKAGED.is_dir()
    else pathlib.Path(__file__).parents[1] / "examples"
  )
]
