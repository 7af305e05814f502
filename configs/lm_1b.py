r"""Trains a transformer with 1.0 billion parameters on text files.

    flaxshard --config=lm_1b --workdir=/tmp/lm_1b

It was planned and not run, so there is no loss to expect:

    flaxshard --config=lm_1b --plan=v5e:16x16,v5p:4x4x8

Parameters and Adam's slots are split over all devices (FSDP). Tensor
parallelism splits each layer over the devices of a replica as well:

    --config.mesh.axes="(('model', 4),)"

`--config.data.path=FOLDER --config.data.suffix=.txt` trains on other files than
the library of the running Python, which is far too small for this model.
"""

import ml_collections

import flaxshard as fs


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = fs.config.read("lm_text")
  config.task = {"name": "language_modeling"}
  config.model = {
    "name": "transformer",
    "num_layers": 9,
    "num_heads": 24,
    "embed_dim": 3072,
    "mlp_dim": 12288,  # hidden units
    "max_length": 2048,  # positions with an embedding
    "dropout": 0.0,
    "remat": True,  # keep the input of each block only, for the backward pass
  }
  config.data.length = 2048  # bytes in a window
  config.batch_size = 512  # windows, over all devices: a million bytes
  # 20 bytes for each parameter, as the 20 tokens of Hoffmann et al., 2022
  # (arXiv:2203.15556).
  config.num_train_steps = 20_000

  config.learning_rate = 3e-4  # peak of the schedule
  config.schedule = {"name": "cosine", "warmup_steps": 1000}
  config.optimizer = {
    "name": "adamw",
    "weight_decay": 0.1,
    "clip_by_global_norm": 1.0,  # largest norm of all gradients together
  }
  config.precision = "mixed_bfloat16"  # parameters and slots are float32

  # Devices of each replica; 1: no tensor parallelism.
  config.mesh.axes = (("model", 1),)
  # The first regex found in the path of a parameter gives its PartitionSpec.
  # "replica" is FSDP. The embeddings are small and not split over replicas: XLA
  # would split activations in the same way, in place of the batch. Biases and
  # normalization scales are whole on all devices.
  config.mesh.rules = (
    ("(query|key|value|mlp_in)/kernel", ("replica", "model")),
    ("(query|key|value|mlp_in)/bias", ("model",)),
    ("(out|mlp_out)/kernel", ("model", "replica")),
    ("embed/embedding", ("model", None)),
    ("head/kernel", (None, "model")),
  )

  config.log_every_steps = 20  # rows of metrics
  config.eval_every_steps = 1000  # on all held-out files
  config.checkpoint_every_steps = 1000  # the newest 3 are kept
  return config
