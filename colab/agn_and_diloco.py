# %% [markdown]
# # AGN and DiLoCo: accuracy over traffic
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/agn_and_diloco.ipynb)
#
# Data-parallel training exchanges all gradients in every step. Here each replica
# trains its own local parameters, and the replicas *commit* to common parameters,
# the center, only once per period. This notebook measures how much accuracy that
# costs, and how much traffic it saves.

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
# ## Data, model and step
#
# The step is that of data-parallel training. Only the wrappers differ below.

# %%
import flax.linen as nn
import numpy as np
import optax

splits = fs.data.digits()
images, labels = splits.train.inputs, splits.train.labels
strategy = fs.Strategy(devices=devices)


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
    return nn.Dense(10)(x)


def train_step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )
    return losses.mean()

  loss, grads = state.value_and_grad(loss_fn)
  return state.apply_gradients(grads=grads), loss


def create_state(wrappers, rate=2e-3):
  return fs.create_train_state(
    Network(),
    jax.random.key(0),
    images[:1],
    optax.adam(rate),
    wrappers=wrappers,
    strategy=strategy,
  )


# %% [markdown]
# All runs see the same 320 batches of 64 images, 8 images for each replica.

# %%
STEPS = 320
rng = np.random.default_rng(0)
batches = []
for _ in range(STEPS):
  chosen = rng.choice(len(images), 64, replace=False)
  batches.append({"image": images[chosen], "label": labels[chosen]})
batches = [strategy.shard_batch(batch) for batch in batches]

# %% [markdown]
# ## Local steps and a commit
#
# Between commits the local parameters drift apart. At the fourth step of this
# example they commit, and all replicas continue from the center.

# %% tags=["result"]
state = create_state([fs.AGN(4, "mean")])
step = strategy.jit(train_step)
for number in range(1, 5):
  state, _ = step(state, batches[number])
  kernel = state.wrapper_states["agn"].local_params["Dense_0"]["kernel"]
  distance = float(np.ptp(kernel, axis=0).max())  # over the replicas
  print(f"distance after step {number}: {distance:.5f}")
print("commits:", int(state.wrapper_states["agn"].commits))

# %% [markdown]
# ## Three ways to commit
#
# - **AGN** updates the center with the mean gradient of the period. The center
#   takes one step of the optimizer per period, so it gets a higher learning rate,
#   and its periods are short.
# - **Local SGD** sets the center to the mean of the local parameters.
# - **DiLoCo** gives the mean change of the parameters to a second optimizer, SGD
#   with Nesterov momentum (Douillard et al., 2023, arXiv:2311.08105).

# %%
# The learning rate, the periods, and the wrapper of a period.
METHODS = {
  "AGN": (1.6e-2, (4, 8, 16), lambda period: fs.AGN(period, "mean")),
  "local SGD": (
    2e-3,
    (4, 16, 64),
    lambda period: fs.AGN(
      period, "mean", commit_delta=True, outer_tx=optax.sgd(1.0)
    ),
  ),
  "DiLoCo": (
    2e-3,
    (4, 16, 64),
    lambda period: fs.AGN(
      period,
      "mean",
      commit_delta=True,
      outer_tx=optax.sgd(0.7, momentum=0.9, nesterov=True),
    ),
  ),
}


def train(wrappers, rate=2e-3):
  """Returns the trained state and its accuracy on held-out images."""
  state = create_state(wrappers, rate)
  for start in range(0, STEPS, 64):
    state, _ = strategy.run_steps(
      train_step, state, batches[start : start + 64], reduce="mean"
    )
  logits = state.apply_fn({"params": state.params}, splits.eval.inputs)
  hits = np.asarray(logits).argmax(-1) == splits.eval.labels
  return state, float(hits.mean())


# %% [markdown]
# ## Run them
#
# An exchange is one all-reduce with the bytes of the parameters.

# %% tags=["result"]
state, accuracy = train([])
kib = sum(x.nbytes for x in jax.tree.leaves(state.params)) / 1024
data_parallel = (STEPS * kib, accuracy)
print(f"data parallel, KiB: {STEPS * kib:.0f}")
print(f"data parallel, accuracy: {accuracy:.4f}")

curves = {}
for name, (rate, periods, wrapper) in METHODS.items():
  curves[name] = []
  for period in periods:
    state, accuracy = train([wrapper(period)], rate)
    traffic = int(state.wrapper_states["agn"].commits) * kib
    curves[name].append((traffic, accuracy))
    print(f"{name} {period}, KiB: {traffic:.0f}")
    print(f"{name} {period}, accuracy: {accuracy:.4f}")

# %% tags=["picture"]
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, curve), marker in zip(curves.items(), "osD", strict=True):
  axes.plot(*zip(*curve, strict=True), marker=marker, label=name)
axes.plot(*data_parallel, "k*", markersize=12, label="data parallel")
for (traffic, _), period in zip(curves["DiLoCo"], (4, 16, 64), strict=True):
  axes.axvline(traffic, color="gray", linewidth=0.5, zorder=0)
  axes.text(traffic, 1.0, f" period {period}", va="bottom", color="gray")
axes.set(
  xlabel="KiB given to all-reduces by each replica, in 320 steps",
  ylabel="accuracy on held-out images",
  xscale="log",
  ylim=(0.3, 1.05),
)
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# The star is data-parallel training, which exchanges gradients in each step. Compare
# how far left a method can go before it loses accuracy. After 64 steps AGN's center
# would have taken five steps only: for such periods take DiLoCo or local SGD.

# %% [markdown]
# ## What a step exchanges
#
# `fs.plan` compiles a step, without a run, and lists its memory and collectives.
# The all-reduce is that of the commit: it counts 1/16 with a period of 16. With
# `pip install "flaxshard[tpu]"`, `fs.Strategy("v5e:2x4")` plans it for eight TPU
# chips that you do not have.

# %% tags=["result"]
batch = strategy.shard_batch({"image": images[:64], "label": labels[:64]})
state = create_state([METHODS["DiLoCo"][-1](16)])
print(fs.plan(strategy.jit(train_step), state, batch))

# %% [markdown]
# ## Next
#
# The guide to [AGN](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/agn.md) has the learning
# rates, schedules and commits.
# [A language model from a config](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/language_model.ipynb)
# trains without a loop of your own.
