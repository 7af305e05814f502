"""Partitioning rules and the PartitionSpecs that they give."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from flaxshard.partitioning.rules import from_config
from flaxshard.partitioning.rules import FSDP
from flaxshard.partitioning.rules import resolve

P = jax.sharding.PartitionSpec
MESH = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
ONE_REPLICA = jax.sharding.AbstractMesh((1, 8), ("replica", "model"))


def array(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def logical(names, *, shape=(8, 32), rules=None):
  return nn.LogicallyPartitioned(array(*shape), names, rules=rules)


PARAMS = {
  "block": {
    "mlp_in": {"kernel": array(8, 32), "bias": array(32)},
    "mlp_out": {"kernel": array(32, 8), "bias": array(8)},
  },
  "embed": {"embedding": array(64, 8)},
  "scale": array(),
}
WITH_AXES = {
  "kernel": nn.Partitioned(array(8, 32), (None, "model")),
  "stack": nn.Partitioned(array(2, 8, 8), ("model", ("replica",))),
  "bias": array(32),
}
LOGICAL = (("mlp", "model"), ("embed", None), ("batch", "replica"))


def split_leaves(specs):
  """Returns the specs that split something, by path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): spec
    for path, spec in jax.tree_util.tree_leaves_with_path(specs)
    if spec != P()
  }


@pytest.mark.parametrize(
  ("rules", "params", "wanted"),
  [
    (None, PARAMS, {}),
    # The first regex that is found sets the spec.
    (
      (
        (r"mlp_in/kernel", P(None, "model")),
        (r"kernel", P("model")),
        (r"^embed/", P(("replica", "model"))),
        (r"in/bias$", P("model")),
      ),
      PARAMS,
      {
        "block/mlp_in/kernel": P(None, "model"),
        "block/mlp_in/bias": P("model"),
        "block/mlp_out/kernel": P("model"),
        "embed/embedding": P(("replica", "model")),
      },
    ),
    # Specs are in their shortest form.
    (
      (("embed", P((), "model")),),
      PARAMS,
      {"embed/embedding": P(None, "model")},
    ),
    # FSDP: of equal dimensions the first; 30 cannot be divided by 4.
    (FSDP(min_size=16), {"w": array(16, 16)}, {"w": P("replica")}),
    (
      FSDP(min_size=16),
      {"w": array(3, 30, 16, 4), "small": array(12)},
      {"w": P(None, None, "replica")},
    ),
    ("fsdp", {"w": array(128, 128), "s": array(127, 128)}, {"w": P("replica")}),
    # It splits what other rules leave, but for what they exclude.
    (
      (
        ("mlp_in/kernel", P(None, "model")),
        ("mlp_out/kernel", P("model")),
        ("mlp_in/bias", P("replica")),
        ("embed", P()),
        FSDP(min_size=8),
      ),
      PARAMS,
      {
        "block/mlp_in/kernel": P("replica", "model"),
        "block/mlp_out/kernel": P("model", "replica"),
        "block/mlp_in/bias": P("replica"),
        "block/mlp_out/bias": P("replica"),
      },
    ),
    # A last rule for all may have no parameters left; FSDP may follow.
    (
      (
        ("kernel|embed|scale", P()),
        ("bias", P("model")),
        (".*", P("replica")),
        FSDP(("model",), min_size=8),
      ),
      PARAMS,
      {"block/mlp_in/bias": P("model"), "block/mlp_out/bias": P("model")},
    ),
    # Metadata with mesh axes, which a regex overrides.
    (
      None,
      WITH_AXES,
      {"kernel": P(None, "model"), "stack": P("model", "replica")},
    ),
    (
      (("bias", P("model")), FSDP(min_size=64)),
      WITH_AXES,
      {
        "kernel": P("replica", "model"),
        "stack": P("model", "replica"),
        "bias": P("model"),
      },
    ),
    # A logical name without a rule may be a mesh axis.
    (None, {"w": logical((None, "model"))}, {"w": P(None, "model")}),
    ((("model", None),), {"w": logical((None, "model"))}, {}),
    (
      (("^w", P("model")), *LOGICAL, FSDP(min_size=64)),
      {
        "w": logical(("embed", "mlp")),
        "v": logical(("embed", "mlp")),
        "bias": array(32),
      },
      {"w": P("model", "replica"), "v": P("replica", "model")},
    ),
  ],
)
def test_rules(rules, params, wanted):
  specs = resolve(rules, MESH, params)
  assert split_leaves(specs) == wanted
  unboxed = jax.tree.map(lambda x: 0, params, is_leaf=nn.meta.is_axis_metadata)
  assert jax.tree.structure(specs) == jax.tree.structure(unboxed)


def test_mesh_axes_of_size_one_are_left_out():
  rules = (("embed", P("replica", "model")), ("mlp_in/k", P(None, "replica")))
  split = {"embed/embedding": P(None, "model")}
  assert split_leaves(resolve(rules, ONE_REPLICA, PARAMS)) == split
  # One replica: there is nothing to split over.
  assert split_leaves(resolve("fsdp", ONE_REPLICA, PARAMS)) == {}


def test_logical_names_follow_given_contextual_and_boxed_rules():
  box = logical(("embed", "mlp"))
  spec = lambda rules, box=box: resolve(rules, MESH, {"w": box})["w"]
  assert spec(LOGICAL) == P(None, "model")
  assert spec(None, box.replace(rules=LOGICAL)) == P(None, "model")
  with nn.logical_axis_rules(LOGICAL):
    assert spec(None) == P(None, "model")
    # Given rules precede those of the context.
    assert spec([("mlp", ["replica", "model"])]) == P(
      None, ("replica", "model")
    )
    assert spec([("mlp", None)]) == P()


