"""The TrainState: its creation from a model and its shardings on a mesh."""

from flaxshard.state.create import create_train_state
from flaxshard.state.train_state import TrainState

__all__ = ["TrainState", "create_train_state"]
