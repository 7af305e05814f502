"""The table of arrays and shardings."""

from html import parser

import fake_ipython
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.state.describe import describe

P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(
  np.array(jax.devices()).reshape(4, 2), ("replica", "model")
)


def abstract(shape, *spec, dtype="float32"):
  sharding = jax.sharding.NamedSharding(MESH, P(*spec))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_table_of_a_tree():
  tree = {
    "embed": abstract((1024, 512), "model"),
    "kernel": abstract((512, 512), "replica", "model"),
    "scale": abstract((512,)),
    "step": abstract((), dtype="int32"),
    "table": abstract((512, 1024)),
  }
  lines = str(describe(tree)).splitlines()
  wanted = """\
tree      shape        dtype    spec                   per device    whole
  embed   (1024, 512)  float32  P('model')                1.0 MiB  2.0 MiB
  kernel  (512, 512)   float32  P('replica', 'model')   128.0 KiB  1.0 MiB
  scale   (512,)       float32  P()                       2.0 KiB  2.0 KiB
  step    ()           int32    P()                           4 B      4 B
  table   (512, 1024)  float32  P()                     * 2.0 MiB  2.0 MiB
  total                                                   3.1 MiB  5.0 MiB
arrays: 5, 5.0 MiB in all; devices: 8, at most 3.1 MiB on each
* at least 1.0 MiB, replicated over several devices"""
  assert lines == wanted.splitlines()


def test_groups_of_a_train_state():
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  sharding = jax.sharding.NamedSharding(strategy.mesh, P(None, "model"))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jax.device_put(np.zeros((4, 8), np.float32), sharding)},
    tx=optax.adam(0.1),
    wrappers=[fs.LossScale("dynamic")],
    strategy=strategy,
    batch_stats={"mean": np.zeros(8, np.float32)},
  )
  description = describe(state)
  sizes = {
    group.name: (len(group.rows), group.nbytes, group.bytes_per_device)
    for group in description.groups
  }
  assert sizes == {
    "step": (1, 4, 4),
    "params": (1, 128, 64),
    "opt_state": (3, 260, 132),
    "wrapper_states": (4, 16, 16),
    "batch_stats": (1, 32, 32),
  }
  assert description.nbytes == 440
  assert description.bytes_per_device == 248
  assert description.num_devices == 8
  assert len(description.rows) == 10
  assert repr(description) == (
    "Description(arrays: 10, 440 B in all; devices: 8, at most 248 B on each)"
  )
  paths = {row.path: row.spec for row in description.rows}
  assert paths["step"] == "P()"
  assert paths["w"] == paths["0/mu/w"] == "P(None, 'model')"
  assert paths["loss_scale/scale"] == "P()"


def test_abstract_state_has_the_description_of_the_state():
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  args = nn.Dense(64), jax.random.key(0), np.ones((1, 32)), optax.adam(0.1)
  kwargs = dict(
    wrappers=[fs.AGN(communication_period=9)],
    strategy=strategy,
    rules=(("kernel", P(None, "model")),),
  )
  abstract_state = fs.create_train_state(*args, abstract=True, **kwargs)
  state = fs.create_train_state(*args, **kwargs)
  assert str(describe(abstract_state)) == str(describe(state))


def test_bytes_per_device_are_of_the_fullest_device():
  one, two = jax.devices()[:2]
  tree = {
    "a": jax.device_put(np.zeros(8, np.float32), one),
    "b": jax.device_put(np.zeros(4, np.float32), two),
    "c": jax.device_put(np.zeros(6, np.int8), two),
  }
  description = describe(tree)
  assert [row.spec for row in description.rows] == ["cpu:0", "cpu:1", "cpu:1"]
  assert description.bytes_per_device == 32
  assert description.nbytes == 54
  assert description.num_devices == 2
  assert not any(row.large for row in description.rows)


def test_arrays_without_a_sharding():
  tree = {
    "host": np.zeros(4, np.float32),
    "number": 1.0,
    "shape": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
  }
  description = describe(tree)
  assert {row.spec for row in description.rows} == {"not placed"}
  assert description.nbytes == 16 + 4 + 4
  assert description.bytes_per_device == description.num_devices == 0
  assert "–" in description._repr_html_()
  rows = []
  jax.jit(lambda x: rows.extend(describe(x).rows))(jnp.ones(2))
  assert rows[0].spec == "not placed"