def test_logical_names_without_rule_are_unsplit_if_not_strict():
  params = {"w": logical(("mlp", "unknown")), "v": logical(("model", "other"))}
  specs = resolve(LOGICAL, MESH, params, strict=False)
  # As flax.linen.logical_to_mesh_sharding, but for the name of a mesh axis.
  assert specs == {"w": P("model"), "v": P("model")}
  with pytest.raises(ValueError, match="strict=False"):
    resolve(LOGICAL, MESH, params)


def test_arrays_on_the_mesh_keep_their_sharding():
  devices = np.array(jax.devices()).reshape(4, 2)
  mesh, other = (
    jax.sharding.Mesh(grid, ("replica", "model"))
    for grid in (devices, devices[::-1])
  )
  zeros = np.zeros((8, 4))
  put = lambda mesh, *spec: jax.device_put(
    zeros, jax.NamedSharding(mesh, P(*spec))
  )
  params = {
    "split": put(mesh, None, "model"),
    "whole": put(mesh),
    "one_device": jnp.zeros((8, 4)),
    "numpy": zeros,
    # From another mesh a replicated array is moved.
    "other": put(other),
  }
  specs = resolve(None, mesh, params)
  assert split_leaves(specs) == {"split": P(None, "model")}
  wanted = {"split": P("model"), "numpy": P("replica", "model")}
  rules = tuple(wanted.items())
  assert split_leaves(resolve(rules, mesh, params)) == wanted
  batch = {"w": put(other, "model")}
  with pytest.raises(ValueError, match=r"batch\[w\] .*another mesh"):
    resolve(None, mesh, batch, argument="batch")


# -- Mistakes.

MODEL = P("model")
BOTH = P(("replica", "model"))
NAMED = lambda *names: {"w": logical(names)}


@pytest.mark.parametrize(
  ("rules", "params", "facts"),
  [
    ([("(", P())], PARAMS, r"rules\[0\].*'\('.* regex"),
    (FSDP("data"), PARAMS, r"\[0\]=FSDP\(axis='data'.*'model'\)"),
    ([("emb", P("modle"))], PARAMS, r"\[0\].*\[embed/e.*modle.*'model'"),
    ([("em", P(*BOTH, "model"))], PARAMS, r"\[embed/e.*duplicate.*`model`"),
    ([("bias", P(None, "model"))], PARAMS, r"p_in/bias\].*'model'.*rank 1"),
    # 12 cannot be divided by 8.
    ([("w", BOTH)], {"w": array(12, 8)}, r"\[0\].*\[w\].*axis 0.*8 t.*12"),
    ([("k", MODEL), ("in/k", MODEL)], PARAMS, r"\[1\]='in/k'.*rules\[0\]"),
    ([("kernle", P())], PARAMS, r"rules\[0\].*mean 'kernel'\?"),
    ([("mlp", "model")], PARAMS, r"\('mlp', 'model'\).* params"),
    # Not the last regex.
    ([("", P()), (".*", P()), ("", P())], PARAMS, r"\[1\]='\.\*'.*\[0\]"),
    ("fsdp", PARAMS, "min_size=16384.*none of 6 .*'replica': 4"),
    # Of none of the forms.
    (MODEL, PARAMS, r"rules=P\('model'"),
    ([(3, P())], PARAMS, r"rules\[0\]=\(3, P\(\)\)"),
    (["fsdp", ("embed", MODEL)], PARAMS, r"\[0\]='fsdp'.* last"),
    ("fdsp", PARAMS, r"rules\[0\]='fdsp'"),
    (("embed", P()), PARAMS, r"\[0\]='embed' .* sequence of pairs"),
    # Logical names.
    (None, NAMED("embed", "mlp"), r"\[w\].*'embed', 'mlp'.*'embed'.*'model'"),
    (LOGICAL, NAMED("embd", "mlp"), "'embd'.*Did you mean 'embed'"),
    (LOGICAL, NAMED("mlp", "mlp"), r"params\[w\].*more than once"),
    ([("m", ("model", "modle"))], NAMED("m", None), r"\[0\]=\('m'.*modle"),
  ],
)
def test_mistakes(rules, params, facts):
  with pytest.raises(ValueError, match=facts):
    resolve(rules, MESH, params)


# -- Configs.


@pytest.mark.parametrize(
  ("value", "rules"),
  [
    (None, None),
    ({"name": "fsdp", "axis": ["a", "b"]}, FSDP(("a", "b"))),
    ([["k", [None, ["a", "b"]]]], (("k", P(None, ("a", "b"))),)),
    ((("mlp", "model"), ("embed", None)), (("mlp", "model"), ("embed", None))),
    (
      (("k", ("model",)), {"name": "fsdp", "axis": "replica"}),
      (("k", P("model")), FSDP()),
    ),
  ],
)
def test_rules_from_config(value, rules):
  assert from_config(value) == rules
  # A ConfigDict wraps the values.
  config = ml_collections.ConfigDict({"rules": value})
  assert from_config(config.rules) == rules


@pytest.mark.parametrize(
  ("value", "error", "facts"),
  [
    (3, TypeError, "rules=3"),
    ({"name": "fdsp"}, ValueError, "rules.name.*'fdsp'.*'fsdp'"),
    (({"name": "fsdp", "size": 3},), ValueError, r"rules\[0\].*'size'"),
    ("zero", ValueError, r"rules\[0\]='zero'"),
    ((("a", 3),), TypeError, r"rules\[0\]=\('a', 3\)"),
  ],
)
def test_mistakes_in_configs(value, error, facts):
  with pytest.raises(error, match=rf"mesh\.{facts}"):
    from_config(value, argument="mesh.rules")
