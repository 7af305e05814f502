"""What a worker answers while it waits."""

import threading
import types

import jax.numpy as jnp
import optax
import pytest

import flaxshard as fs
from flaxshard.workers.progress import Progress
from flaxshard.workers.schedule import StepCounter
from flaxshard.workers.waiting import Waiting


class _Copies:
  """Stands in for `CenterCopies`, with a request."""

  is_wanted = True
  message = None

  def forget_old(self):
    pass

  def answer(self, make):
    self.message = make()


@pytest.mark.parametrize(("steps", "wanted"), [(1, 9), (5, 5), (10, 0)])
def test_who_comes_while_a_commit_is_due_goes_on_before_its_step(steps, wanted):
  agn = fs.AGN(10, "mean", transport="host")
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros(3)},
    tx=optax.sgd(0.1),
    wrappers=[agn],
  )
  own = state.wrapper_states["agn"]._replace(local_step=jnp.int32(10))
  state = state.replace(wrapper_states={"agn": own})
  counter = StepCounter(agn, 0)
  counter.tick()
  counter.look(steps)
  copies = _Copies()
  waiting = Waiting(
    agn,
    types.SimpleNamespace(incarnation="x"),
    copies,
    Progress(counter, 0, 0, 0),
    lambda: False,
    threading.Event(),
  )
  waiting.serve(state)
  assert copies.message.fields["local_step"] == wanted
  # Whoever goes on there with as many steps a call sees the commit.
  counter = StepCounter(agn, wanted)
  counter.tick()
  assert counter.look(wanted + steps)
