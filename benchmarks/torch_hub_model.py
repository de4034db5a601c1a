"""PyTorch's side of bench_model.py for models that torch_model.py lacks, with transformers' code.

A decode step is transformers' forward over a `StaticCache`, captured in a CUDA graph that runs once for each token. It
is not compiled: all kernels are PyTorch's. A mixture of experts is tried with each of transformers' grouped products
that a graph can capture, and the fastest counts. As in models.py, embeddings are large and rows have different tokens,
so that rows choose different experts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.torch_clocks import best_seconds, captured

# "grouped_mm" is one grouped product over all pairs of a token and an expert, sorted by expert. "batched_mm" is a
# product for each pair. It gathers an expert's matrices for each pair, so prompts do not fit.
_PRODUCTS = "grouped_mm", "batched_mm"
_OF_PROMPTS = _PRODUCTS[0]
_CHUNK = 4096  # tokens of one step of prompts


class HubModel:
    """A transformers model with random weights, on the GPU if there is one.

    Args:
        fields: the fields of its config.json.
    """

    def __init__(self, fields: dict[str, Any]):
        import torch
        import transformers

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_grad_enabled(False)
        cls = getattr(transformers, fields["architectures"][0])
        self.config = cls.config_class.from_dict(fields)
        self.is_mixture = "experts" in " ".join(fields)
        with torch.device(self.device):
            try:
                self.model = self._make(cls, "sdpa")
            except ValueError:  # gpt-oss: its sinks are not in PyTorch's attention
                self.model = self._make(cls, "eager")

    def _make(self, cls: Any, attention: str) -> Any:
        import torch

        model = cls._from_config(self.config, dtype=torch.bfloat16, attn_implementation=attention).eval()
        model.get_input_embeddings().weight.normal_(std=4.0)
        return model

    def forget(self) -> None:
        """Frees the last case's memory on the GPU."""
        import gc

        import torch

        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def time_decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Measures the seconds of a decode step that is called once for each token."""
        if not self.is_mixture:
            return self._time_decode(num_seqs, context, num_steps, None)
        times, errors = [], []
        for product in _PRODUCTS:
            try:
                times.append(self._time_decode(num_seqs, context, num_steps, product))
            except Exception as error:  # mostly because memory ran out
                errors.append(error)
            self.forget()
        if not times:
            raise errors[0]
        return min(times)

    def time_prefill(self, num_seqs: int, context: int) -> float:
        """Measures the seconds in which prompts of `context` tokens are written."""
        return best_seconds(self.device, lambda: None, lambda: self._filled(num_seqs, context, context), 1)

    def _rows(self, num_seqs: int) -> Any:
        """The rows' numbers, i64 [num_seqs, 1]."""
        import torch

        return torch.arange(num_seqs, device=self.device)[:, None]

    def _forward(self, token_ids: Any, cache: Any) -> Any:
        """The likeliest next token of each row."""
        out = self.model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1)

    def _filled(self, num_seqs: int, length: int, longest: int) -> Any:
        """A cache of `longest` tokens a row, the first `length` of them written chunk by chunk."""
        import torch
        import transformers

        if self.is_mixture:
            self.model.set_experts_implementation(_OF_PROMPTS)
        cache = transformers.StaticCache(config=self.config, max_cache_len=longest)
        cache.layers = [_ring_of(layer) for layer in cache.layers]
        width = max(1, _CHUNK // num_seqs)
        for start in range(0, length, width):
            tokens = torch.arange(start, min(start + width, length), device=self.device)
            self._forward((tokens + 7 * self._rows(num_seqs)) % 1000, cache)
        return cache

    def _time_decode(self, num_seqs: int, context: int, num_steps: int, product: str | None) -> float:
        # Each run of the graph continues where the last one ended. transformers moves the cache's tokens differently
        # once a window is full, and a graph records one way only. So all steps come after the window is full.
        length = max(context, getattr(self.config, "sliding_window", None) or 0)
        cache = self._filled(num_seqs, length, length + 8 * num_steps)
        if product is not None:
            self.model.set_experts_implementation(product)
        rows = self._rows(num_seqs)  # added to the likeliest tokens, as in model_steps.py
        token_ids = rows.clone()

        def step():
            token_ids.copy_((self._forward(token_ids, cache)[:, None] + rows) % self.config.vocab_size)

        with _constants_made_once():
            replay = captured(self.device, step)
        return best_seconds(self.device, lambda: None, replay, num_steps)


@contextlib.contextmanager
def _constants_made_once() -> Iterator[None]:
    """Lets `torch.tensor` make each constant once: no graph can be captured while numbers come from the host."""
    import torch

    make, made = torch.tensor, {}

    def tensor(data: Any, **options: Any) -> Any:
        key = repr((data, sorted(options.items())))
        return made[key] if key in made else made.setdefault(key, make(data, **options))

    with mock.patch.object(torch, "tensor", tensor):
        yield


def _ring_of(layer: Any) -> Any:
    """A layer of a cache as it is; if it has a window, one that replaces the oldest token of a full window.

    transformers moves all tokens of a full window by one place in each step, and makes a tensor from a number of the
    host, which a CUDA graph cannot capture. Attention does not depend on the places of keys, which are rotated already.
    """
    import torch
    from transformers.cache_utils import StaticSlidingWindowLayer

    class Ring(StaticSlidingWindowLayer):
        oldest: Any = None

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            is_full = self.cumulative_length_int >= self.max_cache_len
            if not is_full or key_states.shape[-2] > 1:
                return super().update(key_states, value_states, *args, **kwargs)
            if self.oldest is None:
                self.oldest = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.cumulative_length_int += 1
            self.keys.index_copy_(2, self.oldest, key_states)
            self.values.index_copy_(2, self.oldest, value_states)
            self.oldest.add_(1).remainder_(self.max_cache_len)
            return self.keys, self.values

    return Ring(layer.max_cache_len, layer.max_cache_len) if type(layer) is StaticSlidingWindowLayer else layer
