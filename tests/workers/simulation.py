"""Threads and a network in virtual time, in an order that a seed decides.

    simulation = Simulation(seed=0)
    simulation.spawn(function)
    simulation.run(lambda: is_finished)

One thread runs at a time. It hands over wherever it takes a lock, waits or
sleeps: `Simulation` stands in for the modules `threading` and `time`, and for
`concurrent.futures`, of the module under test. When all threads wait, the clock
jumps to the first one that wakes up.
"""

from __future__ import annotations

from collections.abc import Callable
import random
import threading

from flaxshard.workers.messages import Message
from flaxshard.workers.peers import CallFailed
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View


class Killed(BaseException):
  """The process of this thread is dead."""


class Task:
  """A thread of the simulation."""

  def __init__(self, function, node):
    self.function, self.node = function, node
    self.is_done, self.error = False, None
    self.condition, self.wake = None, None
    self.go = threading.Semaphore(0)


class Simulation:
  """Runs threads one at a time."""

  def __init__(self, seed):
    self.rng = random.Random(seed)
    self.now = 0.0
    self.switches = 0
    self._tasks = []
    self._current = None
    self._back = threading.Semaphore(0)

  # -- For tests.

  def spawn(self, function, node=None):
    """Starts a thread, which dies with a node."""
    task = Task(function, node)
    self._tasks.append(task)
    threading.Thread(target=self._run_task, args=(task,), daemon=True).start()
    return task

  def run(self, is_finished, seconds):
    """Runs until a condition holds, at most for some virtual seconds."""
    while not is_finished():
      ready = [t for t in self._tasks if self._is_ready(t)]
      if not ready:
        times = [t.wake for t in self._tasks if t.wake is not None]
        times += [
          t.node.frozen_until
          for t in self._tasks
          if t.node and t.node.frozen_until > self.now
        ]
        self.now = min(x for x in times if x > self.now)
        if self.now > seconds:
          raise AssertionError(f"not finished after {seconds} s")
        continue
      self._switch_to(self.rng.choice(ready))
    for task in self._tasks:
      task.node = _Dead
      self._switch_to(task)

  def block(self, condition, timeout=None):
    """Waits for a condition; returns whether it holds."""
    task = self._current
    task.condition = condition
    task.wake = None if timeout is None else self.now + timeout
    self._back.release()
    task.go.acquire()
    task.condition = task.wake = None
    self._check(task)
    return condition()

  def pause(self):
    """Hands over to other threads, now and then for long."""
    if self.rng.random() < 0.3:
      is_long = self.rng.random() < 0.03
      self.sleep(self.rng.expovariate(1 / (1.0 if is_long else 0.005)))

  def travel(self):
    """Waits as a message does on its way: some take long."""
    is_slow = self.rng.random() < 0.15
    self.sleep(self.rng.expovariate(1 / (0.5 if is_slow else 0.01)))

  # -- As modules.

  def sleep(self, seconds):
    self.block(lambda: False, seconds)

  def monotonic(self):
    return self.now

  def Condition(self):
    return Condition(self)

  def Background(self, name, num_threads=1):
    return Executor(self, num_threads)

  def _is_ready(self, task):
    if task.node is not None:
      if not task.node.is_alive:
        return True
      if task.node.frozen_until > self.now:
        return False
    if task.wake is not None and task.wake <= self.now:
      return True
    return task.condition is None or task.condition()

  def _switch_to(self, task):
    self.switches += 1
    self._current = task
    task.go.release()
    self._back.acquire()
    if task.is_done:
      self._tasks.remove(task) if task in self._tasks else None
      if task.error is not None:
        raise task.error

  def _run_task(self, task):
    task.go.acquire()
    try:
      self._check(task)
      task.function()
    except Killed:
      pass
    except BaseException as e:
      task.error = e
    task.is_done = True
    self._back.release()

  def _check(self, task):
    if task.node is not None and not task.node.is_alive:
      raise Killed

  @property
  def node(self):
    return self._current.node


class _Dead:
  is_alive, frozen_until = False, 0.0


