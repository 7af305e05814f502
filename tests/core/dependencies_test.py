"""Which outputs of a program depend on which inputs."""

import jax
import jax.numpy as jnp
import pytest

from flaxshard.core import dependencies

ONES = jnp.ones(3)


def find(fn, *names):
  program = jax.make_jaxpr(fn)(*[ONES] * len(names))
  return ["".join(sorted(found)) for found in dependencies.find(program, names)]


@pytest.mark.parametrize(
  ("fn", "expected"),
  [
    (lambda x, y: (x, 2 * y, x / y.sum(), 1.0), ["x", "y", "xy", ""]),
    (lambda x, y: jax.jit(lambda a, b: (b, a))(x, y), ["y", "x"]),
    (lambda x, y: jax.lax.optimization_barrier((x, y)), ["x", "y"]),
    (lambda x, y: (jax.nn.relu(x), jax.nn.silu(y)), ["x", "y"]),
    (
      lambda x, y: jax.lax.cond(
        x[0] > 0, lambda: (x, y), lambda: (x + 1, y + 1)
      ),
      ["x", "xy"],
    ),
    # Of a loop all depend on all.
    (
      lambda x, y: jax.lax.fori_loop(0, 2, lambda i, c: (-c[0], -c[1]), (x, y)),
      ["xy", "xy"],
    ),
  ],
)
def test_dependencies(fn, expected):
  assert find(fn, "x", "y") == expected


def test_inputs_without_a_name_do_not_matter():
  assert find(lambda x, y: x + y, "x", None) == ["x"]
