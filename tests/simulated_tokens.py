"""The tokens of requests in an engine whose device is simulated (engine_simulation.py), computed without an engine.

A chain is a number that depends on all tokens of a sequence up to one token. The token that a sample draws depends on
its chain and on all of its parameters, so `expected_tokens` gives the tokens of each request.
"""

import numpy as np

from paged_jax.engine import SamplingParams

VOCAB = 7  # few tokens: prompts and outputs begin alike by chance, and stop tokens come
_MASK = 2**64 - 1


def mix(chain, value):
    """Mixes a value into a chain; both are uint64 arrays or Python's integers."""
    if isinstance(chain, int):
        chain = ((chain ^ (value + 0x9E3779B97F4A7C15 & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        return chain ^ chain >> 29
    chain = (chain ^ (value + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return chain ^ (chain >> np.uint64(29))


def link(chain, token, salt):
    """Continues a chain by a token, under weights of this salt."""
    value = token + VOCAB * salt
    return mix(chain, int(value) if isinstance(chain, int) else np.asarray(value).astype(np.uint64))


def chain_of(tokens, salt):
    """The chain of all these tokens."""
    chain = 0
    for token in tokens:
        chain = link(chain, token, salt)
    return chain


def expected_tokens(prompt, params: SamplingParams, index, room, seed=None, salts=((0, 0),)):
    """The tokens that an engine must give for a sample in every history.

    Args:
      prompt, params: the request.
      index: the sample's index.
      room: the most tokens that a sequence may have.
      seed: the request's seed, if the parameters have none.
      salts: which weights draw the tokens: (number of the first output token, salt) pairs, in rising order.
    """
    tokens, salts = list(prompt), dict(salts)
    most = room if params.max_tokens is None else len(prompt) + params.max_tokens
    seed = params.seed if seed is None else seed
    while len(tokens) < most:
        output = tokens[len(prompt) :]
        if len(output) in salts:
            salt = salts[len(output)]
            chain = chain_of(tokens, salt)
        allowed = range(VOCAB) if params.mask is None else params.mask.allowed_after(output)
        if not allowed:
            break
        drawn = chain
        if params.temperature > 0:
            bits = [int(np.float32(x).view(np.uint32)) for x in (params.temperature, params.top_p)]
            for value in (*bits, params.top_k, seed or 0, index, len(tokens)):
                drawn = mix(drawn, value)
        if params.is_adjusted:
            numbers = params.repetition_penalty, params.presence_penalty, params.frequency_penalty, params.min_p
            counts = [output.count(token) | (token in prompt) << 15 for token in range(VOCAB)]
            biases = dict(params.logit_bias)
            if len(output) < params.min_tokens:
                biases |= dict.fromkeys(params.stop_token_ids, -np.inf)
            tokens.append(pick(drawn, numbers, counts, biases, allowed))
        else:
            tokens.append(drawn % VOCAB)
        chain = link(chain, tokens[-1], salt)
        if tokens[-1] in params.stop_token_ids:
            break
    return tuple(tokens[len(prompt) :])


def pick(drawn, numbers, counts, biases, allowed):
    """The token of an adjusted row: it depends on all adjustments of the row, and counts matter to penalties only."""
    bits = [int(np.float32(x).view(np.uint32)) for x in numbers]
    for value in (*bits, *(counts if tuple(numbers[:3]) != (1, 0, 0) else ())):
        drawn = mix(drawn, int(value))
    for token, bias in sorted(biases.items()):
        if bias > -np.inf:
            drawn = mix(mix(drawn, token), int(np.float32(bias).view(np.uint32)))
    left = [token for token in allowed if biases.get(token) != -np.inf] or list(allowed)
    return left[drawn % len(left)]


class Rules:
    """A mask of the simulation: which tokens may come depends on the last one and on the sum of all.

    Attributes:
      end: a sample ends once it has this many tokens, and one more for some sums; None for no end.
      fails_at: the number of tokens after which the mask raises, or None.
    """

    def __init__(self, end=None, fails_at=None):
        self.end, self.fails_at = end, fails_at

    def allowed_after(self, output):
        """The tokens that may follow an output."""
        if len(output) == self.fails_at or (self.end is not None and len(output) >= self.end + (sum(output) % 3 == 1)):
            return []
        return [t for t in range(VOCAB) if t not in (output[-1:] or [3]) and (t + sum(output)) % 4]

    def start(self):
        """The state of a new sample."""
        return _RulesState(self)


class _RulesState:
    def __init__(self, rules):
        self._rules, self._output = rules, []

    def fill(self, allowed):
        if len(self._output) == self._rules.fails_at:
            raise RuntimeError("the mask fails")
        for token in self._rules.allowed_after(self._output):
            allowed[0] |= np.uint32(1 << token)

    def advance(self, token_id):
        assert token_id in self._rules.allowed_after(self._output), "a token came that the mask forbids"
        self._output.append(token_id)


def expected_scores(tokens, salt=0):
    """The log-probabilities of tokens after their first one."""
    return [float(logprob(mix(chain_of(tokens[:count], salt), tokens[count]))) for count in range(1, len(tokens))]


def logprob(chain):
    """The log-probability that the simulation gives to the last token of a chain."""
    return -(np.asarray(chain, np.uint64) % np.uint64(1000)).astype(np.float32)
