"""Trains the model of a config file.

  flaxshard --config=digits --workdir=/tmp/digits

(or python -m flaxshard, with the same flags.)

--config is one of the names that --list prints, a Python file with a function
get_config(), or a module with one (my_package.my_module). What follows a colon
is an argument of the function: --config=my_config.py:large.

--help=config lists the fields of a config. Each can be set on the command line:

  --config.batch_size=256 --config.learning_rate=1e-3
  --config.model.features='(16, 32)' --config.optimizer.name=lion
  --config.precision=float32 --config.wrappers='()'
  --config.wrappers="(('loss_scale', {'scale': 1024.0}),)"
  --config.mesh.replica=4 --config.mesh.virtual_devices=8
  --config.mesh.axes="(('model', 2),)" --config.mesh.rules="('fsdp',)"
  --config.data.name=my_package.my_module:my_factory

A field that does not exist is an error that lists similar names.
A mistake ends the program with a message and exit code 1; --verbosity=1 shows
its traceback. The run writes to the workdir:

  checkpoints/       Orbax checkpoints, every config.checkpoint_every_steps
  metrics.jsonl      one JSON object per line, every config.log_every_steps
  events.out.*       the same metrics for TensorBoard
  training.png       loss, accuracy, learning rate and others over the steps
  config.json        the config of the run
  data.json          the number of training examples and the shapes of one
  profile/           a trace, with --config.profile_steps='(10, 20)'

The same command again continues from the last checkpoint. In the workdir of a
finished run, another config is an error: use another workdir, or
--config.resume=extend to train on to a later config.num_train_steps. Ctrl-C,
SIGTERM and JAX's notice of preemption save a checkpoint and end the run. A
third Ctrl-C, a second or more after the one before, ends it without a
checkpoint; none interrupts a save. A workdir can be used by one run at a time.

Many processes, one on each host or for each GPU: start the same command in each
of them. torchrun, Slurm, Open MPI, Kubernetes and Cloud TPU are found by their
environment variables; elsewhere say it yourself:

  --coordinator_address=node1:1234 --num_processes=2 --process_id=0

--local_processes=4 rehearses that on one machine, in four processes.

With AGN(transport="store") in config.wrappers the processes are workers, which
JAX does not connect: --num_processes and --process_id, or a launcher's
variables, are enough. Worker 0 writes to the workdir, worker 2 to the folder
workers/2 in it. A worker that has ended comes back by the same command.
--synchronize, with the workdir alone, merges their commits and does not train:
it runs beside the store, so that workers on slow links send and read less.

--plan=v5p:4x4x8 trains nothing. It prints the memory and the traffic of a step
of the config on TPUs that this machine does not have, and likely mistakes, from
the TPU compiler: pip install 'flaxshard[tpu]'. --plan=v5e:4x4,v5e:8x8 plans two
topologies, and --plan='2*v5e:8x8' has two slices. --workdir is optional then,
for plan.json. With AGN(transport="store"), --num_processes=4 plans the step of
one of four workers.

On the web: https://flaxshard.github.io/flaxshard/guides/training.html, and
https://flaxshard.github.io/flaxshard/troubleshooting.html for messages.
"""

# Flags only: the training loop is in flaxshard/train/loop.py.

from collections.abc import Iterable
import faulthandler
import signal
import sys
from typing import Any, NoReturn

from absl import app
from absl import flags
from absl import logging as absl_logging

from flaxshard import processes
from flaxshard.processes import local
from flaxshard.train import command_line
from flaxshard.train import commits
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import devices
from flaxshard.train import loop

FLAGS = flags.FLAGS

_CONNECTION_FLAGS = ("coordinator_address", "num_processes", "process_id")