class Condition:
  """Stands in for `threading.Condition`, without reentrance."""

  def __init__(self, simulation):
    self._simulation = simulation
    self._is_held = False
    self._waiting = []

  def acquire(self):
    self._simulation.pause()
    self._simulation.block(lambda: not self._is_held)
    self._is_held = True

  def release(self):
    self._is_held = False

  def __enter__(self):
    self.acquire()

  def __exit__(self, *args):
    self.release()

  def notify_all(self):
    for flag in self._waiting:
      flag.append(True)
    self._waiting.clear()

  def wait(self, timeout):
    flag = []
    self._waiting.append(flag)
    self.release()
    self._simulation.block(lambda: bool(flag), timeout)
    self.acquire()


class Executor:
  """Stands in for `Background`."""

  def __init__(self, simulation, max_workers):
    self._simulation = simulation
    self._left = max_workers

  def submit(self, function, *args):
    future = Future(self._simulation)

    def run():
      self._simulation.block(lambda: self._left > 0)
      self._left -= 1
      future.run(lambda: function(*args))
      self._left += 1

    self._simulation.spawn(run, self._simulation.node)
    return future


class Future:
  """The result of a thread."""

  def __init__(self, simulation):
    self._simulation = simulation
    self.is_done, self.value, self.error = False, None, None

  def run(self, function):
    try:
      self.value = function()
    except Exception as e:
      self.error = e
    self.is_done = True

  def done(self):
    return self.is_done

  def result(self):
    self._simulation.block(lambda: self.is_done)
    if self.error is not None:
      raise self.error
    return self.value


class Network:
  """The views of all, and the processes of workers."""

  def __init__(self, simulation, num_workers):
    self.simulation = simulation
    self.num_workers = num_workers
    self.view = View(0, ())
    self.by_incarnation = {}
    # Called with each node that has answered another one.
    self.on_answer = lambda node: None
    self._joins = 0

  def exclude(self, incarnation):
    """Stores a view without a worker, which hears of it later."""
    left = [m for m in self.view.members if m.incarnation != incarnation]
    self._store(left)

  def add(self, node):
    """Stores a view with a new incarnation of a worker."""
    self._joins += 1
    node.incarnation = f"{node.worker_id}.{self._joins}"
    self.by_incarnation[node.incarnation] = node
    left = [m for m in self.view.members if m.worker_id != node.worker_id]
    self._store([*left, Member(node.worker_id, "", node.incarnation)])

  def _store(self, members):
    members = tuple(sorted(members, key=lambda m: m.worker_id))
    self.view = View(self.view.epoch + 1, members, True)


class Node:
  """One process of a worker; implements `Peers` by the letter, no better."""

  def __init__(self, network, worker_id):
    self.network, self.worker_id = network, worker_id
    self.num_workers = network.num_workers
    self.incarnation = ""
    self.view = network.view
    self.is_alive, self.frozen_until = True, 0.0
    self._handlers: dict[str, Callable] = {}
    self._callbacks, self._views = [], []
    self._simulation = network.simulation

  def start(self):
    """Starts the threads that look for views."""
    self._simulation.spawn(self._deliver, self)
    self._simulation.spawn(self._poll, self)

  def join(self):
    self._simulation.pause()
    self.network.add(self)
    self.adopt(self.network.view)

  @property
  def is_member(self):
    """Whether it is one, as the newest view says that nobody may know yet."""
    return self._knows(self.network.view, self.incarnation)

  def register(self, method, handler):
    self._handlers[method] = handler

  def on_view(self, callback):
    self._callbacks.append(callback)

  def owner_of(self, part):
    if not self._knows(self.view, self.incarnation):
      raise NotAMember
    ids = self.view.worker_ids
    return next((k for k in ids if k >= part), ids[0])

  def adopt(self, view):
    if view.epoch > self.view.epoch:
      self.view = view
      self._views.append(view)

  def call(self, worker_id, method, message, timeout=None):
    me = self.incarnation
    other = self.view.member(worker_id) or Member(worker_id, "", "none")
    travel = self._simulation.travel
    is_lost = lambda: self._lost(me, other.incarnation) is not None
    while True:
      self._raise_if_lost(me, other)
      view = self.view
      if worker_id != self.worker_id:
        travel()
      callee = self.network.by_incarnation[other.incarnation]
      if not callee.is_alive or callee.incarnation != other.incarnation:
        self._simulation.block(is_lost)
        continue
      callee.adopt(view)
      is_refused = callee.view.epoch != view.epoch
      is_refused |= not callee._knows(callee.view, me)
      if is_refused and worker_id != self.worker_id:
        newer = callee.view
        travel()
        self.adopt(newer)
        self._raise_if_lost(me, other)
        raise ViewChanged
      future = Future(self._simulation)
      copy = Message(dict(message.fields), bytes(message.data))
      handler = callee._handlers[method]
      self._simulation.spawn(
        lambda f=future, h=handler, m=copy: f.run(
          lambda: self._run_handler(h, m)
        ),
        callee,
      )
      # Some answers are lost, or so late that the message is sent again.
      patience = 0.3 if self._simulation.rng.random() < 0.05 else None
      self._simulation.block(lambda f=future: f.is_done or is_lost(), patience)
      self._raise_if_lost(me, other)
      if not future.is_done or patience:
        continue
      if worker_id != self.worker_id:
        newer = callee.view
        self.network.on_answer(callee)
        travel()
        if self._simulation.rng.random() < 0.5:
          self.adopt(newer)
      self._raise_if_lost(me, other)
      if future.error is not None:
        raise CallFailed(repr(future.error)) from future.error
      answer = future.value
      answer = Message(dict(answer.fields), bytes(answer.data))
      # The thread may be slow to look at it.
      travel()
      return answer

  def _run_handler(self, handler, message):
    if self._simulation.rng.random() < 0.05:
      # The thread is slow to begin: views may change meanwhile.
      self._simulation.sleep(self._simulation.rng.expovariate(1.0))
    return handler(self.worker_id, message)

  def _lost(self, me, other):
    if self.incarnation != me or not self._knows(self.view, me):
      return NotAMember()
    return None if self._knows(self.view, other) else PeerLost()

  def _raise_if_lost(self, me, other):
    error = self._lost(me, other.incarnation)
    if error is not None:
      raise error

  @staticmethod
  def _knows(view, incarnation):
    return any(m.incarnation == incarnation for m in view.members)

  def _deliver(self):
    while True:
      self._simulation.block(lambda: self._views)
      self._simulation.pause()
      view = self._views.pop(0)
      for callback in self._callbacks:
        callback(view)

  def _poll(self):
    while True:
      self._simulation.sleep(self._simulation.rng.uniform(0.1, 1.0))
      self.adopt(self.network.view)


