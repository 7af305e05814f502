# %% [markdown]
# # Replicas and shardings: eight devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/replicas_and_shardings.ipynb)
#
# One train step, in three ways on the same eight devices: once per replica, in
# JAX's global view, and with parameters split over the devices. All three give
# the same parameters. The pictures show which device holds which part.

# %% cellView="form" tags=["hide-input"]
# @title Set-up: installs flaxshard where it is missing
import glob, importlib.util, os, shutil, subprocess, sys

if importlib.util.find_spec("flaxshard") is None:
  assert "jax" not in sys.modules, "Restart the session: JAX was imported."
  has_tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
  address = "git+https://github.com/flaxshard/flaxshard"
  source = os.environ.get("FLAXSHARD_SOURCE", address)
  package = f"flaxshard[train,export{',tpu' if has_tpu else ''}] @ {source}"
  # JAX 0.12 needs a newer NumPy than Colab's, which is imported already.
  jax = "jax[cuda12]<0.12" if shutil.which("nvidia-smi") else "jax<0.12"
  pip = [sys.executable, "-m", "pip", "install", "--quiet"]
  subprocess.run([*pip, package, jax], check=True)
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import flaxshard as fs

print(jax.device_count(), "x", jax.devices()[0].device_kind)

# %% [markdown]
# ## Eight devices
#
# With fewer than eight accelerators, the steps run on eight virtual devices of
# the CPU.

# %%
devices = jax.devices()[:8]
if len(devices) < 8:
  devices = jax.devices("cpu")
  jax.config.update("jax_default_device", devices[0])
print(len(devices), "devices:", devices[0].device_kind)

# %% [markdown]
# ## The step
#
# It does not mention devices.

# %%
import flax.linen as nn
import optax

splits = fs.data.digits()
images, labels = splits.train.inputs, splits.train.labels


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x.reshape(len(x), -1)
    x = nn.relu(nn.Dense(512, name="hidden")(x))
    return nn.Dense(10, name="out")(x)


def train_step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )
    return losses.mean()

  loss, grads = state.value_and_grad(loss_fn)
  return state.apply_gradients(grads=grads), loss


def create_state(strategy, rules=None):
  return fs.create_train_state(
    Network(),
    jax.random.key(0),
    images[:1],
    optax.sgd(0.1, momentum=0.9),
    strategy=strategy,
    rules=rules,
  )


# %% [markdown]
# ## One replica per device
#
# A `Strategy` makes one replica per device. `shard_batch` gives each replica its
# part of the batch.

