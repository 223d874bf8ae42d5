"""Worlds that a real Slurm starts, on two machines of a network: `make test-cluster`."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, what_is_missing
from tests.worlds import wait_until

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sh"
DAEMONS = ("munged", "slurmctld", "slurmd", "srun")


def missing() -> str:
    """Why there is no Slurm here."""
    for program in DAEMONS:
        if shutil.which(program) is None:
            return f"needs `{program}` (Debian's munge, slurmctld, slurmd)"
    return what_is_missing()


pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(180),
]

# No cgroups, no accounting. Each slurmd has its own files, by its name (%n); of CPUs there may be
# fewer, which Slurm is to believe (config_overrides).
SETTINGS = """
ClusterName=test
SlurmctldHost=node1(10.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr=10.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeAddr=10.0.0.2 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=node1,node2 Default=YES State=UP MaxTime=INFINITE
"""


class Slurm:
    """A controller on the first machine, and a daemon for jobs on each."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines = machines
        self._folder = folder
        own = Path(sys.executable).parent  # of Python
        self._environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{own}:{os.environ['PATH']}",
        }
        for name in ("state", "spool.node1", "spool.node2"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder))
        # Not the one it finds by itself: it looks for cgroups, which nothing here uses.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        where = [f"--socket={folder}/munge.socket", f"--key-file={key}"]
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log")]
        seed = f"--seed-file={folder}/munge.seed"
        machines.start(1, "munged", "--foreground", "--force", *where, *files, seed)
        wait_until((folder / "munge.socket").exists)
        machines.start(1, "slurmctld", "-D", **self._environment)
        for node in (1, 2):
            machines.start(
                node, "slurmd", "-D", "-N", f"node{node}", **self._environment
            )
        wait_until(
            lambda: "2" in self.run("sinfo", "-h", "-t", "idle", "-o", "%D"),
            show=lambda: self.run("sinfo", "-l"),
        )

    def run(self, *command: object, **environment: str) -> str:
        """What a command prints on the first machine."""
        return self._machines.run(1, *command, **self._environment, **environment)

    def job(self, *options: object) -> tuple[str, str]:
        """What a batch job prints, and the state in which it ends."""
        output = self._folder / "job.out"
        sbatch = ("sbatch", "--parsable", "--output", output)
        number = self.run(*sbatch, *options).strip()
        state = ""

        def is_over() -> bool:
            nonlocal state
            found = self.run("scontrol", "show", "job", number)
            state = found.partition("JobState=")[2].split()[0]
            return state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

        wait_until(is_over, show=lambda: f"{state}: {output.read_text()}")
        return output.read_text(), state


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with Machines(2, tmp_path) as machines:
        yield Slurm(machines, tmp_path)


def test_worlds_over_two_nodes(slurm: Slurm) -> None:
    """One test, as it takes Slurm a while to start."""
    four = ("--ntasks-per-node=2", "--cpus-per-task=1")
    program = ("-m", "tests.cluster.programs")

    said, state = slurm.job(*four, SCRIPT, *program, "train")
    assert "0: the same, on worker0 worker1 worker2 worker3\n" in said
    assert state == "COMPLETED"

    # `srun` alone. With fewer tasks than the job has room for, the world is that small.
    key = secrets.token_hex(32)
    said = slurm.run(
        "srun", "-N2", "-n2", "python", *program, "train", GRADWIRE_KEY=key
    )
    assert "the same, on worker0 worker1\n" in said

    said, state = slurm.job(*four, SCRIPT, *program, "die")
    assert state == "FAILED", said
