"""Grammars that restrict an answer's text: JSON schemas, regular expressions, choices, or grammars in Lark's language.

llguidance turns a grammar into a mask over the tokens; the engine asks the mask before it draws a token.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np
from tokenizers import Tokenizer

from examples.server.fields import ApiError, read_object, shown

_KINDS = ("json", "regex", "choice", "grammar")  # of vLLM's fields, each also as guided_json and so on
FIELDS = {"response_format", "structured_outputs", *(f"guided_{kind}" for kind in _KINDS)}
_KEPT = 64  # compiled grammars
_ANY_OBJECT = {"type": "object"}


class Grammar(NamedTuple):
    """The texts that an answer may be.

    Attributes:
        kind: "json_schema", "regex", "choice", "grammar" or "lark".
        text: the schema, the choices as JSON, or the text of the others.
        param: the request's field that has it.
    """

    kind: str
    text: str
    param: str


def read_grammar(content: dict[str, Any]) -> Grammar | None:
    """Reads the field of a request that restricts its answer; None if there is no such field.

    Raises:
        ApiError: a field is wrong, or there are two.
    """
    found = [_read_response_format(content)]
    nested = read_object(content, "structured_outputs")
    if unknown := sorted(nested.keys() - {*_KINDS, "json_object"}):
        raise ApiError(f"unrecognized field of structured_outputs: {shown(unknown[0])}", param="structured_outputs")
    for kind in _KINDS:
        for fields, name in ((content, f"guided_{kind}"), (nested, kind)):
            if fields.get(name) is not None:
                found.append(_read_field(kind, fields[name], name))
    if nested.get("json_object"):
        found.append(Grammar("json_schema", json.dumps(_ANY_OBJECT), "structured_outputs"))
    given = [grammar for grammar in found if grammar is not None]
    if len(given) > 1:
        raise ApiError(f"{given[1].param} cannot stand beside {given[0].param}", param=given[1].param)
    return given[0] if given else None


def _read_response_format(content: dict[str, Any]) -> Grammar | None:
    wanted = read_object(content, "response_format")
    match wanted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", json.dumps(_ANY_OBJECT), "response_format")
        case "json_schema":
            schema = read_object(wanted, "json_schema").get("schema")
            if not isinstance(schema, dict):
                raise ApiError("response_format.json_schema must have an object schema", param="response_format")
            return Grammar("json_schema", json.dumps(schema), "response_format")
        case other:
            message = f"response_format.type must be text, json_object or json_schema, got {shown(other)}"
            raise ApiError(message, param="response_format")


def _read_field(kind: str, value: Any, name: str) -> Grammar:
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise ApiError(f"{name} is not valid JSON", param=name) from None
        if not isinstance(value, dict):
            raise ApiError(f"{name} must be a JSON schema, got {shown(value)}", param=name)
        return Grammar("json_schema", json.dumps(value), name)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise ApiError(f"{name} must be a list of texts, none of them empty", param=name)
        return Grammar(kind, json.dumps(value), name)
    if not isinstance(value, str) or not value:
        raise ApiError(f"{name} must be a text, got {shown(value)}", param=name)
    return Grammar(kind, value, name)


class Grammars:
    """Compiles grammars for a tokenizer, and caches the most recently used ones.

    Args:
        tokenizer: the model's tokenizer.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        self._tokenizer, self._eos_token_ids = tokenizer, list(eos_token_ids)
        self._compiled = functools.lru_cache(_KEPT)(self._compile)

    def mask(self, grammar: Grammar) -> "GrammarMask":
        """Compiles a grammar, which may take a second. Any thread may call this.

        Raises:
            ApiError: the grammar cannot be compiled; the error says why.
        """
        try:
            return self._compiled(grammar.kind, grammar.text)
        except ValueError as error:
            raise ApiError(f"{grammar.param} cannot be used: {error}", param=grammar.param) from None

    def _compile(self, kind: Any, text: str) -> "GrammarMask":
        source = llguidance.grammar_from(kind, text)
        if message := llguidance.LLMatcher.validate_grammar(source, self._tokens):
            raise ValueError(message.split("<state>")[0].strip())
        return GrammarMask(llguidance.LLMatcher(self._tokens, source, log_level=0))

    @functools.cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self._tokenizer.to_str(), eos_token=self._eos_token_ids or None)


class GrammarMask:
    """A compiled grammar: a `paged_jax.engine.TokenMask`.

    Args:
        matcher: llguidance's matcher at the beginning of a text; each sample gets a copy.
    """

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def start(self) -> "GrammarState":
        """The state of a sample that has no token yet."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """A sample's state in its grammar.

    Args:
        matcher: llguidance's matcher, which this state moves on.
    """

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def fill(self, allowed: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next; after a complete text none, which ends the sample."""
        self._check()
        if not self._matcher.is_stopped():
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(allowed)]
            allowed[: len(words)] = words  # the model may have more logits than its tokenizer has tokens
            self._check()

    def advance(self, token_id: int) -> None:
        """Takes the token that was drawn."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error().split("<state>")[0].strip())
