"""Reads and checks OpenAI's requests, and makes the engine's parameters of them.

Every function here is pure. A request that is wrong raises an `ApiError`, which has a status and OpenAI's error object.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from paged_jax import engine

MAX_LOGPROBS = 20  # OpenAI's limit for chats
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit for completions
MAX_STOPS = 16  # stop texts of one request

# Fields that the server does not implement. Each may have only these values, which ask for nothing.
NEUTRAL: dict[str, tuple] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": (None, ""),
    "response_format": ({"type": "text"}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
}
IGNORED = {"user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key"}
COMMON = {
    "model", "n", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "max_tokens", "logprobs",
}  # fmt: skip
COMPLETION = COMMON | {"prompt", "echo", "best_of"}
CHAT = COMMON | {"messages", "max_completion_tokens", "top_logprobs"}


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
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class CompletionRequest:
    """A request for /v1/completions: one text or list of tokens for each prompt."""

    prompts: list[str | list[int]]
    params: dict[str, Any]
    echo: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatRequest:
    """A request for /v1/chat/completions: messages with "role" and "content", both texts."""

    messages: list[dict[str, Any]]
    params: dict[str, Any]
    stream: bool
    include_usage: bool


def read_body(body: bytes) -> dict[str, Any]:
    """Reads the JSON object of a request.

    Raises:
        ApiError: the body is not a JSON object.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is not valid JSON") from None
    if not isinstance(content, dict):
        raise ApiError("the body must be a JSON object")
    return content


def read_completion(content: dict[str, Any], model: str) -> CompletionRequest:
    """Reads a request for /v1/completions.

    Args:
        content: the request.
        model: the name of the model that is served.

    Raises:
        ApiError: something is wrong with the request.
    """
    _check_fields(content, COMPLETION, model)
    params = _params(content, default_max_tokens=16)
    best_of = _integer(content, "best_of", 1, 2**31 - 1)
    if best_of not in (None, params["n"]):
        raise ApiError("best_of must be n: the server returns every sample", param="best_of")
    logprobs = _integer(content, "logprobs", 0, MAX_COMPLETION_LOGPROBS)
    echo = _flag(content, "echo")
    if echo and logprobs is not None:
        raise ApiError("logprobs of an echoed prompt are not supported", param="logprobs")
    stream, include_usage = _stream(content)
    return CompletionRequest(_prompts(content), params | {"logprobs": logprobs}, echo, stream, include_usage)


def read_chat(content: dict[str, Any], model: str) -> ChatRequest:
    """Reads a request for /v1/chat/completions; it takes and raises what `read_completion` does."""
    _check_fields(content, CHAT, model)
    params = _params(content, default_max_tokens=None)
    if (limit := _integer(content, "max_completion_tokens", 1, 2**31 - 1)) is not None:
        params["max_tokens"] = limit
    top = _integer(content, "top_logprobs", 0, MAX_LOGPROBS)
    if not _flag(content, "logprobs"):
        if top is not None:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    else:
        params["logprobs"] = top or 0
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return ChatRequest(read, params, *_stream(content))


def sampling_params(params: dict[str, Any], stop_token_ids: tuple[int, ...]) -> engine.SamplingParams:
    """Makes the engine's parameters of a request's.

    Raises:
        ApiError: the engine refuses a value.
    """
    try:
        return engine.SamplingParams(**params, stop_token_ids=stop_token_ids)
    except (ValueError, TypeError) as error:
        raise ApiError(str(error)) from None


def check_text(text: str, param: str) -> None:
    """Raises an `ApiError` if a text cannot be encoded: JSON can name half of a UTF-16 pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{param} is not valid Unicode", param=param) from None


def _check_fields(content: dict[str, Any], known: set[str], model: str) -> None:
    for name, value in content.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ApiError(f"{name} is not supported", param=name)
        if name not in known and name not in NEUTRAL and name not in IGNORED:
            raise ApiError(f"unrecognized field: {_shown(name)}", param=name[:64])
    wanted = content.get("model")
    if not isinstance(wanted, str):
        raise ApiError("model must be a text", param="model")
    if wanted != model:
        message = f"the model {_shown(wanted)} does not exist"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def _params(content: dict[str, Any], default_max_tokens: int | None) -> dict[str, Any]:
    """Reads what both kinds of requests say of sampling; the bounds of n, temperature and top_p are OpenAI's."""
    max_tokens = _integer(content, "max_tokens", 1, 2**31 - 1)
    seed = _integer(content, "seed", -(2**63), 2**63 - 1)
    temperature, top_p = _number(content, "temperature", 0, 2), _number(content, "top_p", 0, 1)
    if top_p == 0:
        raise ApiError("top_p must be above 0", param="top_p")
    return {
        "max_tokens": default_max_tokens if max_tokens is None else max_tokens,
        "n": _integer(content, "n", 1, 128) or 1,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": _integer(content, "top_k", 0, 2**31 - 1) or 0,
        "seed": None if seed is None else seed % 2**64,
        "stop": _stops(content.get("stop")),
    }


def _stops(value: Any) -> tuple[str, ...]:
    value = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ApiError("stop must be a text or a list of texts, none of them empty", param="stop")
    if len(value) > MAX_STOPS:
        raise ApiError(f"stop must hold at most {MAX_STOPS} texts, got {len(value)}", param="stop")
    return tuple(value)


def _stream(content: dict[str, Any]) -> tuple[bool, bool]:
    stream, options = _flag(content, "stream"), content.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise ApiError("stream_options must be an object", param="stream_options")
    if not stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    return stream, _flag(options, "include_usage")


def _prompts(content: dict[str, Any]) -> list[str | list[int]]:
    prompt: Any = content.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(isinstance(item, str) or _is_tokens(item) for item in prompt)
    ):
        raise ApiError("prompt must be a text, a list of texts, a list of tokens or a list of those", param="prompt")
    return prompt


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"{name} must be an object with a text as its role", param=name)
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise ApiError(f"{name}.content must hold parts of type text only", param=f"{name}.content")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ApiError(f"{name}.content must be a text", param=f"{name}.content")
    return message | {"content": content}


def _integer(content: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = content.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise ApiError(f"{name} must be an integer, got {_shown(value)}", param=name)
    if not least <= value <= most:
        raise ApiError(f"{name} must be in [{least}, {most}], got {_shown(value)}", param=name)
    return value


def _number(content: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = content.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not (math.isfinite(value) if type(value) is float else True):
        raise ApiError(f"{name} must be a finite number, got {_shown(value)}", param=name)
    if not least <= value <= most:
        raise ApiError(f"{name} must be in [{least}, {most}], got {_shown(value)}", param=name)
    return float(value)


def _flag(content: dict[str, Any], name: str) -> bool:
    value = content.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {_shown(value)}", param=name)
    return bool(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
