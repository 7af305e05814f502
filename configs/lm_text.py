"""A byte-level transformer language model on text files.

python -m flaxshard --config=configs/lm_text.py --workdir=/tmp/lm_text

Seen: eval_loss=1.546 nats a byte, eval_accuracy=0.589 after 1000 steps, in four
and a half minutes on two CPU cores (JAX 0.10.2), Python 3.11's library as text.

The default text is the standard library of the running Python, its `.py` files;
`--config.data.path=FOLDER --config.data.suffix=.txt` takes others.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = ml_collections.ConfigDict()

  config.model = {
    "name": "transformer",
    "num_layers": 4,
    "num_heads": 4,
    "embed_dim": 128,
    "mlp_dim": 512,
    "max_length": 128,
    "dropout": 0.0,
  }
  config.data = {
    "name": "text",
    "path": "",  # a folder; empty: the running Python's standard library
    "suffix": ".py",
    "length": 128,  # bytes in a window
    "eval_every": 200,  # every n-th file is held out
  }
  config.batch_size = 16  # windows, over all devices
  config.num_train_steps = 1000
  config.seed = 0  # of initialization, data order and dropout

  config.learning_rate = 2e-3  # the schedule's peak
  config.schedule = {"name": "cosine", "warmup_steps": 100}
  config.optimizer = {
    "name": "adamw",
    "weight_decay": 0.01,
    "clip_by_global_norm": 1.0,
  }

  # "mixed_float16" and "mixed_bfloat16" are for accelerators: CPUs emulate.
  config.precision = "float32"
  # "auto": dynamic in mixed_float16, otherwise compiled away.
  config.wrappers = (("loss_scale", {"scale": "auto"}),)
  config.mesh = {
    "replica": -1,  # replicas share a batch; -1: as many as fit
    "logical_devices": 1,  # of each replica, or by name:
    "axes": (),  # (("model", 2),)
    "rules": (),  # of parameters: ("fsdp",), (("kernel$", (None, "model")),)
    "split": {},  # of batches, into pieces: {"inputs": (1, 2, 4, 1)}
    "per_replica": False,  # run the step on each replica, as Strategy.run does
    "virtual_devices": 0,  # n: rehearse on n virtual CPU devices
  }

  config.log_every_steps = 50
  config.eval_every_steps = 500
  config.checkpoint_every_steps = 500
  config.checkpoint_every_minutes = 0.0  # too, as rows are logged; 0: never
  config.max_to_keep = 3  # the newest; and, for as long as the run goes on:
  config.keep_every_steps = 0  # those at multiples of it; 0: none
  config.best_metric = "none"  # or the best by "eval_accuracy", "eval_loss"
  config.keep_best = 1  # so many of the best
  config.writer = "tensorboard"  # or "clu" (needs TensorFlow), "none"
  config.profile_steps = ()  # (first, last): a trace in workdir/profile
  config.on_nonfinite = "stop"  # or "continue"
  return config
