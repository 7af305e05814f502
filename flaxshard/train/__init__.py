"""The training loop that `python -m flaxshard` runs."""

from etils import epy

# Imported when asked for: a config needs neither Orbax nor Grain.
with epy.lazy_api_imports(globals()):
  from flaxshard.train.hooks import HookError
  from flaxshard.train.loop import train_and_evaluate

__all__ = ["HookError", "train_and_evaluate"]
