"""Which processes are found in which environment; fs.initialize."""

import os
import socket

import jax
import pytest

import flaxshard as fs
from flaxshard.processes import cluster


def env(text):
  return dict(line.split("=") for line in text.split())


JAX = env("""JAX_COORDINATOR_ADDRESS=node1:1234
  JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=3""")
MASTER = env("MASTER_ADDR=node1 MASTER_PORT=29500")
TORCHRUN = MASTER | env("WORLD_SIZE=4 RANK=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
# A batch script with `#SBATCH -n 4`.
SBATCH = env("SLURM_JOB_ID=4711 SLURM_NTASKS=4 SLURM_PROCID=0")
SLURM = SBATCH | env("""SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4
  SLURM_STEP_NUM_NODES=4 SLURM_PROCID=3 SLURM_LOCALID=0""")
ONE_TASK = SLURM | env("SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0")
TWO_NODES = SLURM | env("SLURM_STEP_NUM_NODES=2")
OPEN_MPI = env("""OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3
  OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1""")
INDEXED_JOB = env("JOB_COMPLETION_INDEX=3")
KUBERNETES = INDEXED_JOB | env("""JAX_NUM_PROCESSES=4
  JAX_COORDINATOR_ADDRESS=train-0.train:1234""")
GPUS = env("CUDA_VISIBLE_DEVICES=0,1,2,3")


def without(environ, *names):
  return {k: v for k, v in environ.items() if k not in names}


@pytest.mark.parametrize(
  "environ, address, method, source",
  [
    (JAX, "node1:1234", "deactivate", "JAX_COORDINATOR_ADDRESS"),
    (TORCHRUN, "node1:62268", "deactivate", "torchrun"),
    (TORCHRUN | {"MASTER_ADDR": "fd::2"}, "[fd::2]:62268", "deactivate", ""),
    (TORCHRUN | {"JAX_COORDINATOR_PORT": "1"}, "node1:1", "deactivate", ""),
    (SLURM, None, "slurm", "Slurm"),
    (OPEN_MPI, None, "ompi", "Open MPI"),
    (KUBERNETES, "train-0.train:1234", "deactivate", "JOB_COMPLETION_INDEX"),
    # The first one decides.
    (JAX | TORCHRUN | SLURM, "node1:1234", "deactivate", "JAX_PROCESS_ID"),
    (TORCHRUN | SLURM | OPEN_MPI, "node1:62268", "deactivate", "torchrun"),
    # mpirun starts its daemons with srun.
    (SLURM | OPEN_MPI, None, "ompi", "Open MPI"),
    # Batch scripts export MASTER_ADDR for programs that read SLURM_PROCID.
    (SLURM | MASTER, "node1:62268", "deactivate", "Slurm"),
    # A launcher completes JAX's variables.
    (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, "a:1", "deactivate", "Slurm"),
  ],
)
def test_processes_are_found(environ, address, method, source):
  found = cluster.find(environ)
  assert found.coordinator_address == address
  assert (found.num_processes, found.process_id) == (4, 3)
  assert found.detection_method == method
  assert source in found.source


def test_arguments_come_before_variables():
  found = cluster.find(JAX | TORCHRUN, "localhost:1", 2, 0)
  assert found.coordinator_address == "localhost:1"
  assert (found.num_processes, found.process_id) == (2, 0)


@pytest.mark.parametrize(
  "environ, source",
  [
    ({}, "no cluster variables"),
    ({"WORLD_SIZE": "", "RANK": " "}, "no cluster variables"),
    (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, "is 1"),
    (ONE_TASK, "srun"),
    (SBATCH, "no cluster variables"),
    (INDEXED_JOB | {"JAX_NUM_PROCESSES": "1"}, "num_processes is 1"),
    # JAX finds the hosts of a slice.
    (INDEXED_JOB | {"TPU_ML_PLATFORM": "JAX"}, "no cluster variables"),
  ],
)
def test_one_process_is_found(environ, source):
  found = cluster.find(environ)
  assert (found.num_processes, found.process_id) == (1, 0)
  assert found.coordinator_address is None
  assert source in found.source


@pytest.mark.parametrize(
  "environ, arguments, message",
  [
    # What is there, and what is missing.
    (without(TORCHRUN, "RANK"), (), "WORLD_SIZE=4.*JAX_PROCESS_ID"),
    (without(TORCHRUN, "MASTER_PORT"), (), "RANK=3.*coordinator_address"),
    (INDEXED_JOB, (), "JOB_COMPLETION_INDEX='3' .*JAX_NUM_PROCESSES"),
    (without(JAX, "JAX_PROCESS_ID"), (), "PROCESSES=4.*JAX_PROCESS_ID"),
    ({}, ("a:1", 2), "'a:1'.*--process_id"),
    ({}, (None, 2, 0), "num_processes=2.*--coordinator_address"),
    # One task of Slurm is not the first of two processes.
    (ONE_TASK | env("JAX_NUM_PROCESSES=2"), (), "ESSES=2.*JAX_PROCESS_ID"),
    # Values that are not allowed.
    ({}, ("a:1", 2, 2), "process_id=2 .*num_processes=2"),
    ({}, ("a:1", "2", 0), "num_processes .*'2'"),
    ({}, ("a", 2, 0), "coordinator_address .*'a'"),
    ({}, (1234, 2, 0), "coordinator_address .*1234"),
    (TORCHRUN | {"RANK": "x"}, (), "RANK='x'"),
    (TORCHRUN | {"RANK": "4"}, (), "process_id=4"),
    (JAX | {"JAX_LOCAL_DEVICE_IDS": "0;1"}, (), "JAX_LOCAL_DEVICE_IDS"),
  ],
)
def test_mistakes(environ, arguments, message):
  with pytest.raises(ValueError, match=message):
    cluster.find(environ, *arguments)


@pytest.mark.parametrize(
  "environ, ids",
  [
    (JAX, None),
    (JAX | {"JAX_LOCAL_DEVICE_IDS": "2, 3"}, (2, 3)),
    (TORCHRUN, (1,)),
    (TORCHRUN | GPUS, (2, 3)),
    (TORCHRUN | GPUS | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    # Each process sees its own GPU only.
    (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "3"}, None),
    (TORCHRUN | GPUS | {"JAX_PLATFORMS": "cpu"}, None),
    (TORCHRUN | GPUS | {"JAX_LOCAL_DEVICE_IDS": "0"}, (0,)),
    # One task on each of four nodes.
    (SLURM | GPUS, None),
    (TWO_NODES | GPUS, (0, 1)),
    (TWO_NODES | {"SLURM_LOCALID": "1"}, (1,)),
    (TWO_NODES | GPUS | {"SLURM_GPU_BIND": "x"}, None),
    (OPEN_MPI | GPUS, (2, 3)),
  ],
)
def test_gpus_of_a_machine_are_divided(environ, ids):
  assert cluster.find(environ).local_device_ids == ids


def test_workers_need_no_coordinator():
  wrong = JAX | {"JAX_COORDINATOR_ADDRESS": "no address"}
  launcher, pod = env("WORLD_SIZE=4 RANK=3"), without(KUBERNETES, *JAX)
  for environ in (wrong, launcher, SLURM, pod | env("JAX_NUM_PROCESSES=4")):
    found = cluster.find(environ, needs_coordinator=False)
    assert (found.process_id, found.num_processes) == (3, 4)
  with pytest.raises(ValueError, match="--process_id") as e:
    cluster.find({}, num_processes=4, needs_coordinator=False)
  assert "coordinator" not in str(e.value)


# fs.initialize.


@pytest.fixture
def no_cluster(monkeypatch):
  for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "MASTER_", "RANK", "WORLD_SIZE")):
      monkeypatch.delenv(name)


def test_one_process_opens_no_port(no_cluster, caplog, monkeypatch):
  # None can be made.
  monkeypatch.setattr(socket, "socket", None)
  with caplog.at_level("INFO", "flaxshard"):
    for _ in range(2):
      assert fs.initialize().num_processes == 1
    assert fs.initialize("localhost:1234", 1, 0).num_processes == 1
  assert not jax.distributed.is_initialized()
  assert len(caplog.messages) == 3
  assert "one process: no cluster variables are set" in caplog.messages[0]


def test_mistakes_of_initialize():
  for name in ("heartbeat_timeout", "initialization_timeout"):
    with pytest.raises(ValueError, match=name):
      fs.initialize(**{name: 0})
  jax.devices()
  with pytest.raises(RuntimeError):
    fs.initialize("127.0.0.1:1", 2, 0)
  assert not jax.distributed.is_initialized()
