"""Reads and checks OpenAI's requests, and turns them into the engine's parameters.

Beside OpenAI's fields there are some of vLLM's. A request that is wrong raises an `ApiError`, which has a status and
OpenAI's error object. A field that is ignored is noted in the log, once.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.server import grammar, tools
from examples.server.fields import (
    ApiError,
    read_flag,
    read_integer,
    read_number,
    read_object,
    read_tokens,
    shown,
)
from paged_jax import engine

MAX_LOGPROBS = 20  # OpenAI's limit for chats
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit for completions
MAX_STOPS = 16  # stop texts of one request

# Fields that a route does not implement. Each may have only these values, which ask for nothing.
NEUTRAL: dict[str, tuple] = {
    "suffix": (None, ""),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "parallel_tool_calls": (True, False, None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "modalities": (["text"], None),
    "audio": (None,),
    "use_beam_search": (False, None),
    "spaces_between_special_tokens": (True, None),
    "truncate_prompt_tokens": (None,),
}
# OpenAI's clients send these fields, which change no answer of this server.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "reasoning_effort", "verbosity",
}  # fmt: skip
COMMON = {
    "model", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream",
    "stream_options", "max_tokens", "min_tokens", "logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
    "priority", *grammar.FIELDS,
}  # fmt: skip
COMPLETION = COMMON | {"prompt", "echo", "best_of"}
TEMPLATE = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
CHAT = COMMON | TEMPLATE | tools.FIELDS | {"max_completion_tokens", "top_logprobs"}
STREAM_OPTIONS = {"include_usage", "continuous_usage_stats", "include_obfuscation"}

_log = logging.getLogger("paged_jax.server")
_warned: set[str] = set()  # ignored fields that the log has named


@dataclass(frozen=True)
class Wanted:
    """The part that requests for completions and for chats share.

    Attributes:
        params: fields of `engine.SamplingParams`.
        ignores_eos: whether the model's end-of-text tokens end nothing.
        has_no_output: whether no new token is wanted, which the engine cannot do: it draws one, to be left out.
        stream: whether the answer is streamed.
        usage: how often a stream tells the usage: never, at the "end", or "always".
        add_special_tokens: whether the tokenizer adds its special tokens; None for what is usual.
        grammar: what texts the answer may be; None for all.
    """

    params: dict[str, Any]
    ignores_eos: bool
    has_no_output: bool
    stream: bool
    usage: str
    add_special_tokens: bool | None
    grammar: grammar.Grammar | None


@dataclass(frozen=True)
class CompletionRequest:
    """A request for /v1/completions: one text or list of tokens for each prompt."""

    prompts: list[str | list[int]]
    echo: bool
    wanted: Wanted


@dataclass(frozen=True)
class Conversation:
    """Messages with "role" and "content", and what a chat template is told beside them."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]


@dataclass(frozen=True)
class ChatRequest:
    """A request for /v1/chat/completions; `tools` is None where the model is to call none."""

    conversation: Conversation
    wanted: Wanted
    tools: tools.Tools | None


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


def read_completion(content: dict[str, Any], models: Sequence[str]) -> CompletionRequest:
    """Reads a request for /v1/completions.

    Args:
        content: the request.
        models: the names of the model that is served.

    Raises:
        ApiError: something is wrong with the request.
    """
    _check_fields(content, COMPLETION)
    _check_model(content, models)
    wanted = _wanted(content, default_max_tokens=16)
    best_of = read_integer(content, "best_of", 1, 2**31 - 1)
    if best_of not in (None, wanted.params["n"]):
        raise ApiError("best_of must be n: the server returns every sample", param="best_of")
    logprobs, echo = read_integer(content, "logprobs", 0, MAX_COMPLETION_LOGPROBS), read_flag(content, "echo")
    wanted.params.update(logprobs=logprobs, prompt_logprobs=logprobs if echo else None)
    return CompletionRequest(_prompts(content), echo, wanted)