class Faults:
  """Kills, stops and excludes random workers, one after another.

  Args:
    network: The network.
    nodes: The newest process of each worker.
    count: How often something happens.
    restart: Starts the process of a worker anew.
    counts: Counts the faults by name.
    pairs: How often it happens to two workers at once.
  """

  def __init__(self, network, nodes, count, restart, counts, pairs=0.0):
    self.left = count
    self._network, self._simulation = network, network.simulation
    self._rng = network.simulation.rng
    self._nodes, self._restart = nodes, restart
    self._counts, self._pairs = counts, pairs
    self._is_armed = False
    network.on_answer = self._kill_who_answers

  def run(self):
    """Makes all faults happen; the function of a thread."""
    while self.left:
      self._simulation.sleep(self._rng.expovariate(1 / 0.4))
      self.left -= 1
      alive = [node for node in self._nodes.values() if node.is_alive]
      is_pair = self._pairs and self._rng.random() < self._pairs
      for node in self._rng.sample(alive, min(2 if is_pair else 1, len(alive))):
        fault = self._rng.choice(
          [self.kill, self.kill_soon, self.suspect, self.stop]
        )
        self._counts[fault.__name__] += 1
        fault(node)

  def kill(self, node):
    """Kills a process, which is excluded later, and starts again."""
    alive = [n for n in self._nodes.values() if n.is_alive and n.is_member]
    if len(alive) < 2 or not node.incarnation or not node.is_alive:
      return
    node.is_alive = False
    incarnation = node.incarnation

    def follow():
      self._simulation.sleep(self._rng.choice([0.01, 0.1, 0.5]))
      self._network.exclude(incarnation)
      self._simulation.sleep(self._rng.expovariate(1 / 0.5))
      self._restart(node.worker_id)

    self._simulation.spawn(follow)

  def kill_soon(self, node):
    """Kills the next worker that answers another one, right then."""
    del node
    self._is_armed = True

  def _kill_who_answers(self, node):
    if self._is_armed:
      self._is_armed = False
      self.kill(node)

  def suspect(self, node):
    """Excludes a worker that lives."""
    if len(self._network.view.members) > 1 and node.is_member:
      self._network.exclude(node.incarnation)

  def stop(self, node):
    """Stops a process for a while."""
    node.frozen_until = self._simulation.now + self._rng.uniform(0.2, 3.0)
