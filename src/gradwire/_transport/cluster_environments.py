"""What a cluster's scheduler puts into the environment, translated to that of `env://`. Pure.

torchrun, `gradwire launch` and Kubeflow's PyTorchJob set `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT` themselves. Others have variables of their own, which are translated here. Torch's
variables always take precedence, one by one; and where there is a `RANK`, no scheduler is asked,
since then a launcher stands between it and this process.

A scheduler assigns no ports. Concurrent worlds on one machine each need their own: the port is
derived from the job's number, which all of its processes know, and is below the range that Linux
uses for outgoing connections.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Environment = Mapping[str, str]

_PORTS = range(15000, 25000)
_POD_PORT = "29500"  # torch's own; a pod has all ports for itself
_SHELLS = ("bash", "interactive")


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """Where a scheduler has put this process."""

    variables: Environment
    """What `env://` needs, as far as the scheduler says it."""
    neighbor: str | None = None
    """For processes on the job's first machine: another one. A machine may know its own name as
    127.0.1.1 (Debian), so the address that others can reach it by is the one on the way there."""
    hint: str = ""
    """What to do if there is no `MASTER_ADDR`."""


def cluster_place(env: Environment) -> ClusterPlace:
    """This process's place, without variables if no scheduler started it."""
    if "RANK" in env:
        return ClusterPlace({})
    for find in (_slurm, _open_mpi, _kubeflow_trainer, _kubernetes):
        if (found := find(env)) is not None:
            return found
    return ClusterPlace({})


def _slurm(env: Environment) -> ClusterPlace | None:
    """A task of `srun`. A batch script itself is not one, nor is a user's shell."""
    if "SLURM_STEP_ID" not in env or env.get("SLURM_JOB_NAME") in _SHELLS:
        return None
    nodes = list(host_names(env["SLURM_STEP_NODELIST"]))
    reserved = env.get("SLURM_STEP_RESV_PORTS")  # by srun --resv-ports
    variables = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": re.split("[-,]", reserved)[0]
        if reserved
        else _port_of(f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"),
    }
    is_first = env.get("SLURM_NODEID") == "0" and len(nodes) > 1
    return ClusterPlace(variables, nodes[1] if is_first else None)


def _open_mpi(env: Environment) -> ClusterPlace | None:
    """A process of `mpirun`, which tells where rank 0 is only if all are on one machine."""
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    size = env["OMPI_COMM_WORLD_SIZE"]
    # The first is Open MPI 5, the other Open MPI 4.
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    variables = {
        "RANK": env["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "MASTER_PORT": _port_of(job),
    }
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size:
        variables["MASTER_ADDR"] = "127.0.0.1"
    return ClusterPlace(
        variables,
        hint="Open MPI does not tell where rank 0 is: start with `mpirun -x MASTER_ADDR=HOST`, "
        "the first host of the job",
    )


def _kubeflow_trainer(env: Environment) -> ClusterPlace | None:
    """A pod of Kubeflow's TrainJob, whose variables are torchrun's options."""
    if "PET_NODE_RANK" not in env or env.get("PET_NPROC_PER_NODE", "1") != "1":
        return None  # torchrun must start several processes in each pod
    variables = {
        "RANK": env["PET_NODE_RANK"],
        "WORLD_SIZE": env["PET_NNODES"],
        "MASTER_ADDR": env["PET_MASTER_ADDR"],
        "MASTER_PORT": env["PET_MASTER_PORT"],
    }
    return ClusterPlace(variables)


def _kubernetes(env: Environment) -> ClusterPlace | None:
    """A pod of an Indexed Job, also in a JobSet: its index is given, the user sets the rest.

    Without a `WORLD_SIZE` the world is elastic, as everywhere.
    """
    if "JOB_COMPLETION_INDEX" not in env:
        return None
    return ClusterPlace(
        {"RANK": env["JOB_COMPLETION_INDEX"], "MASTER_PORT": _POD_PORT},
        hint="Kubernetes tells a pod its number only: set MASTER_ADDR, the pod number 0, and "
        "WORLD_SIZE in the manifest, as in deploy/jobset.yaml",
    )


def _port_of(job: str) -> str:
    return str(_PORTS[zlib.crc32(job.encode()) % len(_PORTS)])


def host_names(text: str) -> Iterator[str]:
    """The names in one of Slurm's host lists, as `scontrol show hostnames` prints them.

    >>> list(host_names("login,node[08-10,12]"))
    ['login', 'node08', 'node09', 'node10', 'node12']
    """
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        yield from _expand(pattern)


def _expand(pattern: str) -> Iterator[str]:
    """The names that a pattern stands for; the last brackets vary fastest."""
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", pattern)
    if found is None:
        yield pattern
        return
    before, ranges, after = found.groups()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(after):
                yield f"{before}{number:0{len(first)}d}{rest}"
