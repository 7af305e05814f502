"""Runs of these tests draw no pictures, each of which takes half a second."""

import pytest

from flaxshard.train import report


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(report, "draw", lambda *args: None)
    yield