def read_chat(content: dict[str, Any], models: Sequence[str], form: tools.Format | None = None) -> ChatRequest:
    """Reads a request for /v1/chat/completions; it takes and raises what `read_completion` does.

    Args:
        content, models: as for `read_completion`.
        form: how the model writes its calls of tools; None refuses tools.
    """
    _check_fields(content, CHAT)
    _check_model(content, models)
    limit = "max_completion_tokens" if content.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _wanted(content, default_max_tokens=None, limit=limit)
    top = read_integer(content, "top_logprobs", 0, MAX_LOGPROBS)
    if not read_flag(content, "logprobs"):
        if top is not None:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    else:
        wanted.params["logprobs"] = top or 0
    wanted_tools = tools.read_tools(content, form)
    if wanted_tools is not None and wanted_tools.required and wanted.grammar is not None:
        raise ApiError(f"{wanted.grammar.param} cannot stand beside this tool_choice", param=wanted.grammar.param)
    return ChatRequest(read_conversation(content, wanted_tools), wanted, wanted_tools)


def read_conversation(content: dict[str, Any], wanted_tools: tools.Tools | None = None) -> Conversation:
    """Reads the messages of a request and the options of its chat template, which is shown some tools."""
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    goes_on = read_flag(content, "continue_final_message")
    begins = read_flag(content, "add_generation_prompt", default=not goes_on)
    if goes_on and begins:
        raise ApiError("continue_final_message needs add_generation_prompt to be false", param="add_generation_prompt")
    if goes_on and not isinstance(read[-1]["content"], str):
        raise ApiError("continue_final_message needs a last message with a text", param="continue_final_message")
    more = read_object(content, "chat_template_kwargs")
    options = {"add_generation_prompt": begins, "continue_final_message": goes_on, "more": more}
    return Conversation(read, options | {"tools": None if wanted_tools is None else wanted_tools.shown})


def read_tokenize(content: dict[str, Any], models: Sequence[str]) -> tuple[str | Conversation, bool | None]:
    """Reads a request for /tokenize: a text or a conversation, and whether special tokens are added; None as usual."""
    _check_fields(content, {"model", "prompt", "add_special_tokens", "return_token_strs"} | TEMPLATE)
    if content.get("model") is not None:
        _check_model(content, models)
    add = read_flag(content, "add_special_tokens") if content.get("add_special_tokens") is not None else None
    if content.get("messages") is not None:
        return read_conversation(content), add
    if not isinstance(content.get("prompt"), str):
        raise ApiError("prompt must be a text", param="prompt")
    return content["prompt"], add


def read_detokenize(content: dict[str, Any], models: Sequence[str]) -> list[int]:
    """Reads a request for /detokenize: token ids."""
    _check_fields(content, {"model", "tokens"})
    if content.get("model") is not None:
        _check_model(content, models)
    if content.get("tokens") is None:
        raise ApiError("tokens must be a list of token ids", param="tokens")
    return list(read_tokens(content, "tokens"))


def sampling_params(wanted: Wanted, eos_token_ids: Sequence[int]) -> engine.SamplingParams:
    """Turns a request's fields into the engine's parameters.

    Raises:
        ApiError: the engine refuses a value.
    """
    stops = wanted.params["stop_token_ids"] + (() if wanted.ignores_eos else tuple(eos_token_ids))
    try:
        return engine.SamplingParams(**wanted.params | {"stop_token_ids": stops})
    except (ValueError, TypeError) as error:
        raise ApiError(str(error)) from None


def _check_fields(content: dict[str, Any], known: set[str]) -> None:
    for name, value in content.items():
        if name in NEUTRAL and name not in known and value not in NEUTRAL[name]:
            raise ApiError(f"{name} is not supported", param=name)
        if name in IGNORED and name not in _warned:
            _warned.add(name)
            _log.warning("the field %s is ignored wherever a request has it", name)
        if name not in known and name not in NEUTRAL and name not in IGNORED:
            raise ApiError(f"unrecognized field: {shown(name)}", param=name[:64])


