"""Arithmetic of sizes, on the host."""


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)
