"""The texts and bytes of single tokens, as OpenAI's log-probabilities show them."""

import functools
import re

from tokenizers import Tokenizer, pre_tokenizers

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers give for the bytes of an unfinished character


class TokenTexts:
    """Knows the text of each token of a tokenizer, special tokens and spaces at the beginning included.

    A tokenizer may leave out the space of a text's first token, so that each token is decoded behind another one.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before = _plain_token(tokenizer)
        self.text = functools.lru_cache(2**16)(self._text)

    def _text(self, token_id: int) -> str:
        """The token's text; bytes of incomplete characters become replacement characters."""
        shown = self._decode([*self._before, token_id])
        return shown[len(self._decode(self._before)) :]

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is a special one, which a text does not show."""
        return not self._tokenizer.decode([*self._before, token_id])[len(self._decode(self._before)) :]

    def bytes(self, token_id: int) -> bytes:
        """The bytes of the token in UTF-8, which may begin or end inside a character."""
        text, name = self.text(token_id), self._tokenizer.id_to_token(token_id) or ""
        if _BROKEN in text and _BROKEN not in name:
            if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
                return bytes([int(name[3:5], 16)])
            if all(character in _byte_names() for character in name):
                return bytes(_byte_names()[character] for character in name)
        return text.encode()

    def name(self, token_id: int) -> str:
        """The text by which completions name the token; one that is no text is named by its bytes."""
        token_bytes = self.bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def longest_token(tokenizer: Tokenizer) -> int:
    """The most characters of a text that one token can stand for."""
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _plain_token(tokenizer: Tokenizer) -> list[int]:
    """A token whose text does not change with the tokens after it; nothing if there is none."""
    for token_id in [*tokenizer.encode("a", add_special_tokens=False).ids[::-1], *range(tokenizer.get_vocab_size())]:
        text = tokenizer.decode([token_id])
        if text and _BROKEN not in text and tokenizer.decode([token_id, token_id]).startswith(text):
            return [token_id]
    return []


@functools.cache
def _byte_names() -> dict[str, int]:
    """The characters that stand for bytes in the vocabularies of byte-level tokenizers."""
    # GPT-2 names a byte by the character with its number if that can be seen, and all others by 256, 257, ... in order.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    names = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = sorted(set(range(256)) - set(names.values()))
    return names | {chr(256 + i): byte for i, byte in enumerate(others)}
