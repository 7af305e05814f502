# %% [markdown]
# # A language model from a config, then LoRA
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/language_model.ipynb)
#
# A config describes data, model and optimizer, and one call trains it. This
# notebook trains a small transformer on Python code, stops and resumes the run,
# and then adapts the model to English text with LoRA. Nothing is downloaded.

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
# ## The config
#
# `lm_text` is one of the configs that come with flaxshard. Here it gets a smaller
# model and fewer steps. The text is Python's package `email`; a token is a byte.

# %%
import pathlib
import tempfile

config = fs.config.read("lm_text")
config.model.update(num_layers=2, embed_dim=64, mlp_dim=256, max_length=64)
config.data.update(
  path=str(pathlib.Path(os.__file__).parent / "email"),
  length=64,
  eval_every=5,  # every fifth file is held out
)
config.batch_size = 32
config.num_train_steps = 200
config.schedule.warmup_steps = 20
config.log_every_steps = 25
config.eval_every_steps = 50
config.checkpoint_every_steps = 100
config.mesh.replica = 1  # -1: as many replicas as there are devices
print(config.model)

# %% [markdown]
# ## Train, and stop in the middle
#
# The Stop button of the notebook sends the signal SIGINT. This hook sends it at
# step 75. The run finishes its step, saves a checkpoint and returns the state.

# %% tags=["result"]
import logging
import signal

logging.getLogger("flaxshard").setLevel("WARNING")  # prints warnings alone
workdirs = pathlib.Path(tempfile.mkdtemp())


def stop(step, state, metrics):
  if step == 75:
    os.kill(os.getpid(), signal.SIGINT)


state = fs.train.train_and_evaluate(
  config, str(workdirs / "code"), hooks=[stop]
)
stopped = int(state.step)
print("stopped after steps:", stopped)

# %% [markdown]
# ## Resume
#
# The same call continues from the checkpoint, with the data that comes next.

# %% tags=["result"]
state = fs.train.train_and_evaluate(config, str(workdirs / "code"))
print("steps after resuming:", int(state.step))

# %% [markdown]
# A run without an interruption ends with the same parameters, bit for bit.

# %% tags=["result"]
import numpy as np

whole = fs.train.train_and_evaluate(config, str(workdirs / "whole"))
difference = jax.tree.map(
  lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(),
  state.params,
  whole.params,
)
print("difference:", max(jax.tree.leaves(difference)))

# %% [markdown]
# ## The loss
#
# The workdir has a file with one JSON object per row of metrics.

# %% tags=["picture"]
import json

import matplotlib.pyplot as plt


def read_rows(workdir, name):
  """Returns the steps and the values of a metric."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return zip(
    *((row["step"], row[name]) for row in rows if name in row), strict=True
  )


figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, text in (("train_loss", "training"), ("eval_loss", "held out")):
  axes.plot(*read_rows(workdirs / "code", name), marker="o", label=text)
axes.axvline(stopped, color="gray", linestyle="--", label="stopped and resumed")
axes.set(xlabel="step", ylabel="loss in nats per byte")
axes.legend()
plt.show()

# %% tags=["result"]
_, losses = read_rows(workdirs / "code", "eval_loss")
print(f"held-out loss: {losses[-1]:.4f}")

# %% [markdown]
# ## Other text
#
# scikit-learn describes its data sets in English. The model knows Python code, so
# its loss is higher there.

# %% tags=["result"]
import sklearn.datasets
import optax

english = config.copy_and_resolve_references()
english.data.path = str(
  pathlib.Path(sklearn.datasets.__file__).parent / "descr"
)
english.data.suffix = ".rst"

source = {name: x for name, x in english.data.items() if name != "name"}
windows = list(fs.data.text(**source).eval)
inputs = np.stack([x["inputs"] for x in windows])
targets = np.stack([x["labels"] for x in windows])
loaded = fs.load(workdirs / "code")
losses = optax.softmax_cross_entropy_with_integer_labels(
  loaded.predict({"inputs": inputs}), targets
)
print(f"English, before: {float(losses.mean()):.4f}")

# %% [markdown]
# ## LoRA
#
# LoRA freezes the model and trains a low-rank change of each kernel. Two fields
# of the config are enough: where to begin, and the rank.

# %% tags=["result"]
english.init_from = {"path": str(workdirs / "code")}
english.lora = {"rank": 8}
english.learning_rate = 5e-3
tuned = fs.train.train_and_evaluate(english, str(workdirs / "english"))


def count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


_, losses = read_rows(workdirs / "english", "eval_loss")
print(f"English, after: {losses[-1]:.4f}")
print("trained parameters:", count(tuned.params))
print("frozen parameters:", count(tuned.frozen))

# %% [markdown]
# `fs.merge_lora` adds the change to the kernels. The result has the parameters of
# the model without LoRA.

# %% tags=["result"]
variables = fs.merge_lora(tuned)
print("parameters after merging:", count(variables["params"]))

# %% [markdown]
# ## Next
#
# The guides have more on [training from a config](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/training.md),
# [fine-tuning](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/fine_tuning.md) and
# [plans](https://github.com/flaxshard/flaxshard/blob/main/docs/guides/plans.md).
# [Your own task, your own wrapper, export](https://colab.research.google.com/github/flaxshard/flaxshard/blob/main/colab/custom_task.ipynb)
# trains a model of your own, and runs it without flaxshard.
