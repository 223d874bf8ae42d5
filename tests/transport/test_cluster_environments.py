"""Places found in what schedulers set, with environments that were recorded or are documented."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore

import gradwire as gw
from gradwire._transport.cluster_environments import cluster_place, host_names
from gradwire._transport.stores import find_place
from gradwire.api import enter, set_place
from tests.processes import Processes
from tests.worlds import LIMIT, free_port

RECORDED = Path(__file__).parent / "cluster_environments"

WORKER = """
import gradwire as gw
with gw.init_rpc() as worker:
    names = gw.all_gather(None)
    print(worker.name, "of", len(names), flush=True)
"""


def recorded(name: str, **changes: str) -> dict[str, str]:
    """The variables in a file, but for these changes."""
    lines = (RECORDED / f"{name}.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert found.keys() >= changes.keys() - NEW
    return found | changes


NEW = {"SLURM_STEP_RESV_PORTS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}


def place(name: str, **changes: str) -> tuple[str | None, ...]:
    """The rank, size and address that `env://` reads in such an environment."""
    env = recorded(name, **changes)
    found = {**cluster_place(env).variables, **env}
    return tuple(
        found.get(n) for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NEW:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchrun", ("2", "4", "127.0.0.1", "44407")),
        ("slurm-step", ("2", "4", "node1", "16564")),
        ("openmpi5", ("1", "2", "127.0.0.1", "18300")),
        ("openmpi4-two-hosts", ("3", "4", None, "24434")),
        ("kubeflow-pytorchjob", ("2", "4", "train-master-0", "23456")),
        ("kubeflow-trainjob", ("2", "4", "train-node-0-0.train", "29400")),
        ("jobset", ("2", "4", "gradwire-worker-0-0.gradwire", "29500")),
    ],
)
def test_a_place_is_found(name: str, expected: tuple[str | None, ...]) -> None:
    assert place(name) == expected


def test_every_recorded_environment_is_tried() -> None:
    tried = {
        "slurm-batch",
        *(f[0] for f in test_a_place_is_found.pytestmark[0].args[1]),
    }  # type: ignore[attr-defined]
    assert {path.stem for path in RECORDED.glob("*.env")} == tried


def test_a_batch_script_is_no_task_of_slurm() -> None:
    assert place("slurm-batch") == (None, None, None, None)


@pytest.mark.parametrize("shell", ["bash", "interactive"])
def test_a_shell_under_slurm_is_no_task(shell: str) -> None:
    assert place("slurm-step", SLURM_JOB_NAME=shell)[0] is None


def test_what_is_set_in_torchs_words_wins() -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert place("slurm-step", **given) == ("2", "4", "10.0.0.1", "1234")
    launched = {"RANK": "5", "WORLD_SIZE": "8", **given}
    assert place("slurm-step", **launched) == ("5", "8", "10.0.0.1", "1234")


def test_steps_of_slurm_at_the_same_time_have_their_own_ports() -> None:
    ports = {
        place("slurm-step", SLURM_JOB_ID=job, SLURM_STEP_ID=step)[3]
        for job in ("7", "8", "9")
        for step in ("0", "1", "2")
    }
    assert len(ports) == 9
    assert all(15000 <= int(port or 0) < 25000 for port in ports)


def test_ports_that_slurm_has_reserved_are_used() -> None:
    assert place("slurm-step", SLURM_STEP_RESV_PORTS="12004-12005")[3] == "12004"


def test_the_first_node_of_slurm_is_reached_on_the_way_to_the_second() -> None:
    def neighbor(**changes: str) -> str | None:
        return cluster_place(recorded("slurm-step", **changes)).neighbor

    assert neighbor(SLURM_NODEID="0") == "node2"
    assert neighbor(SLURM_NODEID="1") is None
    assert neighbor(SLURM_NODEID="0", SLURM_STEP_NODELIST="node1") is None


def test_a_pod_in_which_torchrun_must_start_several_has_no_place() -> None:
    env = recorded("kubeflow-trainjob", PET_NPROC_PER_NODE="8")
    del env["JOB_COMPLETION_INDEX"]
    assert not cluster_place(env).variables


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # What `scontrol show hostnames` of Slurm 22.05 prints.
        ("node7", "node7"),
        ("login,node[08-10,12]", "login node08 node09 node10 node12"),
        ("rack[0-1]n[3-4]", "rack0n3 rack0n4 rack1n3 rack1n4"),
    ],
)
def test_host_lists_are_expanded(text: str, names: str) -> None:
    assert list(host_names(text)) == names.split()


# On the way to a world


def test_init_rpc_reads_the_place(environment: pytest.MonkeyPatch) -> None:
    local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = recorded("slurm-step", SLURM_PROCID="0", SLURM_NODEID="0", **local)
    for name, value in env.items():
        environment.setenv(name, value)
    found = find_place(None, None, None, None, LIMIT)
    assert (found.rank, found.size, found.host) == (0, 4, "node2")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("openmpi4-two-hosts", "mpirun -x MASTER_ADDR=HOST"),
        ("jobset", "in the manifest, as in deploy/jobset.yaml"),
    ],
)
def test_what_only_the_user_knows_is_asked_for(
    environment: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    for variable, value in recorded(name).items():
        environment.setenv(variable, value)
    environment.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=f"MASTER_ADDR is not set: .*{advice}"):
        gw.init_rpc()


def test_a_rank_given_in_the_program_needs_no_scheduler(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("JOB_COMPLETION_INDEX", "3")
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("MASTER_PORT", str(free_port()))
    found = find_place("env://", None, 0, 1, LIMIT)
    assert (found.rank, found.size) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank"),
    [("slurm-step", "SLURM_PROCID"), ("openmpi5", "OMPI_COMM_WORLD_RANK")],
)
def test_a_world_meets_without_arguments(tmp_path: Path, name: str, rank: str) -> None:
    size = {"slurm-step": "SLURM_STEP_NUM_TASKS", "openmpi5": "OMPI_COMM_WORLD_SIZE"}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = Processes(tmp_path)
    script = processes.script(WORKER)
    try:
        started = []
        for number in "01":
            own = {rank: number, size[name]: "2", "SLURM_NODEID": "1"}
            env = recorded(name) | here | own
            started.append(processes.run(script, **env))
        assert [process.wait() for process in started] == [0, 0]
        assert [p.output for p in started] == ["worker0 of 2\n", "worker1 of 2\n"]
    finally:
        processes.close()


def test_a_process_can_be_told_its_place() -> None:
    before = enter(None)
    set_place(store=HashStore(), rank=0, world_size=1, torch_threads=0)
    try:
        with gw.init_rpc(timeout=7) as worker:
            assert (worker.name, worker.options.timeout) == ("worker0", 7)
        with gw.init_rpc("a", store=HashStore(), rank=0, world_size=1) as worker:
            assert worker.options.torch_threads is None
    finally:
        set_place()
        enter(before)
