"""Tests that a release is put together from one version, and that CI runs what checks it."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paged_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tag_package_and_changelog_name_one_version():
    check = script("check_release").main
    check(f"v{paged_jax.__version__}", offline=True)
    with pytest.raises(AssertionError, match=r"the tag is v9\.9\.9, the package"):
        check("v9.9.9", offline=True)


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "paged_jax/__init__.py"


def test_the_oldest_jax_is_the_same_everywhere():
    (jax,) = (name for name in PROJECT["project"]["dependencies"] if name.startswith("jax>"))
    oldest = jax.removeprefix("jax>=")
    assert f"jax=={oldest}" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"JAX must be {oldest} or newer" in (ROOT / "README.md").read_text()
    extras = PROJECT["project"]["optional-dependencies"]
    bounds = re.findall(r"jax(?:\[cuda\d+\]|-cuda13-plugin)>=([\d.]+)", str(extras))
    assert len(bounds) == 3
    assert set(bounds) == {oldest}


@pytest.mark.parametrize(
    ("workflow", "commands"),
    [
        ("ci.yml", ["bash .ci/run", "bash .ci/package", "bash .ci/docs"]),
        ("release.yml", ["bash .ci/package", "check_release.py", "gh-action-pypi-publish", "id-token: write"]),
        ("docs.yml", ["bash .ci/docs", "deploy-pages"]),
    ],
)
def test_workflows_run_the_scripts(workflow, commands):
    text = (ROOT / ".github" / "workflows" / workflow).read_text()
    assert all(command in text for command in commands)


def test_the_check_of_examples_fails_if_one_is_wrong(tmp_path):
    """The script that tests the wheel alone takes any package of that name."""
    package = tmp_path / "paged_jax"
    package.mkdir()
    lines = "".join(f">>> {i} + 1\n{i + (2 if i == 77 else 1)}\n" for i in range(120))
    (package / "__init__.py").write_text(f'__version__ = "{paged_jax.__version__}"\n__doc__ = """{lines}"""\n')
    (package / "part.py").write_text(f'"""{lines}"""\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy; " + (
        f"runpy.run_path({str(ROOT / '.ci' / 'run_examples.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "120 lines of examples, 1 failed" in done.stdout, done.stderr
    assert done.returncode == 1
