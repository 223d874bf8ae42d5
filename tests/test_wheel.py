"""The wheel: what is in it, and that it works without the source tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (found,) = folder.glob("*.whl")
    return found


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True)


def test_it_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entries = next(n for n in names if n.endswith("entry_points.txt"))
        scripts = archive.read(entries).decode()
    folders = {name.split("/")[0] for name in names}
    assert {f for f in folders if not f.endswith(".dist-info")} == {"gradwire"}
    files = {name.split("/")[-1] for name in names}
    assert not [file for file in files if file.startswith(("test_", "conftest"))]
    assert "gradwire = gradwire.__main__:main" in scripts
    assert {"gradwire/py.typed", "gradwire/tools/demo/digits.gz"} <= set(names)


def test_it_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--no-compile", "--target", tmp_path / "site", wheel)
    program = (
        "import gradwire, sys\n"
        "from gradwire.__main__ import main\n"
        "from gradwire.tools.demo.data import load\n"
        "assert gradwire.__file__.startswith(sys.path[1]), gradwire.__file__\n"
        "assert len(load()) == 2\n"
        "sys.argv = ['gradwire', 'doctor', '--quick']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no problems found\n")
