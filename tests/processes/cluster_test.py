"""Which processes are found in which environment."""

import pytest

from flaxshard.processes import cluster
from flaxshard.processes import launchers
from flaxshard.processes import tpu

JAX = {
  "JAX_COORDINATOR_ADDRESS": "node1:1234",
  "JAX_NUM_PROCESSES": "4",
  "JAX_PROCESS_ID": "3",
}
TORCHRUN = {
  "MASTER_ADDR": "node1",
  "MASTER_PORT": "29500",
  "WORLD_SIZE": "4",
  "RANK": "3",
  "LOCAL_RANK": "1",
  "LOCAL_WORLD_SIZE": "2",
}
SLURM = {
  "SLURM_JOB_ID": "4711",
  "SLURM_STEP_ID": "0",
  "SLURM_STEP_NODELIST": "node[001-003,7],gpu-a",
  "SLURM_NTASKS": "4",
  "SLURM_STEP_NUM_TASKS": "4",
  "SLURM_PROCID": "3",
  "SLURM_LOCALID": "0",
}
# As of Open MPI 4.1.4.
OPEN_MPI = {
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
  "OMPI_MCA_orte_hnp_uri": (
    "1144127488.0;tcp://192.0.2.2,198.51.100.2:42305;tcp6://[fd00::2]:35225"
  ),
}
# As of Open MPI 5.0.11.
OPEN_MPI_5 = {
  **OPEN_MPI,
  "OMPI_MCA_orte_hnp_uri": "",
  "PMIX_NAMESPACE": "prterun-login-node-14846@1",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3"}
KUBERNETES = {
  **INDEXED_JOB,
  "JAX_COORDINATOR_ADDRESS": "train-0.train:1234",
  "JAX_NUM_PROCESSES": "4",
}
# The variables of a shell that `salloc -n 4` opens.
SALLOC = {
  "SLURM_JOB_ID": "4711",
  "SLURM_JOB_NODELIST": "node[001-004]",
  "SLURM_NTASKS": "4",
}


def without(environ, *names):
  return {k: v for k, v in environ.items() if k not in names}


@pytest.mark.parametrize(
  "environ, address, source",
  [
    (JAX, "node1:1234", "JAX_COORDINATOR_ADDRESS"),
    (TORCHRUN, "node1:62268", "torchrun"),
    (TORCHRUN | {"MASTER_ADDR": "fd00::2"}, "[fd00::2]:62268", "torchrun"),
    (SLURM, "node001:62055", "Slurm"),
    (without(SLURM, "SLURM_STEP_NUM_TASKS"), "node001:62055", "SLURM_NTASKS"),
    (OPEN_MPI, "192.0.2.2:62514", "Open MPI"),
    (
      OPEN_MPI
      | {"OMPI_MCA_orte_hnp_uri": "1144127488.0;tcp6://[fd00::2,fd00::3]:1"},
      "[fd00::2]:62514",
      "Open MPI",
    ),
    (OPEN_MPI_5, "login-node:63998", "Open MPI"),
    (
      OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
      "127.0.0.1:62514",
      "Open MPI",
    ),
    (KUBERNETES, "train-0.train:1234", "Kubernetes"),
    # The first one decides.
    (JAX | TORCHRUN | SLURM, "node1:1234", "JAX_PROCESS_ID"),
    (TORCHRUN | SLURM | OPEN_MPI, "node1:62268", "torchrun"),
    # mpirun starts its daemons with srun.
    (SLURM | OPEN_MPI, "192.0.2.2:62514", "Open MPI"),
    (SLURM | INDEXED_JOB, "node001:62055", "Slurm"),
    # Batch scripts export these two for programs that read SLURM_PROCID.
    (
      SLURM | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
      "node001:62055",
      "Slurm",
    ),
    # JAX's variables are completed by a launcher.
    (
      SLURM | {"JAX_COORDINATOR_ADDRESS": "node9:1"},
      "node9:1",
      "num_processes, process_id from Slurm",
    ),
    (SLURM | {"JAX_COORDINATOR_PORT": "1234"}, "node001:1234", "Slurm"),
    (TORCHRUN | {"JAX_COORDINATOR_PORT": "1234"}, "node1:1234", "torchrun"),
  ],
)
def test_processes_are_found(environ, address, source):
  found = cluster.find(environ)
  assert found.coordinator_address == address
  assert (found.num_processes, found.process_id) == (4, 3)
  assert source in found.source


def test_arguments_come_before_variables():
  found = cluster.find(JAX | TORCHRUN, "localhost:1", 2, 0)
  assert found.coordinator_address == "localhost:1"
  assert (found.num_processes, found.process_id) == (2, 0)
  found = cluster.find(JAX, process_id=0)
  assert found.process_id == 0
  assert found.num_processes == 4


@pytest.mark.parametrize(
  "environ, source",
  [
    ({}, "no cluster variables"),
    ({"WORLD_SIZE": "", "RANK": " "}, "no cluster variables"),
    ({"JAX_NUM_PROCESSES": "1"}, "num_processes is 1"),
    (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, "is 1"),
    (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, "torchrun"),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "srun"),
    (SALLOC, "outside of srun"),
    # A batch script with `#SBATCH -n 4`.
    (SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "outside of srun"),
    # `salloc` with LaunchParameters=use_interactive_step.
    (
      SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
      "interactive shell",
    ),
    (SLURM | {"SLURM_PTY_PORT": "34889", "SLURM_PROCID": "0"}, "--pty"),
    (INDEXED_JOB | {"JAX_NUM_PROCESSES": "1"}, "num_processes is 1"),
  ],
)
def test_one_process_is_found(environ, source):
  found = cluster.find(environ)
  assert found.num_processes == 1
  assert found.process_id == 0
  assert found.coordinator_address is None
  assert source in found.source


