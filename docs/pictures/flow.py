"""Pictures of what flows where: a step, replicas, AGN, checkpoints."""

from __future__ import annotations

from drawing import Drawing


def idea(scheme: str) -> Drawing:
  """Draws the train step, the wrappers, the state and the checkpoint."""
  d = Drawing(
    480,
    682,
    scheme,
    "A Flax train step calls value_and_grad and apply_gradients. Wrappers of "
    "flaxshard lie around the optax optimizer. The states of the wrappers lie "
    "beside those of Flax, in the TrainState and in checkpoints.",
  )
  for i in (2, 1, 0):  # sheets behind each other: the replicas
    d.box(4 + 7 * i, 18 - 7 * i, 458, 352, "paper")
  d.text(20, 46, "Your train step", "plain", bold=True, size=16)
  d.text(448, 46, "on each replica", anchor="end", size=14.5)
  code = (
    "loss, grads = state.value_and_grad(loss_fn)",
    "state = state.apply_gradients(grads=grads)",
  )
  d.lines(20, 73, code, "plain")
  d.arrow([(231, 102), (231, 134)])
  d.text(243, 123, "gradients", size=14.5)
  d.box(20, 136, 426, 218, "ours")
  d.text(34, 160, "LossScale", "ours", bold=True)
  d.text(
    34, 181, "scales the loss, skips a step that overflows", "ours", size=14.5
  )
  d.box(36, 195, 394, 145, "ours")
  names = "AGN, CrossShard, Accumulate, EMA, yours"
  d.text(50, 219, names, "ours", bold=True)
  d.text(50, 240, "decide when to update, and with what", "ours", size=14.5)
  d.box(52, 254, 362, 72, "plain")
  d.text(66, 283, "optax optimizer", "plain", bold=True)
  d.text(66, 305, "updates the parameters", "plain", size=14.5)
  d.arrow([(231, 370), (231, 404)])
  d.text(243, 393, "new state", size=14.5)
  d.box(4, 406, 472, 92, "paper")
  d.box(4, 524, 472, 112, "paper")
  d.text(20, 430, "TrainState", "plain", bold=True, size=16)
  d.box(16, 442, 262, 44, "plain")
  d.box(290, 442, 174, 44, "ours")
  d.text(30, 469, "step params opt_state", "plain", mono=True)
  d.text(304, 469, "wrapper_states", "ours", mono=True)
  d.arrow([(147, 486), (147, 560)], "plain")
  d.arrow([(377, 486), (377, 560)], "ours")
  d.text(20, 548, "Checkpoint", "plain", bold=True, size=16)
  d.box(16, 562, 262, 62, "plain")
  d.box(290, 562, 174, 62, "ours")
  d.text(30, 587, "1200/default", "plain", mono=True)
  d.text(30, 610, "a plain Flax program reads it", "plain", size=14.5)
  d.text(304, 587, "1200/wrappers", "ours", mono=True)
  d.text(304, 610, "beside it", "ours", size=14.5)
  d.box(4, 656, 20, 20, "plain")
  d.text(32, 672, "Flax, optax, Orbax")
  d.box(216, 656, 20, 20, "ours")
  d.text(244, 672, "added by flaxshard")
  return d


def step(scheme: str) -> Drawing:
  """Draws the way from the parameters to the new state in one step."""
  d = Drawing(
    480,
    734,
    scheme,
    "One train step: working parameters, scaled loss, unscaled gradients, "
    "reduction over the replicas, wrappers, optimizer, new state.",
  )
  rows = (
    ("plain", "state.params", ""),
    ("ours", "params", "AGN: the replica's local copy"),
    ("plain", "loss_fn(params)", "your function"),
    ("ours", "scale_loss", "LossScale: times the scale"),
    ("plain", "jax.grad", ""),
    ("ours", "unscale_gradients", "LossScale: divides by it"),
    ("sent", "mean over replicas", "unless a wrapper does it"),
  )
  y = 28
  d.text(4, 18, "state.value_and_grad(loss_fn)", "plain", mono=True)
  for i, (kind, name, remark) in enumerate(rows):
    if i == 6:
      d.text(
        4, y + 20, "state.apply_gradients(grads=grads)", "plain", mono=True
      )
      y += 32
    d.box(4, y, 192, 36, kind)
    d.text(18, y + 23, name, kind)
    d.text(210, y + 23, remark, size=14.5)
    d.arrow([(100, y + 36), (100, y + 58)])
    y += 60
  d.box(4, y, 472, 170, "ours")
  d.text(18, y + 24, "apply of the outermost wrapper", "ours", bold=True)
  d.text(18, y + 45, "LossScale: lax.cond(all finite, next, skip)", "ours")
  d.box(20, y + 58, 440, 98, "ours")
  d.text(34, y + 81, "next: apply of the wrapper inside", "ours", bold=True)
  d.box(36, y + 94, 408, 48, "plain")
  d.text(50, y + 123, "next: tx.update and optax.apply_updates", "plain")
  d.arrow([(100, y + 170), (100, y + 196)])
  y += 198
  d.box(4, y, 472, 40, "plain")
  d.text(
    18,
    y + 25,
    "new step, params, opt_state, collections, wrapper_states",
    "plain",
    size=14.5,
  )
  return d