def _check_model(content: dict[str, Any], models: Sequence[str]) -> None:
    wanted = content.get("model")
    if not isinstance(wanted, str):
        raise ApiError("model must be a text", param="model")
    if wanted not in models:
        message = f"the model {shown(wanted)} does not exist"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def _wanted(content: dict[str, Any], default_max_tokens: int | None, limit: str = "max_tokens") -> Wanted:
    """Reads a request's fields about sampling; the bounds of n, temperature and top_p are OpenAI's."""
    max_tokens = read_integer(content, limit, 0, 2**31 - 1)
    max_tokens = default_max_tokens if max_tokens is None else max_tokens
    seed = read_integer(content, "seed", -(2**63), 2**63 - 1)
    temperature, top_p = read_number(content, "temperature", 0, 2), read_number(content, "top_p", 0, 1)
    if top_p == 0:
        raise ApiError("top_p must be above 0", param="top_p")
    params = {
        "max_tokens": 1 if max_tokens == 0 else max_tokens,
        "n": read_integer(content, "n", 1, 128) or 1,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": max(read_integer(content, "top_k", -1, 2**31 - 1) or 0, 0),  # -1 is vLLM's word for all
        "priority": read_integer(content, "priority", -(2**31), 2**31 - 1) or 0,
        "seed": None if seed is None else seed % 2**64,
        "stop": _stops(content.get("stop")),
        "stop_token_ids": read_tokens(content, "stop_token_ids"),
        "include_stop": read_flag(content, "include_stop_str_in_output"),
        "skip_special_tokens": read_flag(content, "skip_special_tokens", default=True),
    }
    params |= _logit_params(content)
    add = read_flag(content, "add_special_tokens") if content.get("add_special_tokens") is not None else None
    allowed = grammar.read_grammar(content)
    return Wanted(params, read_flag(content, "ignore_eos"), max_tokens == 0, *_stream(content), add, allowed)


def _logit_params(content: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields that change logits before a draw; the bounds of the first two penalties are OpenAI's."""
    params: dict[str, Any] = {
        "presence_penalty": read_number(content, "presence_penalty", -2, 2),
        "frequency_penalty": read_number(content, "frequency_penalty", -2, 2),
        "min_tokens": read_integer(content, "min_tokens", 0, 2**31 - 1),
        "min_p": read_number(content, "min_p", 0, 1),
        "repetition_penalty": read_number(content, "repetition_penalty", 1e-6, 1e6),
        "logit_bias": _logit_bias(content),
    }
    return {name: value for name, value in params.items() if value is not None}


def _logit_bias(content: dict[str, Any]) -> dict[int, float]:
    biases = read_object(content, "logit_bias")
    if not all(name.isdecimal() and name.isascii() and len(name) < 10 for name in biases):
        raise ApiError("logit_bias must have token ids as its names", param="logit_bias")
    values = {int(name): read_number(biases, name, -100, 100) for name in biases}
    return {token_id: value for token_id, value in values.items() if value is not None}


def _stops(value: Any) -> tuple[str, ...]:
    value = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ApiError("stop must be a text or a list of texts, none of them empty", param="stop")
    if len(value) > MAX_STOPS:
        raise ApiError(f"stop must hold at most {MAX_STOPS} texts, got {len(value)}", param="stop")
    return tuple(value)


def _stream(content: dict[str, Any]) -> tuple[bool, str]:
    stream = read_flag(content, "stream")
    if content.get("stream_options") is None:
        return stream, "never"
    options = read_object(content, "stream_options")
    if not stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    if unknown := sorted(options.keys() - STREAM_OPTIONS):
        raise ApiError(f"unrecognized field of stream_options: {shown(unknown[0])}", param="stream_options")
    if not read_flag(options, "include_usage"):
        return stream, "never"
    return stream, "always" if read_flag(options, "continuous_usage_stats") else "end"


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
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise ApiError(f"{name}.content must hold parts of type text only", param=f"{name}.content")
        content = "".join(part["text"] for part in content)
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ApiError(f"{name}.tool_calls must be a list of objects", param=f"{name}.tool_calls")
        message = message | {"tool_calls": [_call(call) for call in calls]}
    if not isinstance(content, str) and not (content is None and calls):
        raise ApiError(f"{name}.content must be a text", param=f"{name}.content")
    return message | {"content": content}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as chat templates expect it: its arguments are an object, which OpenAI's clients send as a text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}
