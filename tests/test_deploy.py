"""What lies in deploy/ agrees with itself, and with what `init_rpc` reads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gradwire._transport.cluster_environments import cluster_place

DEPLOY = Path(__file__).parents[1] / "deploy"


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return found


def test_the_pods_of_the_jobset_find_their_place() -> None:
    jobset = manifest("jobset.yaml")
    name = jobset["metadata"]["name"]
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    env["JOB_COMPLETION_INDEX"] = "1"  # as Kubernetes does in an Indexed Job

    assert job["completionMode"] == "Indexed"
    assert env["WORLD_SIZE"] == str(job["completions"]) == str(job["parallelism"])
    assert env["MASTER_ADDR"] == f"{name}-{workers['name']}-0-0.{name}"
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    assert {**cluster_place(env).variables, **env}.keys() >= {"RANK", "MASTER_PORT"}


def check(job: dict[str, Any]) -> None:
    """By the schema of Kubernetes, which others have their jobs and pods in."""
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job}
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(whole, version, strict=True)


def test_the_jobs_of_the_jobset_are_valid() -> None:
    (workers,) = manifest("jobset.yaml")["spec"]["replicatedJobs"]
    check(workers["template"])
    workers["template"]["spec"]["completionmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError, match="completionmode"):
        check(workers["template"])


def test_the_pods_of_the_ray_cluster_are_valid() -> None:
    cluster = manifest("rayjob.yaml")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"restartPolicy": "Never", **group["template"]["spec"]}
        check({"spec": {"template": {"spec": pod}}})


# The fields of JobSet v1alpha2 and KubeRay's v1, as their API references have them, except for what
# is deprecated. Jobs and pods in them are Kubernetes' own.
GROUP = {"rayStartParams": dict, "template": {"spec": dict}}
KINDS = {
    "jobset.yaml": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "rayjob.yaml": ("ray.io/v1", "RayJob"),
}
FIELDS: dict[str, dict[str, Any]] = {
    "jobset.yaml": {
        "network": {
            "enableDNSHostnames": bool,
            "publishNotReadyAddresses": bool,
            "subdomain": str,
        },
        "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": list},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": dict}}],
    },
    "rayjob.yaml": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "headGroupSpec": GROUP,
            "workerGroupSpecs": [
                {
                    **GROUP,
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                }
            ],
        },
    },
}


def wrong(value: Any, known: Any, where: str = "spec") -> list[str]:
    """What is in a manifest and is not in the API, or of another type."""
    if isinstance(known, type):
        return [] if type(value) is known else [f"{where}: {value!r}"]
    if isinstance(known, list):
        return [w for each in value for w in wrong(each, known[0], where)]
    return [
        w
        for name, field in value.items()
        for w in (
            wrong(field, known[name], f"{where}.{name}")
            if name in known
            else [f"{where}.{name}: no such field"]
        )
    ]


@pytest.mark.parametrize("name", FIELDS)
def test_a_manifest_has_the_fields_of_its_api(name: str) -> None:
    found = manifest(name)
    assert (found.pop("apiVersion"), found.pop("kind")) == KINDS[name]
    assert wrong(found.pop("metadata"), {"name": str}, "metadata") == []
    assert wrong(found.pop("spec"), FIELDS[name]) == []
    assert found == {}


def test_a_field_that_there_is_not_is_found() -> None:
    spec = manifest("rayjob.yaml")["spec"]
    spec["rayClusterSpec"]["workerGroupSpecs"][0]["minreplicas"] = 2
    spec["ttlSecondsAfterFinished"] = "600"
    assert wrong(spec, FIELDS["rayjob.yaml"]) == [
        "spec.ttlSecondsAfterFinished: '600'",
        "spec.rayClusterSpec.workerGroupSpecs.minreplicas: no such field",
    ]


def test_the_script_for_slurm_gives_srun_the_program(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "${#GRADWIRE_KEY}" "$@"\n')
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash", DEPLOY / "slurm.sh", "train.py", "--lr", "two words"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    key, *command = done.stdout.split()
    assert int(key) == 64
    assert command[-5:] == ["python", "train.py", "--lr", "two", "words"]
