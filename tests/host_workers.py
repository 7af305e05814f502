"""Workers of AGN(transport="host") in one process, which reduce with NumPy."""

import jax
import numpy as np

from flaxshard.state import host_commits


def take(state, fragments):
  return _compiled(host_commits.take, state, True)(state, fragments)


def apply_mean(state, fragments, reduced):
  run = _compiled(host_commits.apply_mean, state)
  return run(state, fragments, reduced)


def replace_params(state, params):
  return _compiled(host_commits.replace_params, state, static=())(state, params)


def _compiled(fn, state, has_aux=False, static=(1,)):
  # As a worker does: zeros would else be whole on all devices.
  shardings = jax.tree.map(lambda x: x.sharding, state)
  options = {}
  if any(len(s.device_set) > 1 for s in jax.tree.leaves(shardings)):
    options["out_shardings"] = (shardings, None) if has_aux else shardings
  return jax.jit(fn, static_argnums=static, donate_argnums=0, **options)


_update_center = jax.jit(host_commits.update_center, static_argnums=2)

_OPERATIONS = {
  "sum": lambda xs: sum(xs),
  "mean": lambda xs: sum(xs) / np.float32(len(xs)),
  "max": lambda xs: np.maximum.reduce(xs),
}


class Workers:
  """States that commit to each other, all at the same time.

  Attributes:
    states: The train states.
    centers: With sequential commits, the center of each part.
  """

  def __init__(self, create, count, step, parts=None):
    self.states = [create() for _ in range(count)]
    self.agn = host_commits.find(self.states[0].wrappers)
    self.step_fn = step
    self.flight = {}
    self.centers = None
    if self.agn.commit == "sequential":
      self.template = create()
      keys = sorted(host_commits.reductions(self.template, self.everything))
      # Lists of keys; None: one owner of all.
      self.parts = [keys] if parts is None else parts(keys)
      self.centers = [host_commits.center_of(create()) for _ in self.parts]

  @property
  def everything(self):
    return tuple(range(self.agn.fragments))

  def step(self, *args):
    """Takes a step: each argument has a value for each worker."""
    given = list(zip(*args, strict=True)) or [()] * len(self.states)
    for k, values in enumerate(given):
      self.states[k] = self.step_fn(self.states[k], *values)
    local_step = int(host_commits.local_step(self.states[0]))
    arriving = host_commits.arriving(self.agn, local_step)
    if self.agn.delay and arriving:
      self._apply(arriving, self.flight.pop(arriving))
    due = host_commits.due(self.agn, local_step)
    if due:
      answer = self._send(due)
      if self.agn.delay:
        self.flight[due] = answer
      else:
        self._apply(due, answer)

  def _send(self, due):
    commits = []
    for k, state in enumerate(self.states):
      self.states[k], commit = take(state, due)
      commits.append({key: np.asarray(x) for key, x in commit.items()})
    if self.agn.commit != "sequential":
      ops = host_commits.reductions(self.states[0], due)
      return {
        key: _OPERATIONS[op]([c[key] for c in commits])
        for key, op in ops.items()
      }
    return [self._update_centers(due, commit) for commit in commits]

  def _update_centers(self, due, commit):
    """Returns the parameters of all owners after one commit."""
    params = {}
    shared = {key: x for key, x in commit.items() if key.startswith("@")}
    for i, keys in enumerate(self.parts):
      part = {
        key: commit[key] for key in keys if key in commit and key not in shared
      }
      self.centers[i] = _update_center(
        self.template, self.centers[i], due, {**part, **shared}
      )
      arrays = host_commits.get_part(self.centers[i], list(part))
      params |= {
        key: np.asarray(arrays[f"params/{key}"])
        for key in part
        if f"params/{key}" in arrays
      }
    return params

  def _apply(self, due, answer):
    if self.agn.commit != "sequential":
      self.states = [apply_mean(s, due, answer) for s in self.states]
    else:
      self.states = [
        replace_params(s, params)
        for s, params in zip(self.states, answer, strict=True)
      ]

  def center(self):
    """The center; with sequential commits put together from its parts."""
    if self.centers is None:
      return host_commits.center_of(self.states[0])
    center = self.centers[0]
    for keys, other in zip(self.parts[1:], self.centers[1:], strict=True):
      center = host_commits.put_part(center, host_commits.get_part(other, keys))
    return center
