"""Reads single fields of a request's JSON object. A wrong field raises an `ApiError`, in OpenAI's form."""

import json
import math
from typing import Any


class ApiError(Exception):
    """The reason why a request is not served, as a status and OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read_integer(content: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """Reads an integer, or None where it is missing or null."""
    value = content.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise ApiError(f"{name} must be an integer, got {shown(value)}", param=name)
    if not least <= value <= most:
        raise ApiError(f"{name} must be in [{least}, {most}], got {shown(value)}", param=name)
    return value


def read_number(content: dict[str, Any], name: str, least: float, most: float) -> float | None:
    """Reads a finite number, or None where it is missing or null."""
    value = content.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not (math.isfinite(value) if type(value) is float else True):
        raise ApiError(f"{name} must be a finite number, got {shown(value)}", param=name)
    if not least <= value <= most:
        raise ApiError(f"{name} must be in [{least}, {most}], got {shown(value)}", param=name)
    return float(value)


def read_flag(content: dict[str, Any], name: str, default: bool = False) -> bool:
    """Reads true or false; the default where it is missing or null."""
    value = content.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {shown(value)}", param=name)
    return default if value is None else value


def read_object(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Reads a JSON object, empty where it is missing or null."""
    value = content.get(name)
    if value is not None and not isinstance(value, dict):
        raise ApiError(f"{name} must be an object, got {shown(value)}", param=name)
    return value or {}


def read_tokens(content: dict[str, Any], name: str) -> tuple[int, ...]:
    """Reads a list of token ids, empty where it is missing or null."""
    value = content.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ApiError(f"{name} must be a list of token ids, got {shown(value)}", param=name)
    return tuple(value)


def check_text(text: str, param: str) -> None:
    """Raises an `ApiError` if a text cannot be encoded: JSON can name half of a UTF-16 pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{param} is not valid Unicode", param=param) from None


def shown(value: Any) -> str:
    """A value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
