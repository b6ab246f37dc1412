"""The wheel, unpacked in a folder of its own: what an installed project finds without a checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from arachne_runtime import __version__
from planner import catalog

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"arachne_hetero-{__version__}-py3-none-any.whl"
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def python(installed: Path, code: str) -> str:
    """What ``code`` prints where only the wheel's modules are found first."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout.strip()


def test_the_demo_finds_its_scripts(installed):
    found = Path(python(installed, "from launch.demo.run import examples_folder; print(examples_folder())"))
    assert found == installed / "launch" / "examples"
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {path.name for path in found.iterdir()} >= names


def test_the_catalog_has_its_models(installed):
    code = (
        "import planner.catalog as c; p = c.profile_for(c.model('llama-7b'), ['A100-40', 'B200']);"
        "print(c.__file__, len(c.model_names()), len(c.measured_names()), p.model)"
    )
    models, measured = len(catalog.model_names()), len(catalog.measured_names())
    assert python(installed, code) == f"{installed}/planner/catalog/__init__.py {models} {measured} llama-7b"
    (notice,) = installed.glob("*.dist-info/licenses/NOTICE")
    assert "github.com/benson-guo/zorse" in notice.read_text()


def test_annotations_are_for_users_too(installed):
    for package in ("arachne_runtime", "planner", "launch"):
        assert (installed / package / "py.typed").is_file()
