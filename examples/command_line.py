"""Shared by the command lines of generate.py and serve.py: options of the model and its cache, checks, and errors."""

import argparse
import contextlib
import math
import os
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
from jax.sharding import Mesh

from examples import loop
from examples.config import DecoderConfig
from paged_jax import BLOCK_SIZES, Implementation

TINY = Path(__file__).resolve().parent / "tiny"
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")


class CommandError(ValueError):
    """Says why something cannot be done, in one line that can be shown to users."""


class Parser(argparse.ArgumentParser):
    """A parser that raises a `CommandError` where `argparse` would end the program.

    Args:
        prog: the program's name.
        description: the beginning of its help.
    """

    def __init__(self, prog: str, description: str | None):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises the error."""
        raise CommandError(message)


def add_model_options(add: Any) -> None:
    """Adds the options of the model and its cache to a parser or a group.

    Args:
        add: the method `add_argument` of the parser or group.
    """
    add("--dtype", choices=DTYPES, default="auto",
        help="of the weights; auto = float32 on a CPU, bfloat16 elsewhere")  # fmt: skip
    add("--kv-cache-dtype", choices=DTYPES + QUANTISED, default="auto",
        help="of the cached keys and values (--dtype's); int8 and float8 take half of bfloat16's room")  # fmt: skip
    add("--k-scale", metavar="S", type=float,
        help="a key is S times what an int8 or float8 cache holds of it (float8: 1; int8: measured on a text, for "
        "each layer and head)")  # fmt: skip
    add("--v-scale", metavar="S", type=float, help="the same for values")
    add("--block-size", metavar="N", type=int, default=16, help="tokens in a block of the cache (%(default)s)")
    add("--implementation", choices=get_args(Implementation), help="of the paged ops (the fastest there is)")
    add("--split-experts", choices=("columns", "experts"), default="columns",
        help="what the GPUs of a mesh share out of a mixture of experts (%(default)s)")  # fmt: skip
    add("--custom-all-reduce", action=argparse.BooleanOptionalAction, default=True,
        help="with --mesh, on Hopper GPUs: whether the kernel of all_reduce.py adds up decode steps (%(default)s)"
    )  # fmt: skip
    add("--no-compilation-cache", action="store_true",
        help="compile anew, instead of keeping compiled programs in the user's cache folder")  # fmt: skip


def check(options: argparse.Namespace, flag: str, is_right: bool, expected: str) -> None:
    """Raises a `CommandError` that names an option and its value, unless the value is right."""
    if not is_right:
        raise CommandError(f"{flag} must be {expected}, got {getattr(options, flag[2:].replace('-', '_'))}")


def check_model_options(options: argparse.Namespace) -> None:
    """Raises a `CommandError` if an option of the model or its cache, or --num-blocks, has a wrong value."""
    check(options, "--block-size", options.block_size in BLOCK_SIZES, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    check(options, "--num-blocks", options.num_blocks is None or options.num_blocks >= 1, "1 or more")
    for flag, scale in ("--k-scale", options.k_scale), ("--v-scale", options.v_scale):
        check(options, flag, scale is None or 0 < scale < math.inf, "above 0 and finite")
        if scale is not None and options.kv_cache_dtype not in QUANTISED:
            raise CommandError(f"{flag} needs --kv-cache-dtype to be one of {', '.join(QUANTISED)}")


def choose_dtype(options: argparse.Namespace) -> str:
    """Returns the dtype of the weights, for which --dtype=auto asks this machine.

    Raises:
        CommandError: JAX finds no device, or none on which --implementation runs.
    """
    try:
        is_cpu = jax.default_backend() == "cpu"
    except (RuntimeError, AssertionError) as error:
        reason = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise CommandError(f"JAX finds no device: {reason}") from error
    if is_cpu and options.implementation not in (None, "xla"):
        raise CommandError(f"--implementation {options.implementation} needs an NVIDIA GPU")
    return options.dtype if options.dtype != "auto" else "float32" if is_cpu else "bfloat16"


def choose_scales(
    options: argparse.Namespace,
    config: DecoderConfig,
    cache_dtype: str,
    programs: loop.Programs,
    request: loop.Request,
    dtype: str,
    mesh: Mesh | None,
) -> loop.Scales | None:
    """Chooses each layer's scales: those of the command line, or else measured ones for int8 and 1 for float8."""
    if cache_dtype not in QUANTISED:
        return None
    scales: loop.Scales = [(1.0, 1.0)] * config.num_layers
    if cache_dtype == "int8" and None in (options.k_scale, options.v_scale):
        scales = loop.measure_scales(programs, config, request, options.block_size, dtype, mesh)
    return [(options.k_scale or k_scale, options.v_scale or v_scale) for k_scale, v_scale in scales]


def use_compilation_cache() -> None:
    """Makes JAX keep compiled programs in the user's cache folder, unless it is told to keep them elsewhere."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paged_jax"
    with contextlib.suppress(OSError):  # if the folder cannot be written, programs are compiled every time
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))


def one_line(error: Exception) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split())
