"""A config that trains in a second, for the tests that need one."""

import ml_collections


def config(**fields) -> ml_collections.ConfigDict:
  """Eight steps on the digits; `fields` replace those here."""
  values = dict(
    model={"name": "cnn", "features": (4,), "dense": 8},
    data={"name": "digits"},
    batch_size=16,
    num_train_steps=8,
    learning_rate=1e-2,
    seed=0,
    wrappers=(("loss_scale", {"scale": "dynamic"}),),
    mesh={"replica": -1},
    precision="mixed_float16",
    log_every_steps=2,
    eval_every_steps=4,
    checkpoint_every_steps=4,
    on_nonfinite="stop",
    writer="none",
  )
  return ml_collections.ConfigDict({**values, **fields})