@pytest.mark.parametrize(
  "environ, present, missing",
  [
    ({"RANK": "3"}, "RANK='3'", "MASTER_ADDR, MASTER_PORT, WORLD_SIZE"),
    (without(TORCHRUN, "RANK"), "WORLD_SIZE='4'", "not RANK."),
    (without(TORCHRUN, "MASTER_PORT"), "RANK='3'", "not MASTER_PORT."),
    (TORCHRUN | {"RANK": ""}, "WORLD_SIZE='4'", "not RANK."),
    (without(SLURM, "SLURM_PROCID"), "SLURM_JOB_ID", "not SLURM_PROCID."),
    (
      without(SLURM, "SLURM_STEP_NODELIST"),
      "SLURM_JOB_ID",
      "not SLURM_STEP_NODELIST.",
    ),
    (
      without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
      "OMPI_COMM_WORLD_SIZE",
      "not OMPI_COMM_WORLD_RANK.",
    ),
    (
      OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""},
      "OMPI_COMM_WORLD_SIZE",
      "not JAX_COORDINATOR_ADDRESS.",
    ),
    (
      INDEXED_JOB,
      "JOB_COMPLETION_INDEX='3'",
      "JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS.",
    ),
    (without(JAX, "JAX_PROCESS_ID"), "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    # One task of Slurm is not the first of two processes.
    (
      SLURM
      | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
      | {"JAX_NUM_PROCESSES": "2"},
      "JAX_NUM_PROCESSES=2",
      "JAX_PROCESS_ID",
    ),
    (
      without(JAX, "JAX_COORDINATOR_ADDRESS"),
      "JAX_NUM_PROCESSES=4",
      "JAX_COORDINATOR_ADDRESS",
    ),
  ],
)
def test_half_set_environment_raises(environ, present, missing):
  with pytest.raises(ValueError) as e:
    cluster.find(environ)
  assert present in str(e.value)
  assert missing in str(e.value)


@pytest.mark.parametrize(
  "arguments, words",
  [
    (("localhost:1", 2), "--process_id"),
    (("localhost:1", None, 0), "--num_processes"),
    ((None, 2, 0), "--coordinator_address"),
    (("localhost:1", 2, 2), "process_id=2"),
    (("localhost:1", 2, -1), "process_id"),
    (("localhost:1", 0, 0), "num_processes"),
    (("localhost:1", "2", 0), "num_processes must be an integer"),
    (("localhost:1", 2, True), "process_id must be an integer"),
    (("localhost", 2, 0), "coordinator_address must be 'host:port'"),
    (("localhost:", 2, 0), "port from 1 to 65535"),
    (("localhost:0", 2, 0), "port from 1 to 65535"),
    (("localhost:65536", 2, 0), "port from 1 to 65535"),
    ((":1234", 2, 0), "host:port"),
    (("http://a:1234", 2, 0), "host:port"),
    (("::1:1234", 2, 0), "host:port"),
    ((1234, 2, 0), "coordinator_address must be a non-empty string"),
  ],
)
def test_invalid_arguments_raise(arguments, words):
  with pytest.raises(ValueError, match=words):
    cluster.find({}, *arguments)


@pytest.mark.parametrize(
  "environ",
  [
    TORCHRUN | {"RANK": "x"},
    TORCHRUN | {"WORLD_SIZE": "-1"},
    TORCHRUN | {"MASTER_PORT": "1.5"},
    TORCHRUN | {"RANK": "4"},
    JAX | {"JAX_PROCESS_ID": "three"},
    JAX | {"JAX_LOCAL_DEVICE_IDS": "0;1"},
    SLURM | {"SLURM_STEP_NODELIST": "["},
    SLURM | {"JAX_COORDINATOR_PORT": "port"},
  ],
)
def test_invalid_variables_raise(environ):
  with pytest.raises(ValueError):
    cluster.find(environ)


@pytest.mark.parametrize(
  "node_list, host",
  [
    ("node1", "node1"),
    ("node1,node2", "node1"),
    ("node[001-003,7],gpu-a", "node001"),
    ("gpu-a,node[001-003]", "gpu-a"),
    ("node[07,12]", "node07"),
    ("rack[2-3]node[010-012]-ib,x", "rack2node010-ib"),
    ("node1.example.com", "node1.example.com"),
  ],
)
def test_first_node_of_a_slurm_list(node_list, host):
  assert launchers.first_node(node_list) == host


GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
NODES = {"SLURM_STEP_TASKS_PER_NODE": "1,2(x2)", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
  "environ, ids",
  [
    (JAX, None),
    (JAX | {"JAX_LOCAL_DEVICE_IDS": "2, 3"}, (2, 3)),
    (TORCHRUN, (1,)),
    (TORCHRUN | GPUS, (2, 3)),
    (TORCHRUN | GPUS | {"LOCAL_WORLD_SIZE": "4"}, (1,)),
    (TORCHRUN | GPUS | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    # Each process sees its own GPU only.
    (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "3"}, None),
    (TORCHRUN | GPUS | {"JAX_PLATFORMS": "cpu"}, None),
    (TORCHRUN | GPUS | {"JAX_LOCAL_DEVICE_IDS": "0"}, (0,)),
    (without(TORCHRUN, "LOCAL_RANK"), None),
    (SLURM, None),
    (SLURM | NODES, (0,)),
    (SLURM | NODES | GPUS | {"SLURM_LOCALID": "1"}, (2, 3)),
    (SLURM | NODES | GPUS | {"SLURM_NODEID": "0"}, None),
    (SLURM | NODES | GPUS | {"SLURM_GPUS_PER_TASK": "2"}, None),
    (SLURM | NODES | GPUS | {"SLURM_GPU_BIND": "per_task:2"}, None),
    (SLURM | NODES | GPUS | {"SLURM_GPU_BIND": "none"}, (0, 1)),
    (OPEN_MPI | GPUS, (2, 3)),
  ],
)
def test_gpus_of_a_machine_are_divided(environ, ids):
  assert cluster.find(environ).local_device_ids == ids


def test_gpus_that_cannot_be_divided_raise():
  with pytest.raises(ValueError, match="4 GPUs"):
    cluster.find(TORCHRUN | GPUS | {"LOCAL_WORLD_SIZE": "3"})


@pytest.mark.parametrize(
  "environ, attributes, hosts",
  [
    ({}, {}, 0),
    # JAX sets this where it finds no chips.
    ({"TPU_SKIP_MDS_QUERY": "1"}, {"worker-network-endpoints": "a,b"}, 0),
    ({"TPU_ML_PLATFORM": "JAX"}, {}, 1),
    ({"TPU_ML_PLATFORM": "JAX"}, {"worker-network-endpoints": "a,b"}, 2),
    (
      {"TPU_ML_PLATFORM": "JAX"},
      {
        "worker-network-endpoints": "a,b",
        "tpu-env": "X: '1'\nMEGASCALE_NUM_SLICES: '3'\n",
      },
      6,
    ),
    ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "localhost"}, {}, 1),
    (
      {
        "TPU_ML_PLATFORM": "JAX",
        "TPU_WORKER_HOSTNAMES": "a,b",
        "MEGASCALE_NUM_SLICES": "2",
      },
      {},
      4,
    ),
  ],
)
def test_hosts_of_a_tpu_are_counted(environ, attributes, hosts):
  read = lambda server, name: attributes.get(name, "")
  assert tpu.num_hosts(environ, read) == hosts


def test_tpu_hosts_are_connected_by_jax():
  found = cluster.find({}, num_tpu_hosts=4)
  assert (found.coordinator_address, found.num_processes) == (None, 4)
  # An indexed Job on TPUs needs no further variables.
  assert cluster.find(INDEXED_JOB, num_tpu_hosts=4).num_processes == 4
  assert cluster.find({}, num_tpu_hosts=1).num_processes == 1
  assert cluster.find(INDEXED_JOB, num_tpu_hosts=1).num_processes == 1
  assert "Slurm" in cluster.find(SLURM, num_tpu_hosts=4).source


@pytest.mark.parametrize(
  "environ",
  [
    {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"},
    {**JAX, "JAX_COORDINATOR_ADDRESS": "no address"},
    {"WORLD_SIZE": "4", "RANK": "3"},
    TORCHRUN,
    SLURM,
    OPEN_MPI_5,
    {**INDEXED_JOB, "JAX_NUM_PROCESSES": "4"},
  ],
)
def test_workers_need_no_coordinator(environ):
  found = cluster.find(environ, needs_coordinator=False)
  assert (found.process_id, found.num_processes) == (3, 4)


@pytest.mark.parametrize(
  ("arguments", "missing"),
  [
    ({"environ": {}, "num_processes": 4}, "process_id"),
    ({"environ": {}, "process_id": 1}, "num_processes"),
    ({"environ": INDEXED_JOB}, "JAX_NUM_PROCESSES"),
    ({"environ": {}, "num_tpu_hosts": 2}, "process_id"),
  ],
)
def test_missing_number_of_a_worker_raises(arguments, missing):
  with pytest.raises(ValueError, match=missing) as error:
    cluster.find(**arguments, needs_coordinator=False)
  assert "coordinator" not in str(error.value).lower()
