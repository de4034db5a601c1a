"""References to global and to shared memory."""

from typing import Any

Ref = Any
"""A reference on the device; on the host, the array or type that it comes from."""

ABSENT: Any = None
"""The value of a field that a call does not have."""