def run(scheme: str) -> Drawing:
  """Draws what Strategy.run gives to replicas and makes of their results."""
  d = Drawing(
    480,
    500,
    scheme,
    "Strategy.run: every replica gets the state and its part of the batch. "
    "Gradients are averaged once. The state comes back as one state, the loss "
    "as one value per replica.",
  )
  columns = [4 + 122 * i for i in range(4)]
  middle = {"anchor": "middle", "size": 14.5}
  d.box(4, 4, 472, 40, "plain")
  d.text(240, 30, "state: all of it on every replica", "plain", **middle)
  for i, x in enumerate(columns):
    d.box(x, 54, 106, 40, "plain")
    d.text(x + 53, 79, f"batch {8 * i}–{8 * i + 7}", "plain", **middle)
    d.arrow([(x + 53, 94), (x + 53, 122)], "plain")
    d.box(x, 124, 106, 226, "paper")
    d.text(x + 53, 148, f"replica {i}", "plain", bold=True, **middle)
    d.text(x + 53, 176, "loss", "plain", **middle)
    d.text(x + 53, 198, "gradients", "plain", **middle)
    d.arrow([(x + 53, 208), (x + 53, 230)], "sent")
    d.arrow([(x + 53, 272), (x + 53, 298)], "sent")
    d.text(x + 53, 318, "wrappers,", "ours", **middle)
    d.text(x + 53, 338, "optimizer", "ours", **middle)
    d.arrow([(x + 53, 350), (x + 53, 378)], "plain")
    d.box(x, 380, 106, 40, "ours")
    d.text(x + 53, 405, f"losses[{i}]", "ours", mono=True, **middle)
  d.box(12, 232, 456, 40, "sent")
  text = "one all-reduce: the mean of the gradients"
  d.text(240, 257, text, "sent", **middle)
  d.text(240, 438, "PerReplica: losses.mean(), losses[0]", **middle)
  d.box(4, 452, 472, 40, "plain")
  d.text(240, 477, "state: the same on every replica", "plain", **middle)
  return d


def agn(scheme: str) -> Drawing:
  """Draws local steps and commits of three replicas."""
  d = Drawing(
    480,
    348,
    scheme,
    "AGN: three replicas take four local steps each, then commit the mean of "
    "their gradients to the center, and continue from it.",
  )
  d.text(4, 31, "center", "plain", bold=True)
  d.arrow([(78, 26), (474, 26)], "plain")
  commits = (264, 440)
  for commit in commits:
    d.box(commit - 20, 64, 40, 206, "sent", dashed=True)
    d.text(commit, 294, "commit", "sent", anchor="middle", bold=True)
    d.text(commit - 94, 294, "local steps", "ours", anchor="middle")
    d.box(commit - 13, 13, 26, 26, "plain")
    d.arrow([(commit - 8, 64), (commit - 8, 41)], "sent")
    d.arrow([(commit + 8, 39), (commit + 8, 62)], "plain")
  for i in range(3):
    y = 98 + 70 * i
    d.text(4, y + 5, f"replica {i}", "ours", bold=True)
    d.arrow([(78, y), (474, y)], "ours", head=False)
    for first, distance in ((98, 40), (300, 34)):
      for k in range(4):
        d.box(first + distance * k - 11, y - 11, 22, 22, "ours")
  d.arrow([(12, 338), (12, 318)], "sent")
  d.text(26, 334, "gradients of the period", "sent")
  d.arrow([(236, 318), (236, 338)], "plain")
  d.text(250, 334, "the new center, for all", "plain")
  return d