# %%
strategy = fs.Strategy(devices=devices)
batch = strategy.shard_batch({"image": images[:512], "label": labels[:512]})
print(strategy, "- images of each replica:", 512 // 8)

# %% [markdown]
# `run` calls the step once per replica, as in TensorFlow. `apply_gradients`
# averages the gradients over the replicas. Each replica returns its own loss.

# %%
state = create_state(strategy)
replica_step = strategy.jit(train_step)
for _ in range(20):
  state, losses = replica_step(state, batch)
by_replicas = state
print("of replica 0 and 1:", float(losses[0]), float(losses[1]))
print("their mean:", float(losses.mean()))

# %% [markdown]
# Inside `run`, a replica knows its number and can talk to the others.


# %%
def sum_of_numbers():
  context = fs.get_replica_context()
  return context.all_reduce("sum", context.replica_id_in_sync_group)


print("0 + 1 + ... + 7 =", int(strategy.run(sum_of_numbers)[0]))

# %% [markdown]
# ## The global view
#
# The same step under `jax.jit`: here the batch is one array, and XLA divides the
# work. Virtual devices share the threads of a few cores, and may wait for each
# other forever if several programs are started at once, so each step waits for
# its end. `run` does that by itself.

# %%
state = create_state(strategy)
global_step = jax.jit(train_step)
for _ in range(20):
  state, loss = jax.block_until_ready(global_step(state, batch))
by_global_view = state
print("loss:", float(loss))

# %% [markdown]
# ## Parameters split by rules
#
# A mesh with two axes: four replicas of two devices each. A rule is a regular
# expression for the path of a parameter, and how to split its dimensions. The
# optimizer's momentum is split in the same way.

# %%
spec = jax.sharding.PartitionSpec
by_rules = fs.Strategy(devices=devices, mesh_shape={"replica": 4, "model": 2})
rules = [
  ("hidden/kernel", spec(None, "model")),
  ("hidden/bias", spec("model")),
  ("out/kernel", spec("model", None)),
  (".*", spec()),
]
state_by_rules = create_state(by_rules, rules)
by_rules.describe(state_by_rules)

# %% [markdown]
# ## FSDP
#
# `"fsdp"` splits the largest dimension of every large parameter over all
# replicas. Each device holds an eighth.

# %%
state_by_fsdp = create_state(strategy, "fsdp")
strategy.describe(state_by_fsdp)

# %% [markdown]
# Both train with the same step in the global view.

# %%
rules_batch = by_rules.shard_batch(
  {"image": images[:512], "label": labels[:512]}
)
for _ in range(20):
  state_by_rules, _ = jax.block_until_ready(
    global_step(state_by_rules, rules_batch)
  )
  state_by_fsdp, _ = jax.block_until_ready(global_step(state_by_fsdp, batch))

# %% [markdown]
# ## The same parameters
#
# The largest difference of any parameter to those of `run`, after 20 steps, and
# the bytes of parameters and momentum on one device.

# %% tags=["result"]
import numpy as np


def largest_difference(state):
  differences = jax.tree.map(
    lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(),
    state.params,
    by_replicas.params,
  )
  return max(jax.tree.leaves(differences))


def bytes_on_first_device(state):
  arrays = jax.tree.leaves((state.params, state.opt_state))
  return sum(x.addressable_shards[0].data.nbytes for x in arrays)


for name, state in (
  ("replicas", by_replicas),
  ("global view", by_global_view),
  ("rules", state_by_rules),
  ("FSDP", state_by_fsdp),
):
  print(f"{name}, difference: {largest_difference(state):.1e}")
  print(f"{name}, bytes per device: {bytes_on_first_device(state)}")

# %% [markdown]
# ## What lies where
#
# The kernel of the hidden layer has 64 rows and 512 columns. A rectangle is a
# part of it, with the numbers of the devices that hold this part.

# %% tags=["picture"]
import matplotlib.pyplot as plt


def draw(axes, array, title):
  parts = {}
  for device, index in array.sharding.devices_indices_map(array.shape).items():
    rows, columns = (
      x.indices(n) for x, n in zip(index, array.shape, strict=True)
    )
    parts.setdefault((rows[:2], columns[:2]), []).append(devices.index(device))
  for ((top, bottom), (left, right)), holders in parts.items():
    color = plt.cm.tab10(holders[0])
    size = (right - left, bottom - top)
    axes.add_patch(
      plt.Rectangle((left, top), *size, facecolor=color, edgecolor="white")
    )
    axes.text(
      (left + right) / 2,
      (top + bottom) / 2,
      "\n".join(
        " ".join(str(number) for number in line)
        for line in (holders[i : i + 4] for i in range(0, len(holders), 4))
      ),
      ha="center",
      va="center",
      color="white",
      weight="bold",
    )
  axes.set(xlim=(0, array.shape[1]), ylim=(array.shape[0], 0), title=title)


figure, axes = plt.subplots(3, figsize=(7, 5), layout="constrained")
for axis, state, title in zip(
  axes,
  (by_replicas, state_by_rules, state_by_fsdp),
  (
    "run and global view: every device holds all of it",
    'rules: P(None, "model"), two halves on four devices each',
    "FSDP: eight parts",
  ),
  strict=True,
):
  draw(axis, state.params["hidden"]["kernel"], title)
  axis.set_ylabel("rows")
axes[-1].set_xlabel("columns")
plt.show()

# %% [markdown]
# ## Next
#
# The guides have more on [replicas](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/replicas.md),
# [shardings](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/shardings.md) and
# [plans](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/plans.md).
# [AGN and DiLoCo](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/agn_and_diloco.ipynb)
# lets the replicas exchange parameters rarely.
