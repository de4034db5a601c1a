"""Checks what a wheel and an sdist contain: `python .ci/check_distributions.py FOLDER`."""

import sys
import tarfile
import zipfile
from pathlib import Path

_LARGEST_SDIST = 1_500_000  # bytes


def main(folder: str) -> None:
    """Raises an error where a distribution holds what it should not, or lacks what it should."""
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    foreign = [name for name in names if not name.startswith(("paged_jax/", "paged_jax-"))]
    assert not foreign, f"the wheel holds {foreign[:5]}"
    assert not [
        name for name in names if Path(name).suffix not in (".py", ".typed", ".md", "") and "dist-info" not in name
    ]
    assert {"paged_jax/py.typed", "paged_jax/compat/rpa.py", "paged_jax/kernels/xla/decode.py"} <= set(names)
    size = sdist.stat().st_size
    assert size < _LARGEST_SDIST, f"the sdist has {size} bytes, more than {_LARGEST_SDIST}"
    with tarfile.open(sdist) as archive:
        members = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "paged_jax/__init__.py"} <= members
    print(f"{wheel.name}: {wheel.stat().st_size} bytes, {len(names)} files; {sdist.name}: {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
