"""The largest buffers at the peak of a program."""

import jax
import jax.numpy as jnp
import pytest

from flaxshard.compiled import buffers
from flaxshard.compiled import largest_buffers


def _compile(function, *shapes, donate=()):
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def _loss(params, x):
  for w in params["layers"]:
    x = jnp.tanh(x @ w)
  return (x**2).mean()


def _update(params, x):
  grads = jax.grad(_loss)(params, x)
  return jax.tree.map(lambda w, g: w - g, params, grads)


def _scanned(params, x):
  def body(x, w):
    return jnp.tanh(x @ w), None

  return jax.lax.scan(body, x, params)[0].sum()


def test_arguments_and_temporaries_of_a_step():
  shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
  params = {"layers": [shape] * 4}
  x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
  compiled = jax.jit(_update, donate_argnums=0).lower(params, x).compile()
  memory = compiled.memory_analysis()
  peak = buffers.peak_memory(compiled)
  assert peak.arguments == memory.argument_size_in_bytes
  assert peak.outputs == 0
  # XLA also puts temporaries into donated arguments that are read early.
  assert peak.temporaries == pytest.approx(memory.temp_size_in_bytes, rel=0.3)
  largest = largest_buffers(compiled, 3)
  assert largest == peak.buffers[:3]
  assert [b.nbytes for b in largest] == [256 * 128 * 4] * 3
  by_kind = {b.kind: b for b in peak.buffers}
  origins = {b.origin for b in peak.buffers if b.kind == "argument"}
  assert origins == {"x", *(f"params['layers'][{i}]" for i in range(4))}
  temporary = by_kind["temporary"]
  assert temporary.source.startswith("tests/compiled/buffers_test.py:")


def test_an_output_without_donation_needs_memory_of_its_own():
  compiled = _compile(lambda x: x + 1, (1000,))
  kinds = [(b.kind, b.nbytes) for b in largest_buffers(compiled)]
  assert sorted(kinds) == [("argument", 4000), ("output", 4000)]
  compiled = _compile(lambda x: x + 1, (1000,), donate=0)
  assert [b.kind for b in largest_buffers(compiled)] == ["argument"]


def test_a_loop_carries_its_state_in_one_buffer():
  gradient = jax.grad(_scanned)
  compiled = _compile(gradient, (6, 64, 64), (512, 64))
  memory = compiled.memory_analysis()
  peak = buffers.peak_memory(compiled)
  assert peak.temporaries == pytest.approx(memory.temp_size_in_bytes, rel=0.1)
  # The inputs of all layers are kept for the backward pass.
  assert peak.buffers[0].shape == "f32[6,512,64]"
  assert "scan" in peak.buffers[0].origin or "while" in peak.buffers[0].origin


def test_the_count_must_be_positive():
  with pytest.raises(ValueError, match=r"count must be at least 1, got 0"):
    largest_buffers(_compile(lambda x: x + 1, (2,)), 0)