def test_large_replicated_arrays_are_marked():
  large = np.zeros((1024, 256), np.float32)
  whole = jax.sharding.NamedSharding(MESH, P())
  rows = describe(
    {
      "a": jax.device_put(large, whole),
      "b": jax.device_put(large[:-1], whole),
      "c": jax.device_put(large, jax.devices()[0]),
    }
  ).rows
  assert [row.large for row in rows] == [True, False, False]


def test_prng_keys():
  whole = jax.sharding.NamedSharding(MESH, P())
  row = describe({"key": jax.device_put(jax.random.key(0), whole)}).rows[0]
  assert (row.dtype, row.nbytes, row.bytes_per_device) == ("key<fry>", 8, 8)


def test_leaf_that_is_not_an_array_raises():
  with pytest.raises(TypeError, match=r"state\[a/b\] .*'x'"):
    describe({"a": {"b": "x"}})


def test_empty_tree():
  assert str(describe({})) == (
    "arrays: 0, 0 B in all; devices: 0, at most 0 B on each"
  )


class Cells(parser.HTMLParser):
  """Text and background colors of HTML; checks that its tags are closed."""

  def __init__(self, markup):
    super().__init__()
    self.open, self.text, self.colors = [], [], []
    self.feed(markup)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.open.append(tag)
    style = dict(attrs).get("style", "")
    if "background: " in style:
      self.colors.append(style.partition("background: ")[2].partition(";")[0])

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if data.strip():
      self.text.append(data)


def grid(*spec, shape=(8, 8)):
  """Returns the devices in each cell of an array's grid, and the colors."""
  cells = Cells(describe({"w": abstract(shape, *spec)})._repr_html_())
  start = cells.text.index(str(shape)) + 5
  return cells.text[start : cells.text.index("total")], cells.colors


def test_grid_of_parts_and_devices():
  assert grid() == (["0 1 2 3 4 5 6 7"], ["#eee"])
  devices, colors = grid("replica")
  assert devices == ["0 1", "2 3", "4 5", "6 7"]
  assert len(set(colors)) == 4
  assert grid(None, "model")[0] == ["0 2 4 6", "1 3 5 7"]
  devices, colors = grid("model", "replica")
  assert devices == ["0", "2", "4", "6", "1", "3", "5", "7"]
  assert len(set(colors)) == 8
  markup = describe({"w": abstract((8, 8), "model", "replica")})._repr_html_()
  inner = markup[markup.rindex("<table") : markup.index("</table>")]
  assert inner.count("<tr>") == 2  # the first dimension runs down


def test_html_is_escaped_and_has_totals_and_footer():
  description = describe({"<b>&": abstract((1024, 1024)), "v": np.zeros(2)})
  markup = description._repr_html_()
  assert "<b>&" not in markup
  cells = Cells(markup)
  assert "<b>&" in cells.text
  assert "* 4.0 MiB" in cells.text
  assert "* at least 1.0 MiB, replicated over several devices" in cells.text
  assert "total" in cells.text


class Device:
  platform = "tpu"

  def __init__(self, id):
    self.id = id


def test_grid_of_many_devices_is_their_number():
  class Sharding:
    device_set = frozenset(map(Device, range(32)))

    def shard_shape(self, shape):
      return (shape[0] // 32,)

  class Array:
    shape, dtype = (64,), np.dtype("float32")
    sharding = Sharding()

  description = describe([Array()])
  assert description.bytes_per_device == 8
  assert "32 devices" in description._repr_html_()


def test_strategy_describe_shows_once_in_a_cell(monkeypatch, capsys):
  strategy = fs.Strategy()
  shell = fake_ipython.Shell(monkeypatch)
  description = strategy.describe({"w": abstract((8,))})
  # IPython does this with the value of the last line of a cell.
  description._ipython_display_()
  (shown,) = shell.shown
  assert shown["text/plain"] == str(description)
  assert shown["text/html"] == description._repr_html_()
  shell.execution_count += 1
  description._ipython_display_()
  assert shell.shown == [shown, shown]
  describe({"w": abstract((8,))})._ipython_display_()
  assert len(shell.shown) == 3
  assert capsys.readouterr().out == ""


def test_strategy_describe_prints_in_a_program(capsys):
  description = fs.Strategy().describe({"w": abstract((8,))})
  assert capsys.readouterr().out == f"{description}\n"
