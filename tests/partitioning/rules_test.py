"""Rules, and the specs that they resolve to."""

import logging

from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from flaxshard.partitioning import rules as rules_lib
from flaxshard.partitioning.rules import from_config
from flaxshard.partitioning.rules import FSDP
from flaxshard.partitioning.rules import resolve

P = jax.sharding.PartitionSpec
MESH = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
MODULE = rules_lib.__name__


def array(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def params():
  return {
    "block": {
      "mlp_in": {"kernel": array(8, 32), "bias": array(32)},
      "mlp_out": {"kernel": array(32, 8), "bias": array(8)},
    },
    "embed": {"embedding": array(64, 8)},
    "scale": array(),
  }


def flat(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(p, simple=True, separator="/"): s for p, s in leaves
  }


def split(tree):
  """The specs of a tree but for the empty ones."""
  return {path: spec for path, spec in flat(tree).items() if spec != P()}


# Regexes.


def test_no_rules_and_no_metadata_replicate():
  for rules in (None, (), []):
    specs = resolve(rules, MESH, params())
    assert jax.tree.structure(specs) == jax.tree.structure(params())
    assert split(specs) == {}


def test_the_first_regex_that_is_found_decides():
  rules = (
    (r"mlp_in/kernel", P(None, "model")),
    (r"kernel", P("model")),
    (r"^embed/", P(("replica", "model"))),
    (r"in/bias$", P("model")),
  )
  assert split(resolve(rules, MESH, params())) == {
    "block/mlp_in/kernel": P(None, "model"),
    "block/mlp_in/bias": P("model"),
    "block/mlp_out/kernel": P("model"),
    "embed/embedding": P(("replica", "model")),
  }


@pytest.mark.parametrize(
  ("spec", "wanted"),
  [
    (P("model", None), P("model")),
    (P(("model",), None), P("model")),
    (P(None, None), P()),
    (P((), "model"), P(None, "model")),
    (P(("replica", "model")), P(("replica", "model"))),
    (P(("model", "replica")), P(("model", "replica"))),
  ],
)
def test_specs_come_in_their_shortest_form(spec, wanted):
  specs = resolve((("embed", spec),), MESH, params())
  assert specs["embed"]["embedding"] == wanted


def test_axes_of_one_device_are_left_out():
  mesh = jax.sharding.AbstractMesh((1, 8), ("replica", "model"))
  rules = (("embed", P("replica", "model")), ("mlp_in/k", P(None, "replica")))
  assert split(resolve(rules, mesh, params())) == {
    "embed/embedding": P(None, "model")
  }


@pytest.mark.parametrize(
  ("rules", "error", "match"),
  [
    (P("model"), TypeError, "rules must be None, 'fsdp', an FSDP or a seq"),
    ({"a": P("model")}, TypeError, "rules must be None, 'fsdp', an FSDP"),
    (3, TypeError, "rules must be None, 'fsdp', an FSDP or a sequence, got 3"),
    ("zero", ValueError, r"rules\[0\]: unknown name 'zero'; allowed: a pair"),
    (("embed", P("model")), ValueError, r"rules\[0\]: unknown name 'embed'"),
    ((3,), TypeError, r"rules\[0\] must be a rule, got 3; allowed: a pair"),
    (((3, P()),), TypeError, r"rules\[0\] must be a rule, got \(3, P\(\)\)"),
    ((("a", P(), 1),), TypeError, r"rules\[0\] must be a rule, got \('a'"),
    (
      (("embed", (None, "model")),),
      TypeError,
      r"rules\[0\]: the second of a pair must be a PartitionSpec, such as Part",
    ),
    ((("(", P()),), ValueError, r"rules\[0\]: '\(' is no regex: missing \)"),
    (
      ("fsdp", ("embed", P("model"))),
      ValueError,
      r"rules\[0\]='fsdp' must come last",
    ),
    (("fsdp", "fsdp"), ValueError, r"rules\[0\]='fsdp' must come last"),
    (
      FSDP("data"),
      ValueError,
      r"rules\[0\]=FSDP\(axis='data'.*the mesh has no axis 'data'; mesh axes: "
      r"\{'replica': 4, 'model': 2\}",
    ),
    (
      (("embed", P("modle")),),
      ValueError,
      r"rules\[0\]=\('embed', P\('modle',?\)\): params\[embed/embedding\]: the "
      r"mesh has no axis 'modle'; got P\('modle',?\) for the shape \(64, 8\); "
      r"mesh axes: \{'replica': 4, 'model': 2\}. Did you mean 'model'\?",
    ),
    (
      (("embed", P("model", "model")),),
      ValueError,
      r"params\[embed/embedding\]: the axis 'model' cannot split twice",
    ),
    (
      (("embed", P(("model", "replica"), "model")),),
      ValueError,
      "the axis 'model' cannot split twice",
    ),
    (
      (("bias", P(None, "model")),),
      ValueError,
      r"params\[block/mlp_in/bias\]: a spec has no more entries than there are "
      r"dimensions; got P\(None, 'model'\) for the shape \(32,\)",
    ),
    (
      (("scale", P(None)),),
      ValueError,
      r"params\[scale\]: a spec has no more entries .* for the shape \(\)",
    ),
    (
      (("embed", P(None, ("replica", "model", "replica"))),),
      ValueError,
      "the axis 'replica' cannot split twice",
    ),
    (
      (("embed", P(None, P.UNCONSTRAINED)),),
      TypeError,
      r"params\[embed/embedding\]: entry 1 must be a mesh axis, a tuple of",
    ),
    (
      (("embed", P("model", unreduced={"replica"})),),
      ValueError,
      r"params\[embed/embedding\]: unreduced and reduced axes are not",
    ),
    (
      (("mlp_inn", P("model")),),
      ValueError,
      r"rules\[0\]=\('mlp_inn', P\('model',?\)\) matches nothing: the paths in "
      "params are block/mlp_in/bias, block/mlp_in/kernel, .*embed/embedding",
    ),
    (
      (("kernel", P("model")), ("mlp_in/kernel", P(None, "model"))),
      ValueError,
      r"rules\[1\]=.* applies to nothing: earlier rules, such as rules\[0\]",
    ),
  ],
)
def test_rules_that_cannot_be_followed(rules, error, match):
  with pytest.raises(error, match=match):
    resolve(rules, MESH, params())


def test_a_dimension_that_cannot_be_divided():
  with pytest.raises(
    ValueError,
    match=r"rules\[0\]=.*: params\[w\]: dimension 1, of 12, cannot be divided "
    r"by 8, the size of \('replica', 'model'\); got .* for the shape \(4, 12\)",
  ):
    resolve((("w", P(None, ("replica", "model"))),), MESH, {"w": array(4, 12)})


# FSDP.


@pytest.mark.parametrize(
  ("shape", "spec"),
  [
    ((8, 32), P(None, "replica")),
    ((32, 8), P("replica")),
    ((16, 16), P("replica")),  # the first of equals
    ((30, 16), P(None, "replica")),  # the largest cannot be divided
    ((3, 8, 16, 4), P(None, None, "replica")),
    ((15,), P()),  # too small
    ((16,), P("replica")),
  ],
)
def test_fsdp_splits_the_largest_dimension(shape, spec):
  tree = {"w": array(*shape), "other": array(64, 64)}
  for rules in (FSDP(min_size=16), (FSDP(min_size=16),)):
    assert resolve(rules, MESH, tree)["w"] == spec


def test_fsdp_by_name_is_that_with_defaults():
  tree = {"w": array(128, 128), "small": array(127, 128)}
  assert split(resolve("fsdp", MESH, tree)) == {"w": P("replica")}
  assert split(resolve(("fsdp",), MESH, tree)) == {"w": P("replica")}
  assert split(resolve(FSDP(), MESH, tree)) == {"w": P("replica")}


def test_fsdp_fills_what_other_rules_leave():
  rules = (
    ("mlp_in/kernel", P(None, "model")),
    ("mlp_out/kernel", P("model")),
    ("mlp_in/bias", P("replica")),
    ("embed", P()),  # stays whole
    FSDP(min_size=8),
  )
  assert split(resolve(rules, MESH, params())) == {
    "block/mlp_in/kernel": P("replica", "model"),
    "block/mlp_out/kernel": P("model", "replica"),
    "block/mlp_in/bias": P("replica"),
    "block/mlp_out/bias": P("replica"),
  }


def test_fsdp_over_several_axes():
  rules = (("mlp_in/kernel", P(None, "model")), FSDP(("replica", "model"), 64))
  assert split(resolve(rules, MESH, params())) == {
    "block/mlp_in/kernel": P(None, "model"),
    "block/mlp_out/kernel": P(("replica", "model")),
    "embed/embedding": P(("replica", "model")),
  }


def test_fsdp_says_in_a_line_what_stays_whole(caplog):
  tree = {f"b{i}": array(4) for i in range(5)}
  tree |= {"w": array(8, 8), "odd": array(9, 9)}
  with caplog.at_level(logging.INFO, MODULE):
    resolve(FSDP(min_size=64), MESH, tree)
  small, indivisible = caplog.records
  assert small.levelname == "INFO"
  assert small.getMessage() == (
    "fsdp: 1 of 7 parameters are split over 'replica'; 5 with fewer than 64 "
    "elements are not: b0, b1, b2, …"
  )
  assert indivisible.levelname == "WARNING"
  assert indivisible.getMessage() == (
    "fsdp: 1 large parameters are not split, as 'replica', of size 4, divides "
    "no dimension that is whole: odd"
  )


def test_fsdp_that_splits_nothing_is_an_error():
  with pytest.raises(
    ValueError,
    match=r"FSDP\(axis='replica', min_size=16384\) splits nothing: 6 of 6 "
    r"parameters are smaller than min_size \(block/mlp_in/bias, .*smaller min",
  ):
    resolve("fsdp", MESH, params())
  with pytest.raises(ValueError, match="of size 4, divides no dimension that"):
    resolve(FSDP(min_size=1), MESH, {"w": array(9, 9)})
  one = jax.sharding.AbstractMesh((1, 8), ("replica", "model"))
  assert split(resolve("fsdp", one, params())) == {}


@pytest.mark.parametrize(
  ("kwargs", "error", "match"),
  [
    ({"axis": None}, TypeError, "FSDP: axis must be a mesh axis or a tuple"),
    ({"axis": ["a"]}, TypeError, "FSDP: axis must be a mesh axis or a tuple"),
    ({"axis": ("a", 1)}, TypeError, "FSDP: axis must be a mesh axis or a"),
    ({"axis": ""}, ValueError, "FSDP: axis must not be empty"),
    ({"axis": ()}, ValueError, "FSDP: axis must not be empty"),
    ({"min_size": 1.5}, TypeError, "FSDP: min_size must be a number of elem"),
    ({"min_size": True}, TypeError, "FSDP: min_size must be a number of elem"),
    ({"min_size": -1}, ValueError, "FSDP: min_size must be at least 0, got -1"),
  ],
)
def test_wrong_fields_of_fsdp(kwargs, error, match):
  with pytest.raises(error, match=match):
    FSDP(**kwargs)


# Metadata.


def boxed(names, *, shape=(8, 32), rules=None):
  return nn.LogicallyPartitioned(array(*shape), names, rules=rules)


def test_names_of_mesh_axes():
  tree = {
    "kernel": nn.Partitioned(array(8, 32), (None, "model")),
    "stack": nn.Partitioned(array(2, 8, 8), ("model", ("replica",))),
    "bias": array(32),
  }
  specs = resolve(None, MESH, tree)
  assert specs == {
    "kernel": P(None, "model"),
    "stack": P("model", "replica"),
    "bias": P(),
  }
  # A regex takes their place; what none matches keeps its own.
  specs = resolve((("kernel", P("replica")),), MESH, tree)
  assert specs["kernel"] == P("replica")
  assert specs["stack"] == P("model", "replica")
  specs = resolve((("bias", P("model")), FSDP(min_size=64)), MESH, tree)
  assert specs["kernel"] == P("replica", "model")
  assert specs["bias"] == P("model")


def test_wrong_names_of_mesh_axes():
  with pytest.raises(
    ValueError,
    match=r"metadata \('in', 'out'\): params\[w\]: the mesh has no axis 'in'",
  ):
    resolve(None, MESH, {"w": nn.Partitioned(array(8, 32), ("in", "out"))})


class Other(nn.meta.AxisMetadata):
  def __init__(self, value):
    self.value = value

  def unbox(self):
    return self.value

  replace_boxed = add_axis = remove_axis = None


def test_metadata_of_another_type():
  with pytest.raises(TypeError, match="cannot read partitioning metadata of"):
    resolve(None, MESH, {"w": Other(array(2))})


LOGICAL = (("mlp", "model"), ("embed", None), ("batch", "replica"))


def test_logical_names_by_the_rules_in_force():
  tree = {"w": boxed(("embed", "mlp")), "v": boxed(("mlp",), shape=(32,))}
  wanted = {"w": P(None, "model"), "v": P("model")}
  with nn.logical_axis_rules(LOGICAL):
    assert resolve(None, MESH, tree) == wanted
  assert resolve(LOGICAL, MESH, tree) == wanted
  assert resolve([list(pair) for pair in LOGICAL], MESH, tree) == wanted
  inner = jax.tree.map(
    lambda box: box.replace(rules=LOGICAL),
    tree,
    is_leaf=nn.meta.is_axis_metadata,
  )
  assert resolve(None, MESH, inner) == wanted


def test_rules_given_come_before_those_in_force():
  tree = {"w": boxed(("embed", "mlp"))}
  with nn.logical_axis_rules(LOGICAL):
    specs = resolve((("mlp", ("replica", "model")),), MESH, tree)
    assert specs == {"w": P(None, ("replica", "model"))}
    assert resolve((("mlp", None),), MESH, tree) == {"w": P()}


def test_the_first_free_axis_is_taken():
  # As flax.linen.logical_to_mesh_axes has it.
  rules = (("mlp", "model"), ("heads", "model"), ("heads", "replica"))
  tree = {"w": boxed(("heads", "mlp"))}
  assert resolve(rules, MESH, tree) == {"w": P("replica", "model")}
  assert resolve(rules[:2], MESH, tree) == {"w": P(None, "model")}


def test_a_name_without_a_rule_may_be_a_mesh_axis():
  tree = {"w": boxed((None, "model"))}
  assert resolve(None, MESH, tree) == {"w": P(None, "model")}
  assert resolve((("model", None),), MESH, tree) == {"w": P()}


def test_logical_names_beside_other_rules():
  tree = {
    "w": boxed(("embed", "mlp")),
    "v": boxed(("embed", "mlp")),
    "bias": array(32),
  }
  rules = (("^w", P("model")), *LOGICAL, FSDP(min_size=64))
  assert resolve(rules, MESH, tree) == {
    "w": P("model", "replica"),
    "v": P("replica", "model"),
    "bias": P(),
  }


@pytest.mark.parametrize(
  ("rules", "names", "match"),
  [
    (
      None,
      ("embed", "mlp"),
      r"params\[w\] has the logical names \('embed', 'mlp'\), and no rule says "
      r"what 'embed' stands for; allowed: \['model', 'replica'\], or a rule "
      r"such as \('embed', None\)",
    ),
    (
      LOGICAL,
      ("embd", "mlp"),
      "what 'embd' stands for; .* Did you mean 'embed'",
    ),
    (LOGICAL, ("mlp", "mlp"), r"params\[w\] has .*occur more than once"),
    (
      (("mlp", "modle"),),
      ("mlp", None),
      r"rules\[0\]=\('mlp', 'modle'\): the mesh has no axis 'modle'.*'model'\?",
    ),
    (
      (("mlp", ("model", "m0")),),
      ("mlp", None),
      r"rules\[0\]=.*: the mesh has no axis 'm0'",
    ),
    (LOGICAL, None, r"the pairs \(\('mlp', 'model'\),.*no leaf of params has"),
    (
      (("mlp", ("model", "replica")),),
      (None, None, "mlp"),
      r"logical names \(None, None, 'mlp'\): params\[w\]: a spec has no more",
    ),
    (
      (("mlp", ("model", "replica")),),
      (None, "mlp"),
      r"logical names .*: params\[w\]: dimension 1, of 12, cannot be divided",
    ),
  ],
)
def test_logical_names_that_cannot_be_followed(rules, names, match):
  tree = {"w": boxed(names, shape=(8, 12)) if names else array(8, 12)}
  with pytest.raises(ValueError, match=match):
    resolve(rules, MESH, tree)


# Arrays that lie somewhere.


def test_arrays_on_the_mesh_keep_their_sharding():
  devices = np.array(jax.devices()).reshape(4, 2)
  mesh = jax.sharding.Mesh(devices, ("replica", "model"))
  put = lambda mesh, spec: jax.device_put(
    np.zeros((8, 4)), jax.sharding.NamedSharding(mesh, spec)
  )
  tree = {
    "split": put(mesh, P(None, "model")),
    "whole": put(mesh, P()),
    "one": jnp.zeros((8, 4)),
    "numpy": np.zeros((8, 4)),
  }
  assert split(resolve(None, mesh, tree)) == {"split": P(None, "model")}
  rules = (("split", P("model")), ("numpy", P("replica", "model")))
  assert split(resolve(rules, mesh, tree)) == {
    "split": P("model"),
    "numpy": P("replica", "model"),
  }
  other = jax.sharding.Mesh(devices[::-1], ("replica", "model"))
  assert split(resolve(None, mesh, {"w": put(other, P())})) == {}
  with pytest.raises(
    ValueError, match=r"batch\[w\] is split over another mesh: NamedSharding"
  ):
    resolve(None, mesh, {"w": put(other, P("model"))}, argument="batch")


# Configs.


@pytest.mark.parametrize(
  ("value", "rules"),
  [
    (None, None),
    ("fsdp", "fsdp"),
    ({"name": "fsdp", "min_size": 8}, FSDP(min_size=8)),
    ({"name": "fsdp", "axis": ["a", "b"]}, FSDP(("a", "b"))),
    ((("k", (None, "model")),), (("k", P(None, "model")),)),
    ([["k", [None, ["a", "b"]]]], (("k", P(None, ("a", "b"))),)),
    ((("k", ()),), (("k", P()),)),
    ((("k", ("replica", "model")),), (("k", P("replica", "model")),)),
    ((("k", P("model")), "fsdp"), (("k", P("model")), "fsdp")),
    ((("mlp", "model"), ("embed", None)), (("mlp", "model"), ("embed", None))),
    ((("mlp", {"axes": ["m0", "m1"]}),), (("mlp", ("m0", "m1")),)),
    (
      (("k", ("model",)), {"name": "fsdp", "axis": "replica"}),
      (("k", P("model")), FSDP()),
    ),
  ],
)
def test_rules_from_plain_values(value, rules):
  assert from_config(value) == rules
  # As a config holds them.
  config = ml_collections.ConfigDict({"rules": value})
  assert from_config(config.rules) == rules


@pytest.mark.parametrize(
  ("value", "error", "match"),
  [
    (3, TypeError, "rules must be None, 'fsdp', a dict .*, got 3"),
    ({"min_size": 3}, ValueError, "rules must have a 'name'"),
    ({"name": "fdsp"}, ValueError, "unknown name 'fdsp'.*mean 'fsdp'"),
    (({"name": "fsdp", "size": 3},), ValueError, r"rules\[0\].*'size'"),
    (
      (("mlp", {"axis": "m0"}),),
      ValueError,
      r"rules\[0\]: a dict in a pair must have 'axes'",
    ),
  ],
)
def test_plain_values_that_are_no_rules(value, error, match):
  with pytest.raises(error, match=match):
    from_config(value)


def test_an_entry_of_no_form_is_left_to_the_resolver():
  for entry in (3, ("a",), ("a", 3)):
    with pytest.raises(TypeError, match=r"rules\[0\]"):
      resolve(from_config((entry,)), MESH, params())
