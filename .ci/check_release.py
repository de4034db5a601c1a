"""Checks that a tag, the package and the changelog name one version: `python .ci/check_release.py v0.1.0 [--offline]`.

It also asks every link of `[project.urls]`, so that a release shows no link that leads nowhere.
"""

import re
import sys
import tomllib
import urllib.request
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def main(tag: str, *, offline: bool) -> None:
    """Raises an error where they disagree, or where a link does not answer."""
    package = (_ROOT / "paged_jax" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.*)"$', package, re.MULTILINE)
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (_ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert tag == f"v{version}", f"the tag is {tag}, the package {version}"
    assert released[0] == version, f"the changelog's newest version is {released[0]}, the package {version}"
    urls = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    for name, url in {} if offline else urls.items():
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200, f"{name}: {url} answers {answer.status}"


if __name__ == "__main__":
    main(sys.argv[1], offline="--offline" in sys.argv[2:])
