"""AGN in NumPy, as a reference for the tests: float64, one loop."""

import numpy as np


class SGD:
  """SGD with momentum, `optax.sgd`."""

  def __init__(self, rate, momentum=0.0, nesterov=False):
    self.rate, self.momentum, self.nesterov = rate, momentum, nesterov

  def init(self, params):
    return {k: np.zeros_like(p) for k, p in params.items()}

  def apply(self, params, slots, grads):
    slots = {k: self.momentum * slots[k] + g for k, g in grads.items()}
    step = slots
    if self.nesterov:
      step = {k: g + self.momentum * slots[k] for k, g in grads.items()}
    return {k: p - self.rate * step[k] for k, p in params.items()}, slots


class Adam:
  """Adam, `optax.adam(rate)`. A schedule gets the number of updates so far."""

  def __init__(self, rate):
    self.rate = rate if callable(rate) else lambda count: rate

  def init(self, params):
    zeros = {k: np.zeros_like(p) for k, p in params.items()}
    return zeros, dict(zeros), 0

  def apply(self, params, slots, grads):
    m, v, count = slots
    m = {k: 0.9 * m[k] + 0.1 * g for k, g in grads.items()}
    v = {k: 0.999 * v[k] + 0.001 * g**2 for k, g in grads.items()}
    rate, count = self.rate(count), count + 1
    new = {
      k: p
      - rate
      * (m[k] / (1 - 0.9**count))
      / (np.sqrt(v[k] / (1 - 0.999**count)) + 1e-8)
      for k, p in params.items()
    }
    return new, (m, v, count)


class Clipped:
  """Clipping by the global norm, followed by another optimizer."""

  def __init__(self, norm, inner):
    self.norm, self.inner = norm, inner
    self.init = inner.init

  def apply(self, params, slots, grads):
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    factor = min(1.0, self.norm / norm)
    return self.inner.apply(
      params, slots, {k: g * factor for k, g in grads.items()}
    )


class AGN:
  """The center and all replicas of AGN.

  `groups` are the names of the parameters that are committed together, with the
  remainder of the steps at which they are: `[(names, remainder)]`.
  """

  def __init__(
    self,
    params,
    opt,
    replicas,
    period,
    commit,
    outer=None,
    delta=False,
    groups=None,
    delay=0,
    blend=0.0,
  ):
    self.opt, self.outer = opt, outer or opt
    self.period, self.commit, self.delta = period, commit, delta
    self.groups = groups or [(tuple(params), 0)]
    self.delay, self.blend = delay, blend
    self.center = {k: np.array(p, np.float64) for k, p in params.items()}
    self.center_slots = [
      self.outer.init({k: self.center[k] for k in names})
      for names, _ in self.groups
    ]
    self.local = [dict(self.center) for _ in range(replicas)]
    self.slots = [opt.init(self.center) for _ in range(replicas)]
    zeros = {k: np.zeros_like(p) for k, p in self.center.items()}
    self.accum = [dict(zeros) for _ in range(replicas)]
    self.step = self.commits = 0
    self.last = [0] * len(self.groups)
    self.sent = []

  def take(self, grad_fn):
    """Takes a step of all replicas, with `grad_fn(replica, params)`."""
    self.step += 1
    for i, params in enumerate(self.local):
      grads = grad_fn(i, params)
      self.local[i], self.slots[i] = self.opt.apply(
        params, self.slots[i], grads
      )
      added = grads
      if self.delta:
        added = {k: params[k] - p for k, p in self.local[i].items()}
      self.accum[i] = {k: a + added[k] for k, a in self.accum[i].items()}
    for number, (names, remainder) in enumerate(self.groups):
      if self.step % self.period == remainder:
        self._commit(number, names)
    for arrives, new_local in self.sent:
      if arrives == self.step:
        for local, new in zip(self.local, new_local, strict=True):
          for k, p in new.items():
            local[k] = self.blend * local[k] + (1 - self.blend) * p
    self.sent = [sent for sent in self.sent if sent[0] > self.step]

  def _commit(self, number, names):
    self.commits += 1
    # The first period of a group may be shorter.
    divisor = 1 if self.delta else self.step - self.last[number]
    self.last[number] = self.step
    commits = [{k: acc[k] / divisor for k in names} for acc in self.accum]
    if self.commit != "sequential":
      total = {k: sum(c[k] for c in commits) for k in names}
      if self.commit == "mean":
        total = {k: t / len(commits) for k, t in total.items()}
      commits = [total]
    new_local = []
    for grads in commits:
      new, self.center_slots[number] = self.outer.apply(
        {k: self.center[k] for k in names}, self.center_slots[number], grads
      )
      self.center = {**self.center, **new}
      new_local.append(new)
    replicas = len(self.local)
    new_local = [new_local[min(i, len(new_local) - 1)] for i in range(replicas)]
    self.sent.append((self.step + self.delay, new_local))
    for accum in self.accum:
      accum.update({k: np.zeros_like(accum[k]) for k in names})