flags.DEFINE_string(
  "config",
  None,
  "The training config: a name that --list prints, a Python file with "
  "get_config(), or a module with it; --help=config lists its fields.",
)
flags.DEFINE_boolean("list", False, "Prints the names of the configs.")
flags.DEFINE_boolean("version", False, "Prints the version.")
flags.DEFINE_string(
  "workdir",
  None,
  "The folder of the run, which may be gs://bucket/run. If "
  "it has a checkpoint, training continues from it.",
)
flags.DEFINE_integer(
  "local_processes",
  0,
  "Runs this many processes on this machine, which divide its devices or "
  "config.mesh.virtual_devices.",
  lower_bound=0,
)
flags.DEFINE_string(
  "coordinator_address",
  None,
  "host:port of process 0. By default the processes are found in the "
  "environment.",
)
flags.DEFINE_integer("num_processes", None, "Number of processes.")
flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")
flags.DEFINE_float(
  "heartbeat_timeout",
  60.0,
  "Seconds without a sign of life after which a process counts as lost.",
)
flags.DEFINE_float(
  "initialization_timeout",
  300.0,
  "Seconds that the processes wait for each other at the start.",
)
flags.DEFINE_string(
  "plan",
  None,
  "Topologies, separated by commas, such as v5p:4x4x8: prints the memory and "
  "the traffic of a step on them, and trains nothing.",
)


flags.DEFINE_boolean(
  "synchronize",
  False,
  "Merges the commits of the workers of --workdir, and trains nothing.",
)


def main(argv: list[str]) -> None:
  """Runs the training loop."""
  del argv
  if not FLAGS["verbosity"].present:
    # JAX and Orbax log many lines at INFO.
    absl_logging.set_verbosity(absl_logging.WARNING)
    # Each thread of Orbax also logs its error, with a traceback. One is raised.
    absl_logging.get_absl_logger().addFilter(
      lambda record: "orbax/checkpoint" not in record.pathname
    )

  reported = command_line.report_mistakes(
    FLAGS.verbosity > 0, " (--verbosity=1 shows the traceback.)"
  )
  with reported, console.show_log(always=True):
    if FLAGS.synchronize:
      commits.synchronize(FLAGS.workdir)
      return
    # Once, before several processes find the same mistake.
    config = config_lib.check(FLAGS.config)
    is_worker = devices.has_workers(config)
    if FLAGS.plan is not None:
      _print_plan(config, is_worker)
    elif FLAGS.local_processes:
      _run_local_processes(config, is_worker)
    else:
      _run(config, is_worker)


def _run(config: Any, is_worker: bool) -> None:
  """Trains, as one of the processes or of the workers of a run."""
  local.end_with_parent()
  options = {}
  if is_worker:
    _refuse(
      ("coordinator_address", "heartbeat_timeout"),
      "is for processes that JAX connects, not for the workers of an AGN with "
      "transport='store': they meet in WORKDIR/center.",
    )
    options = {
      "worker_id": FLAGS.process_id,
      "num_workers": FLAGS.num_processes,
      "start_timeout": FLAGS.initialization_timeout,
    }
  else:
    # Before anything touches a device.
    found = processes.initialize(
      FLAGS.coordinator_address,
      FLAGS.num_processes,
      FLAGS.process_id,
      heartbeat_timeout=FLAGS.heartbeat_timeout,
      initialization_timeout=FLAGS.initialization_timeout,
    )
    if found.num_processes > 1:
      # absl prints the stacks of all threads at SIGABRT. They would hide JAX's
      # message of a process that is lost.
      faulthandler.disable()
  loop.train_and_evaluate(config, FLAGS.workdir, **options)


def _print_plan(config: Any, is_worker: bool) -> None:
  refused = ["local_processes", *_CONNECTION_FLAGS]
  if is_worker:
    # The plan is that of one of so many workers.
    refused.remove("num_processes")
    config = devices.config_of_worker(config, FLAGS.num_processes or 1)
  _refuse(
    refused,
    f"cannot be used with --plan={FLAGS.plan}: a plan runs in one process.",
  )
  # Ctrl-C ends the program at once: Python's own handler would wait for the
  # compiler, for minutes.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  # Imported here: a run does not need it.
  from flaxshard.plans import config as config_plans

  config_plans.print_plans(config, FLAGS.plan, FLAGS.workdir)


def _run_local_processes(config: Any, is_worker: bool) -> NoReturn:
  _refuse(
    _CONNECTION_FLAGS,
    f"cannot be used with --local_processes={FLAGS.local_processes}, which "
    "chooses it.",
  )
  raise SystemExit(
    local.run(
      [sys.executable, "-m", "flaxshard", *sys.argv[1:]],
      FLAGS.local_processes,
      virtual_devices=config.mesh.virtual_devices,
      connected=not is_worker,
    )
  )


def _refuse(names: Iterable[str], why: str) -> None:
  for name in names:
    if FLAGS[name].present:
      raise ValueError(f"--{name}={FLAGS[name].value} {why}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
