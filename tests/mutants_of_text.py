"""The bugs that `tests.mutants` makes on purpose in streams of text, texts of single tokens, and calls of tools."""

from tests.mutants_made import Mutant

MUTANTS_OF_TEXT = [
    Mutant(
        "text: the first tokens have no context",
        "engine/text.py",
        "_context(self._decode, list(prompt))",
        "_context(self._decode, [])",
        "tests/test_text.py",
    ),
    Mutant(
        "text: a prompt that ends inside a character is cut there",
        "engine/text.py",
        "(decode(prompt[start:]), text)",
        "(text,)",
        "tests/test_text.py",
    ),
    Mutant(
        "text: special tokens at a prompt's end are its context",
        "engine/text.py",
        "        size *= 2\n",
        "        break\n",
        "tests/test_text.py",
    ),
    Mutant(
        "text: the stop text that stands last ends the text",
        "engine/text.py",
        "at, self.stopped_by = min(found)",
        "at, self.stopped_by = max(found)",
        "tests/test_text.py",
    ),
    Mutant(
        "text: a special token stops one token too early",
        "engine/text.py",
        "in self._hidden_stops and self._num_until_stops < 0",
        "in self._hidden_stops and self._num_until_stops <= 0",
        "tests/test_text.py",
    ),
    Mutant(
        "text: what is held back is lost before a special stop",
        "engine/text.py",
        "text = self.flush()  # which",
        'text = ""  # which',
        "tests/test_text.py",
    ),
    Mutant(
        "text: broken bytes take the character before them along",
        "engine/text.py",
        "return self._decode(self._ids[self._num_read :])",
        "return whole[len(self._reads[-1]) :]",
        "tests/test_text.py",
    ),
    Mutant(
        "text: a visible token is taken for a special one",
        "engine/text.py",
        "if token_id is not None and not decode([token_id])}",
        "if token_id is not None}",
        "tests/test_text.py",
    ),
    Mutant(
        "logprobs: the drawn token may be missing",
        "examples/server/logprobs.py",
        "pairs = item.top if item.token_id in dict(item.top) else (*item.top, (item.token_id, item.logprob))",
        "pairs = item.top",
        "tests/test_serve_answers.py",
    ),
    Mutant(
        "logprobs: candidates with one text overwrite each other",
        "examples/server/logprobs.py",
        'found[f"token_id:{token_id}" if name in found else name]',
        "found[name]",
        "tests/test_serve_answers.py",
    ),
    Mutant(
        "logprobs: special tokens move the offsets",
        "examples/server/logprobs.py",
        "if not (self._hides and self._tokens.is_hidden(token_id)):",
        "if True:",
        "tests/test_serve_answers.py",
    ),
    Mutant(
        "tokens: the space of a text's first token is lost",
        "examples/server/tokens.py",
        "self._before = _plain_token(tokenizer)",
        "self._before = []",
        "tests/test_serve_answers.py",
    ),
    Mutant(
        "tokens: bytes that cannot be seen are numbered from 257",
        "examples/server/tokens.py",
        "names | {chr(256 + i)",
        "names | {chr(257 + i)",
        "tests/test_serve_answers.py tests/test_serve_fields.py -k 'bytes or characters or tokenize'",
    ),
    Mutant(
        "logprobs: a space that the tokenizer adds moves all offsets",
        "examples/server/logprobs.py",
        " and text.startswith(piece[1:], after):",
        " and False:",
        "tests/test_serve_answers.py",
    ),
    Mutant(
        "text: a context that begins inside a character is the whole prompt",
        "engine/text.py",
        "starts = range(first, max(first - _CHARACTER, 0), -1)",
        "starts = range(first, first - 1, -1)",
        "tests/test_text.py",
    ),
    Mutant(
        "text: a second flush repeats the text",
        "engine/text.py",
        "        self._num_read, self._reads = len(self._ids), (self._decode(self._ids),)\n        held",
        "        held",
        "tests/test_text.py -k flushed",
    ),
    Mutant(
        "engine: held text is lost where a mask ends",
        "engine/results.py",
        """        text += sequence.text.flush()
        stop_reason = sequence.text.stopped_by
    error""",
        """        stop_reason = sequence.text.stopped_by
    error""",
        "tests/test_engine_adjust.py -k may_begin",
    ),
    Mutant(
        "tools: each chunk may have a call",
        "examples/server/tools.py",
        "calls[: max(self._most - self.num_calls, 0)]",
        "calls[: self._most]",
        "tests/test_serve_tools.py -k first_call",
    ),
]
