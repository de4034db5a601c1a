"""References to global and to shared memory."""

from typing import Any

Ref = Any
"""A reference on the device; or the array or the type that it is made from, on the host."""

ABSENT: Any = None
"""Stands for what a call does not have, as its Problem and its Tuning say."""
