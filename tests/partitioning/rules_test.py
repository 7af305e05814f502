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


def logical(*names):
  return nn.LogicallyPartitioned(array(8, 32), names)


PARAMS = {
  "mlp": {
    "in": {"kernel": array(8, 32), "bias": array(32)},
    "out": {"kernel": array(32, 8), "bias": array(8)},
  },
  "embed": array(64, 8),
  "scale": array(),
}
WITH_AXES = {
  "kernel": nn.Partitioned(array(8, 32), (None, "model")),
  "stack": nn.Partitioned(array(2, 8, 8), ("model", ("replica",))),
  "bias": array(32),
}
WITH_NAMES = {
  "w": logical("embed", "mlp"),
  "v": logical("embed", "mlp"),
  "bias": array(32),
}
LOGICAL = (("mlp", "model"), ("embed", None), ("batch", "replica"))
MODEL = P("model")
BOTH = P(("replica", "model"))


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
    # The first regex that is found sets the spec, in its shortest form.
    (
      (("in/k", P((), "model")), ("kernel", MODEL), ("^em", BOTH)),
      PARAMS,
      {"mlp/in/kernel": P(None, "model"), "mlp/out/kernel": MODEL}
      | {"embed": BOTH},
    ),
    # FSDP: of equal dimensions the first; 30 cannot be divided by 4.
    (
      FSDP(min_size=16),
      {"w": array(4, 4), "x": array(3, 30, 16, 4), "small": array(12)},
      {"w": P("replica"), "x": P(None, None, "replica")},
    ),
    ("fsdp", {"w": array(128, 128), "s": array(127, 128)}, {"w": P("replica")}),
    # It splits what other rules leave, but for what they exclude.
    (
      (
        ("in/kernel", P(None, "model")),
        ("out/kernel", MODEL),
        ("in/bias", P("replica")),
        ("embed", P()),
        FSDP(min_size=8),
      ),
      PARAMS,
      {
        "mlp/in/kernel": P("replica", "model"),
        "mlp/out/kernel": P("model", "replica"),
        "mlp/in/bias": P("replica"),
        "mlp/out/bias": P("replica"),
      },
    ),
    # A last rule for all may have no parameters left; FSDP may follow.
    (
      (
        ("kernel|embed|scale", P()),
        ("bias", MODEL),
        (".*", P("replica")),
        FSDP(("model",), min_size=8),
      ),
      PARAMS,
      {"mlp/in/bias": MODEL, "mlp/out/bias": MODEL},
    ),
    # Metadata with mesh axes.
    (
      (("bias", MODEL), FSDP(min_size=64)),
      WITH_AXES,
      {"kernel": P("replica", "model"), "stack": P("model", "replica")}
      | {"bias": MODEL},
    ),
    # A regex overrides it.
    ((("k", MODEL),), {"k": WITH_AXES["kernel"]}, {"k": MODEL}),
    # A logical name without a rule may be a mesh axis.
    (None, {"w": logical(None, "model")}, {"w": P(None, "model")}),
    ((("model", None),), {"w": logical(None, "model")}, {}),
    (
      (("^w", MODEL), *LOGICAL, FSDP(min_size=64)),
      WITH_NAMES,
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
  rules = (("embed", P("replica", "model")), ("in/k", P(None, "replica")))
  specs = resolve(rules, ONE_REPLICA, PARAMS)
  assert split_leaves(specs) == {"embed": P(None, "model")}
  # One replica: there is nothing to split over.
  assert split_leaves(resolve("fsdp", ONE_REPLICA, PARAMS)) == {}


def test_logical_names_follow_given_contextual_and_boxed_rules():
  box = logical("embed", "mlp")
  spec = lambda rules, box=box: resolve(rules, MESH, {"w": box})["w"]
  assert spec(LOGICAL) == P(None, "model")
  assert spec(None, box.replace(rules=LOGICAL)) == P(None, "model")
  with nn.logical_axis_rules(LOGICAL):
    assert spec(None) == P(None, "model")
    # Given rules precede those of the context.
    assert spec([("mlp", ["replica", "model"])]) == P(None, *BOTH)
    assert spec([("mlp", None)]) == P()


def test_logical_names_without_rule_are_unsplit_if_not_strict():
  params = {"w": logical("mlp", "unknown"), "v": logical("model", "other")}
  specs = resolve(LOGICAL, MESH, params, strict=False)
  # As flax.linen.logical_to_mesh_sharding, but for the name of a mesh axis.
  assert specs == {"w": MODEL, "v": MODEL}


# -- Mistakes.

ELSEWHERE = jax.device_put(
  np.zeros((8, 4)), jax.NamedSharding(jax.make_mesh((8,), ("model",)), MODEL)
)


@pytest.mark.parametrize(
  ("rules", "params", "facts"),
  [
    ([("(", P())], PARAMS, r"rules\[0\].*'\('.* regex"),
    (FSDP("data"), PARAMS, r"\[0\]=FSDP\(axis='data'.*'model'\)"),
    ([("emb", P("modle"))], PARAMS, r"\[0\].*\[embed\].*modle.*'model'"),
    ([("bias", P(None, "model"))], PARAMS, r"in/bias\].*'model'.*rank 1"),
    # 12 cannot be divided by 8.
    ([("w", BOTH)], {"w": array(12, 8)}, r"\[0\].*\[w\].*axis 0.*8 t.*12"),
    ([("k", MODEL), ("in/k", MODEL)], PARAMS, r"\[1\]='in/k'.*rules\[0\]"),
    ([("kernle", P())], PARAMS, r"rules\[0\].*mean 'kernel'\?"),
    ([("mlp", "model")], PARAMS, r"\('mlp', 'model'\).* params"),
    # Not the last regex.
    ([("", P()), (".*", P()), ("", P())], PARAMS, r"\[1\]='\.\*'.*\[0\]"),
    ("fsdp", PARAMS, "min_size=16384.*none of 6 .*'replica': 4"),
    (None, {"w": ELSEWHERE}, r"params\[w\] .*another mesh"),
    # Of none of the forms.
    (MODEL, PARAMS, r"rules=P\('model'"),
    ([(3, P())], PARAMS, r"rules\[0\]=\(3, P\(\)\)"),
    (["fsdp", ("embed", MODEL)], PARAMS, r"\[0\]='fsdp'.* last"),
    (("embed", P()), PARAMS, r"\[0\]='embed' .* sequence of pairs"),
    # Logical names.
    (None, WITH_NAMES, r"\[v\].*'embed', 'mlp'.*'embed'.*'model'"),
    (LOGICAL, {"w": logical("embd", "mlp")}, "'embd'.*Did you mean 'embed'"),
    (LOGICAL, {"w": logical("mlp", "mlp")}, r"params\[w\].*more than once"),
    ([("mlp", ("model", "modle"))], WITH_NAMES, r"\[0\]=\('mlp'.*modle"),
  ],
)
def test_mistakes(rules, params, facts):
  with pytest.raises(ValueError, match=facts):
    resolve(rules, MESH, params)


# -- Configs.


@pytest.mark.parametrize(
  ("value", "rules"),
  [
    ({"name": "fsdp", "axis": ["a", "b"]}, FSDP(("a", "b"))),
    ([["k", [None, ["a", "b"]]]], (("k", P(None, ("a", "b"))),)),
    (LOGICAL, LOGICAL),
    ((("k", ("model",)), {"name": "fsdp"}), (("k", MODEL), FSDP())),
  ],
)
def test_rules_from_config(value, rules):
  assert from_config(value) == rules
  # A ConfigDict wraps the values.
  config = ml_collections.ConfigDict({"rules": value})
  assert from_config(config.rules) == rules


def test_mistakes_in_configs_name_the_field():
  with pytest.raises(ValueError, match=r"mesh\.rules\[0\].*'size'"):
    from_config(({"name": "fsdp", "size": 3},), argument="mesh.rules")
  with pytest.raises(TypeError, match=r"mesh\.rules\[0\]=\('a', 3\)"):
    from_config((("a", 3),), argument="mesh.rules")
