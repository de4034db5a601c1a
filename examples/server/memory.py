"""How much memory this machine still has, for a cache that lies there."""

from pathlib import Path


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that a process on Linux can still use, or None if that is not known.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    bounds = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        bounds += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    # A container may have less, and these are the files of both versions of control groups.
    for limit, usage in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            bounds.append(max(int((root / limit).read_text()) - int((root / usage).read_text()), 0))
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
    return min(bounds, default=None)
