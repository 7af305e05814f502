# %% [markdown]
# # Your own task, your own wrapper, export
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/custom_task.ipynb)
#
# A task has a model, a loss and metrics; a wrapper changes how gradients are
# applied. This notebook writes one of each: a network that draws the hidden lower
# half of a digit, and gradient clipping that counts how often it clips. The
# trained model is then exported, and runs without flaxshard.

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
# ## A task
#
# The model sees the upper four rows of an image, and returns the lower four.

# %%
import flax
import flax.linen as nn
import jax.numpy as jnp
from clu import metrics


@flax.struct.dataclass
class Metrics(metrics.Collection):
  loss: metrics.Average.from_output("loss")


class LowerHalf:
  """Predicts the lower half of an image from its upper half."""

  metrics = Metrics

  def create_model(self):
    return nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(32)])

  def init_inputs(self, batch):
    upper = batch["inputs"][:, :4]
    return (upper.reshape(upper.shape[0], 32),)

  def loss(self, apply_fn, params, batch, rngs, train):
    outputs, _ = apply_fn(params, *self.init_inputs(batch))
    lower = batch["inputs"][:, 4:].reshape(outputs.shape)
    losses = ((outputs - lower) ** 2).mean(-1)
    return losses.mean(), fs.tasks.Aux({"loss": losses})


# %% [markdown]
# ## A wrapper
#
# A wrapper is a frozen dataclass. `apply` gets `next`, the rest of the chain, and
# returns the new target and the wrapper's new state, here a counter.

# %%
import dataclasses

import optax


@dataclasses.dataclass(frozen=True)
class CountingClip(fs.wrappers.Base):
  """Limits the norm of the gradients, and counts how often."""

  max_norm: float = 1.0

  def init(self, params, tx):
    return {"clipped_steps": jnp.zeros((), jnp.int32)}

  def apply(self, state, target, grads, next):
    norm = optax.global_norm(grads)
    factor = jnp.minimum(1.0, self.max_norm / jnp.maximum(norm, 1e-12))
    clipped = state["clipped_steps"] + (norm > self.max_norm)
    target = next(target, jax.tree.map(lambda g: g * factor, grads))
    return target, {"clipped_steps": clipped}

  def metrics(self, state):
    return state


# %% [markdown]
# ## Train
#
# A class of a notebook has the name `__main__:CountingClip` in a config. One of a
# package has `my_package.my_module:CountingClip`.

# %% tags=["result"]
import json
import logging
import pathlib
import tempfile

logging.getLogger("flaxshard").setLevel("WARNING")  # prints warnings alone
config = fs.config.defaults()
config.data = "digits"
config.batch_size = 64
config.num_train_steps = 600
config.learning_rate = 2e-3
config.wrappers = (("__main__:CountingClip", {"max_norm": 0.2}),)
config.eval_every_steps = 200
config.mesh.replica = 1  # -1: as many replicas as there are devices

workdir = pathlib.Path(tempfile.mkdtemp()) / "lower_half"
state = fs.train.train_and_evaluate(config, str(workdir), task=LowerHalf())
lines = (workdir / "metrics.jsonl").read_text().splitlines()
last = json.loads(lines[-1])
print(f"held-out error: {last['eval_loss']:.4f}")
print("clipped steps:", int(state.metrics()["clipped_steps"]))

# %% [markdown]
# For comparison: the error of the mean lower half of all training images.

# %% tags=["result"]
splits = fs.data.digits()
mean = splits.train.inputs[:, 4:].mean(0)
error = ((splits.eval.inputs[:, 4:] - mean) ** 2).mean()
print(f"error of the mean: {error:.4f}")

# %% [markdown]
# ## Export
#
# `fs.load` reads the trained model from its workdir. `fs.export` writes the
# program as StableHLO and the parameters as safetensors. By default the program
# gets what `init_inputs` gets, a batch with the key `inputs`.

# %%
loaded = fs.load(workdir, task=LowerHalf())
exported = pathlib.Path(tempfile.mkdtemp()) / "exported"
description = fs.export(loaded, exported)
print(sorted(path.name for path in exported.iterdir()))
print("inputs:", description["inputs"])

# %% [markdown]
# ## Run the exported model
#
# A program of its own, with neither flaxshard nor Flax nor the code above.

# %%
import numpy as np

chosen = np.random.default_rng(0).choice(len(splits.eval), 8, replace=False)
images = splits.eval.inputs[chosen]
np.save(exported / "images.npy", images)
program = """
import sys

import jax.export
import numpy as np
from safetensors.numpy import load_file

with open("model.stablehlo", "rb") as f:
  exported = jax.export.deserialize(f.read())
variables = load_file("model.safetensors")
outputs = exported.call(variables, {"inputs": np.load("images.npy")})
np.save("outputs.npy", outputs)
print("modules of Flax:", [name for name in sys.modules if "flax" in name])
"""
result = subprocess.run(
  [sys.executable, "-c", program],
  cwd=exported,
  env={**os.environ, "JAX_PLATFORMS": "cpu"},
  check=True,
  capture_output=True,
  text=True,
)
print(result.stdout)

# %% tags=["result"]
outputs = np.load(exported / "outputs.npy")
difference = abs(outputs - np.asarray(loaded.predict({"inputs": images})))
print("difference of the exported model:", float(difference.max()))

# %% [markdown]
# ## The drawings
#
# The upper half is given. The lower half of the second row is drawn by the model.

# %% tags=["picture"]
import matplotlib.pyplot as plt

drawn = np.concatenate([images[:, :4], outputs.reshape(-1, 4, 8, 1)], axis=1)
figure, axes = plt.subplots(2, 8, figsize=(8, 2.4), layout="constrained")
for row, shown in zip(axes, (images, drawn), strict=True):
  for axis, image in zip(row, shown, strict=True):
    axis.imshow(image[..., 0], cmap="gray_r", vmin=0, vmax=1)
    axis.axhline(3.5, color="C3", linewidth=0.8)
    axis.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("image")
axes[1, 0].set_ylabel("model")
plt.show()

# %% [markdown]
# ## Next
#
# The guides have more on [tasks](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/tasks.md),
# [wrappers](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/wrappers.md) and
# [what to do after a run](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/after_a_run.md).
