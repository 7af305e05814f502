"""AGN as a loop over replicas, as a reference for the tests."""

import functools

import jax
import numpy as np
import optax


@functools.partial(jax.jit, static_argnums=0)
def update(tx, params, slots, grads):
  updates, slots = tx.update(grads, slots, params)
  return optax.apply_updates(params, updates), slots


class AGN:
  """The center and all replicas of AGN.

  `groups` are the names of the parameters that are committed together, with the
  remainder of the steps at which they are: `[(names, remainder)]`.
  """

  def __init__(self, params, tx, wrapper, replicas, groups):
    self.tx, self.outer_tx = tx, wrapper.outer_tx or tx
    self.wrapper, self.groups = wrapper, groups
    self.center = dict(params)
    self.center_slots = [
      self.outer_tx.init({k: params[k] for k in names}) for names, _ in groups
    ]
    self.local = [dict(params) for _ in range(replicas)]
    self.slots = [tx.init(params)] * replicas
    zeros = {k: np.zeros(np.shape(p)) for k, p in params.items()}
    self.accum = [dict(zeros) for _ in range(replicas)]
    self.step = self.commits = 0
    self.last = [0] * len(groups)
    self.sent = []

  def take(self, grad_fn):
    """Takes a step of all replicas, with `grad_fn(replica, params)`."""
    self.step += 1
    for i, params in enumerate(self.local):
      grads = grad_fn(i, params)
      self.local[i], self.slots[i] = jax.device_get(
        update(self.tx, params, self.slots[i], grads)
      )
      added = grads
      if self.wrapper.commit_delta:
        added = {k: params[k] - p for k, p in self.local[i].items()}
      self.accum[i] = {k: a + added[k] for k, a in self.accum[i].items()}
    for number, (names, remainder) in enumerate(self.groups):
      if self.step % self.wrapper.communication_period == remainder:
        self._commit(number, names)
    blend = getattr(self.wrapper.transport, "blend", 0.0)
    for arrives, new_local in self.sent:
      if arrives == self.step:
        for local, new in zip(self.local, new_local, strict=True):
          for k, p in new.items():
            local[k] = blend * local[k] + (1 - blend) * p
    self.sent = [sent for sent in self.sent if sent[0] > self.step]

  def _commit(self, number, names):
    self.commits += 1
    # The first period of a group may be shorter.
    divisor = self.step - self.last[number]
    self.last[number] = self.step
    if self.wrapper.commit_delta:
      divisor = 1
    commits = [{k: acc[k] / divisor for k in names} for acc in self.accum]
    if self.wrapper.commit != "sequential":
      combine = {"mean": np.mean, "sum": np.sum}[self.wrapper.commit]
      commits = [{k: combine([c[k] for c in commits], axis=0) for k in names}]
    new_local = []
    for grads in commits:
      center = {k: self.center[k] for k in names}
      new, self.center_slots[number] = jax.device_get(
        update(self.outer_tx, center, self.center_slots[number], grads)
      )
      self.center.update(new)
      new_local.append(new)
    # After a mean or a sum, all replicas continue from the one center.
    new_local *= len(self.local) // len(new_local)
    delay = getattr(self.wrapper.transport, "delay", 0)
    self.sent.append((self.step + delay, new_local))
    for accum in self.accum:
      accum.update({k: np.zeros_like(accum[k]) for k in names})
