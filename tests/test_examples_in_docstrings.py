"""Tests that every public function and class has an example in its docstring, which does what it shows."""

import doctest
import inspect
import types

import jax
import pytest

import paged_jax
from paged_jax import allocator, engine
from paged_jax.compat import rpa

# `tests/test_processes.py` runs these, which need several processes.
WITHOUT = ("LeadingEngine", "follow")


def public():
    """The public names that can have an example: not constants and names of types, whose values say it all."""
    for module in (paged_jax, allocator, engine, rpa):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and name not in WITHOUT:
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", list(public()))
def test_example(value):
    (test, *others) = doctest.DocTestFinder(recurse=False).find(value, value.__name__, globs={})
    assert test.examples
    assert not others
    with jax.default_device(jax.devices("cpu")[0]):
        assert doctest.DocTestRunner().run(test).failed == 0


def test_methods_have_docstrings():
    for parameter in public():
        (value,) = parameter.values
        for name, member in vars(value).items():
            if not name.startswith("_") and isinstance(member, types.FunctionType | property | classmethod):
                assert inspect.getdoc(getattr(value, name)), f"{parameter.id}.{name}"


def test_every_argument_of_a_function_has_a_type_and_a_word():
    for parameter in public():
        (value,) = parameter.values
        if inspect.isfunction(value):
            for name, argument in inspect.signature(value).parameters.items():
                assert argument.annotation is not argument.empty, f"{parameter.id}: {name}"
                assert name in (value.__doc__ or ""), f"{parameter.id}: {name}"


def test_there_are_as_many_as_there_should_be():
    assert len(list(public())) > 50
