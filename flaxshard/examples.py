"""The tasks of the example configs, such as `flaxshard.examples.vae`."""

import pathlib

_HERE = pathlib.Path(__file__).parent
# The wheel has the files in the package; in a checkout they stand beside it.
_PLACES = (_HERE / "examples", _HERE.parent / "examples")

__path__ = [str(next(place for place in _PLACES if place.is_dir()))]
