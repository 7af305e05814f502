"""Rewrites traced programs, with the programs that their equations hold."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from jax.extend import core


def rewriter(fn: Callable[[Any, Callable[[Any], Any]], Any]) -> Any:
  """Returns a function that rewrites a `Jaxpr` or a `ClosedJaxpr`.

  A program that is called several times, such as a jitted layer, is rewritten
  once and stays one object: JAX lowers it once.

  Args:
    fn: Takes a `Jaxpr` and the returned function, for the programs inside of
      it. It returns the new `Jaxpr`.
  """

  @functools.cache
  def rewrite(jaxpr: Any) -> Any:
    return map_open(lambda opened: fn(opened, rewrite), jaxpr)

  return rewrite


def map_open(fn: Callable[[Any], Any], jaxpr: Any) -> Any:
  """Applies a function of `Jaxpr`s to a `Jaxpr` or a `ClosedJaxpr`."""
  # JAX 0.12 has one class for both.
  if isinstance(jaxpr, core.Jaxpr):
    return fn(jaxpr)
  return jaxpr.replace(jaxpr=fn(jaxpr.jaxpr))


def map_inner(fn: Callable[[Any], Any], value: Any) -> Any:
  """Applies a function to the programs in a parameter of an equation."""
  if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
    return fn(value)
  if type(value) in (tuple, list):
    return type(value)(map_inner(fn, x) for x in value)
  return value
