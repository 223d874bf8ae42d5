"""What a public repository has besides its code: it is there, and says what is so."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import gradwire

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

if sys.version_info >= (3, 11):
    import tomllib

    PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE"]
)
def test_the_pages_that_people_look_for_are_there(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == gradwire.__version__
    assert citation["license"] == "BSD-3-Clause"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with 3.11")
def test_the_matrix_has_all_versions_that_are_promised() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["matrix"]
    given = matrix["strategy"]["matrix"]
    promised = [
        name.rpartition(" ")[2]
        for name in PROJECT["project"]["classifiers"]
        if re.fullmatch(r".*Python :: 3\.\d+", name)
    ]
    assert given["python"] == promised
    (torch,) = [d for d in PROJECT["project"]["dependencies"] if d.startswith("torch")]
    pinned = re.search(r"^TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert pinned is not None
    assert given["torch"] == [f"{torch.removeprefix('torch>=')}.0", pinned[1]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_with_make_is_a_target(path: Path) -> None:
    steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
    made = [run for run in (step.get("run", "") for step in steps) if "make " in run]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert all(run.split()[-1] in targets for run in made), made


def test_ci_runs_what_make_test_cluster_runs() -> None:
    (names,) = re.findall(r"^CLUSTER \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert sorted(re.findall(r"CLUSTER=(\w+)", workflow)) == sorted(names.split())


def test_contributing_says_what_ci_runs() -> None:
    (command,) = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert f"`{command}`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_make_fuzz_selects_what_hypothesis_runs() -> None:
    """Its plugin marks such tests after `-m` was to know them: conftest.py must not rely on it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "fuzz"]
    module = ROOT / "tests" / "transport" / "test_handshake.py"
    done = subprocess.run(
        [*command, "-q", "--collect-only", str(module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "::test_garbage_is_no_hello" in done.stdout, done.stdout + done.stderr