def center(scheme: str) -> Drawing:
  """Draws workers, the objects in a store, and who merges."""
  d = Drawing(
    480,
    430,
    scheme,
    "Workers write commits to a store and read centers from it. One process, a "
    "worker or a synchronizer, merges the commits into a new center.",
  )
  for k in range(3):
    x = 4 + 162 * k
    d.box(x, 4, 148, 50, "ours")
    d.text(x + 74, 25, f"worker {k}", "ours", anchor="middle", bold=True)
    d.text(x + 74, 45, "local steps", "ours", anchor="middle", size=14.5)
    d.arrow([(x + 60, 54), (x + 60, 96)], "sent")
    d.arrow([(x + 88, 98), (x + 88, 56)], "plain")
  d.text(56, 81, "commit", "sent", anchor="end", size=14.5)
  d.text(100, 81, "center", "plain", size=14.5)
  d.box(4, 98, 472, 232, "paper")
  d.text(18, 122, "WORKDIR/center/", "plain", mono=True, bold=True)
  objects = (
    ("ours", "run", "facts that all workers must share"),
    ("ours", "worker/1", "its phase, and that it lives"),
    ("sent", "commit/0/1-4f0c/70", "its commit of local step 70"),
    ("ours", "head", "names the newest centers and slots"),
    ("plain", "center/0/12-81ac", "parameters, version 12"),
    ("plain", "slots/0/12-81ac", "of its optimizer, for who merges"),
  )
  for i, (kind, name, remark) in enumerate(objects):
    y = 132 + 32 * i
    d.box(18, y, 178, 27, kind)
    d.text(28, y + 19, name, kind, mono=True, size=14.5)
    d.text(208, y + 19, remark, size=14.5)
  d.arrow([(180, 330), (180, 372)], "sent")
  d.text(168, 357, "commits, center, slots", "sent", anchor="end", size=14.5)
  d.arrow([(300, 374), (300, 332)], "plain")
  d.text(312, 357, "new version", "plain", size=14.5)
  d.box(4, 374, 472, 52, "ours")
  d.text(18, 396, "one worker, or a synchronizer, merges", "ours", bold=True)
  d.text(18, 416, "two at the same time do no harm", "ours", size=14.5)
  return d


def checkpoint(scheme: str) -> Drawing:
  """Draws what is saved, and how it is restored."""
  d = Drawing(
    480,
    614,
    scheme,
    "A checkpoint: the state without wrappers in the item default, the states "
    "of the wrappers beside it, digests of all files. A restore compares the "
    "digests, plans each leaf, and reads arrays straight to their devices.",
  )
  d.text(4, 20, "checkpointer.save(1200, state)", "plain", mono=True)
  d.arrow([(100, 30), (100, 52)])
  d.box(4, 54, 472, 196, "paper")
  d.text(18, 78, "checkpoints/1200/", "plain", mono=True, bold=True)
  items = (
    ("plain", "default", "step, params, opt_state, ..."),
    ("ours", "wrappers", "states of the wrappers, if any"),
    ("ours", "flaxshard", "versions, config, digests of files"),
    ("plain", "input_iterator", "the position in the data"),
    ("plain", "metrics", "for the best steps"),
  )
  for i, (kind, name, remark) in enumerate(items):
    y = 88 + 31 * i
    d.box(18, y, 146, 27, kind)
    d.text(28, y + 19, name, kind, mono=True, size=14.5)
    d.text(176, y + 19, remark, size=14.5)
  d.arrow([(100, 250), (100, 288)])
  d.text(4, 308, "state = checkpointer.restore(state)", "plain", mono=True)
  steps = (
    ("compare digests", "a damaged step is passed over"),
    ("plan every leaf", "path, shape and dtype must agree"),
    ("read", "straight to the devices of the leaf"),
    ("start the rest", "a wrapper the checkpoint lacks"),
  )
  for i, (name, remark) in enumerate(steps):
    y = 322 + 62 * i
    d.box(4, y, 160, 38, "ours")
    d.text(18, y + 24, name, "ours", bold=True)
    d.text(176, y + 24, remark, size=14.5)
    d.arrow([(84, y + 38), (84, y + 60)])
  d.box(4, 570, 472, 40, "plain")
  d.text(18, 595, "state on this mesh, on any number of devices", "plain")
  return d
