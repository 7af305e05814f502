# %% [markdown]
# # Quick start: train in float16 with loss scaling
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/quick_start.ipynb)
#
# float16 is fast and small, but gradients below 3e-8 become zero in it.
# *Dynamic loss scaling* multiplies the loss by a large number, so that small
# gradients survive, and divides the gradients by it afterwards. A step whose
# gradients overflow is skipped.
#
# On TPUs, and on NVIDIA GPUs since Ampere, take bfloat16 instead: it has the range
# of float32 and needs no scale. float16 is for older GPUs (V100, T4), for CPUs and
# phones, and where a model needs its three more bits of precision.
#
# This notebook trains a small network on one chip and looks at a skipped step.

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
# ## Why float16 needs a scale
#
# The number 1e-8 is zero in float16. Multiplied by 2¹⁵, it is not.

# %%
import jax.numpy as jnp

print("1e-8 in float16:        ", jnp.float16(1e-8))
print("1e-8 * 2**15 in float16:", jnp.float16(1e-8 * 2**15))
print("largest float16:        ", jnp.finfo(jnp.float16).max)

# %% [markdown]
# ## Data and model
#
# scikit-learn brings 1,797 images of handwritten digits with 8 x 8 pixels.

# %%
splits = fs.data.digits()
images, labels = splits.train.inputs, splits.train.labels
print("training:", images.shape, "held out:", splits.eval.inputs.shape)

# %% [markdown]
# The policy `mixed_float16` computes in float16 and keeps parameters in float32.

# %%
import flax.linen as nn

policy = fs.Policy("mixed_float16")


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x.reshape(len(x), -1)
    x = nn.relu(nn.Dense(128, dtype=policy.compute_dtype)(x))
    x = nn.relu(nn.Dense(128, dtype=policy.compute_dtype)(x))
    return nn.Dense(10, dtype=policy.compute_dtype)(x).astype(jnp.float32)


# %% [markdown]
# ## A train state with loss scaling
#
# The scale starts at 2¹⁵. It doubles after 50 finite steps, and is halved when a
# gradient overflows. (The default doubles after 2,000 steps; 50 shows more.)

# %%
import optax

scaling = fs.LossScale(fs.DynamicLossScale(growth_interval=50))
state = fs.create_train_state(
  Network(),
  jax.random.key(0),
  images[:1],
  optax.adam(1e-3),
  wrappers=[scaling],
)
print(state.metrics())

# %% [markdown]
# ## The train step
#
# This is a standard Flax step. `state.value_and_grad` scales the loss inside and
# returns the unscaled loss and gradients.


# %%
@jax.jit
def train_step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )
    return losses.mean()

  loss, grads = state.value_and_grad(loss_fn)
  return state.apply_gradients(grads=grads), loss


# %% [markdown]
# ## Train
#
# 900 steps with 64 random images each.

# %%
import numpy as np

rng = np.random.default_rng(0)
history = []
for _ in range(900):
  chosen = rng.choice(len(images), 64, replace=False)
  batch = {"image": images[chosen], "label": labels[chosen]}
  state, loss = train_step(state, batch)
  history.append({"loss": loss, **state.metrics()})
history = jax.device_get(history)

# %% tags=["result"]
print("applied steps:", int(state.step))
print("skipped steps:", int(history[-1]["skipped_steps"]))

# %% [markdown]
# The scale grows until gradients overflow. Each overflow costs one step, which is
# marked.

# %% tags=["picture"]
import matplotlib.pyplot as plt

steps = np.arange(1, len(history) + 1)
skipped = np.array([row["skipped_steps"] for row in history])
overflows = steps[np.diff(skipped, prepend=0) > 0]
figure, (top, bottom) = plt.subplots(2, sharex=True, layout="constrained")
top.plot(steps, [row["loss"] for row in history], linewidth=0.8)
top.set(ylabel="loss", yscale="log")
bottom.plot(steps, [row["loss_scale"] for row in history], color="C1")
for number, overflow in enumerate(overflows):
  label = "skipped step" if number == 0 else None
  bottom.axvline(overflow, color="C3", linewidth=0.8, alpha=0.6, label=label)
bottom.set(xlabel="batch", ylabel="loss scale")
bottom.set_yscale("log", base=2)
bottom.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## Accuracy on held-out images

# %% tags=["result"]
logits = state.apply_fn({"params": state.params}, splits.eval.inputs)
accuracy = float((logits.argmax(-1) == splits.eval.labels).mean())
print(f"accuracy: {accuracy:.4f}")

# %% [markdown]
# ## What a skipped step looks like
#
# An image with a pixel of 60,000 makes the gradients overflow. The step changes
# neither parameters nor the step counter. Only the scale is halved.

# %% tags=["result"]
broken = {"image": batch["image"].copy(), "label": batch["label"]}
broken["image"][0, 4, 4] = 60_000.0
after, loss = train_step(state, broken)

change = jax.tree.map(lambda a, b: abs(a - b).max(), state.params, after.params)
print("change of parameters:", float(max(jax.tree.leaves(change))))
print("steps counted:", int(after.step - state.step))
old, new = state.metrics(), after.metrics()
print("scale, new over old:", float(new["loss_scale"] / old["loss_scale"]))
print("steps skipped:", int(new["skipped_steps"] - old["skipped_steps"]))

# %% [markdown]
# Which parameters had gradients that are not finite? Ask outside of `jax.jit`.


# %%
def broken_loss(params):
  logits = state.apply_fn({"params": params}, broken["image"])
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, broken["label"]
  )
  return losses.mean()


_, grads = state.value_and_grad(broken_loss)
print(fs.nonfinite_leaves(grads))

# %% [markdown]
# ## What scaling saves
#
# The share of gradients that are exactly zero in the first layer, without and
# with a scale. Pixels that are black in all images have gradient zero anyway.


# %% tags=["result"]
def zero_share(scale):
  def loss_fn(params):
    logits = state.apply_fn({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )
    return losses.mean() * scale

  kernel = jax.grad(loss_fn)(state.params)["Dense_0"]["kernel"]
  return float((kernel == 0).mean())


print(f"zeros without a scale: {zero_share(1.0):.3f}")
print(f"zeros with a scale: {zero_share(2.0**15):.3f}")

# %% [markdown]
# ## Next
#
# - `fs.LossScale("dynamic")` has the default settings, `fs.LossScale(128.0)` a
#   fixed scale.
# - [Loss scaling](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/loss_scaling.md)
#   describes the settings, and [a loop of your own](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/train_step.md)
#   batch statistics and dropout.
# - [Replicas and shardings](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/replicas_and_shardings.ipynb)
#   runs the same step on eight devices.
