import jax
import jax.numpy as jnp
import pytest

from flaxshard.analysis.model_flops import count_flops


def count(fn, *shapes):
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return count_flops(jax.jit(fn).trace(*args).jaxpr)


def test_batched_product():
  fn = lambda x, y: jnp.einsum("bij,bjk->bik", x, y)
  assert count(fn, (3, 5, 7), (3, 7, 11)).model == 2 * 3 * 5 * 7 * 11


def convolve(x, kernel, stride=2):
  return jax.lax.conv_general_dilated(
    x,
    kernel,
    (stride, stride),
    "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )


@pytest.mark.parametrize("stride", [1, 2])
def test_backward_pass_of_a_convolution_has_twice_the_operations(stride):
  loss = lambda x, kernel: jnp.sum(convolve(x, kernel, stride) ** 2)
  shapes = (2, 8, 8, 3), (3, 3, 3, 16)
  forward = 2 * 2 * (8 // stride) ** 2 * 9 * 3 * 16
  assert count(loss, *shapes).model == forward
  both = count(jax.grad(loss, (0, 1)), *shapes)
  assert both.model == 3 * forward


def test_scan_counts_its_turns_and_rematerialization_is_apart():
  def loss(weights, x):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    return jnp.sum(jax.lax.scan(body, x, weights)[0])

  flops = count(jax.grad(loss, (0, 1)), (10, 8, 8), (4, 8))
  forward = 10 * 2 * 4 * 8 * 8
  assert (flops.model, flops.repeated) == (3 * forward, forward)
  assert flops.exact


def test_conditional_counts_its_largest_branch():
  fn = lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x)
  assert count(fn, (4, 4)).model == 2 * 4**3


def test_loop_of_unknown_length_counts_one_turn():
  fn = lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)
  flops = count(fn, (4, 4))
  assert (flops.model, flops.exact) == (2 * 4**3, False)


def test_shard_map_counts_all_devices():
  mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
  spec = jax.sharding.PartitionSpec("data")
  fn = jax.shard_map(
    lambda x: x @ x.T @ x, mesh=mesh, in_specs=spec, out_specs=spec
  )
  # On each of two devices [2, 4] times [4, 2], and [2, 2] times [2, 4].
  assert count(fn, (4, 4)).model == 2 * (2 * 2 * 4 * 2 + 2 * 2 * 2 * 4)


def test_custom_derivative_counts_once():
  @jax.custom_vjp
  def product(x):
    return x @ x

  product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
  one = 2 * 4**3
  assert count(lambda x: jnp.sum(product(x)), (4, 4)).model == one
  assert count(jax.grad(lambda x: jnp.sum(product(x))), (4, 4)).model == 3 * one
