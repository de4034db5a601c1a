"""PyTorch's side of bench_model.py: the same models in plain PyTorch, in a process without JAX.

As in gpt-fast, a decode step is compiled, its caches `[num_seqs, num_kv_heads, longest, head_size]` are allocated once,
and a CUDA graph of the whole step runs once for each token. Only one layer is compiled, and all layers use it, because
compiling the whole step takes many times longer. The layer begins with the sum that the previous layer leaves. So the
compiler can make one kernel of this sum and the norm after it, as it would in the whole step. As in our step, matrices
that multiply the same input are one matrix. Attention in decode is two products grouped by kv head, which read each key
and value once. For prompts it is `scaled_dot_product_attention`.

The process reads one JSON object with the models' sizes and the cases to time, and writes one line for each case.
"""

import json
import os
import sys
import traceback
from typing import Any

from benchmarks.report import first_line
from benchmarks.torch_clocks import best_seconds, captured
from benchmarks.torch_hub_model import HubModel


def main() -> None:
    # Everything that the compilers print goes to stderr; stdout carries results only.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.loads(sys.stdin.read())
    cases = [("decode", n) for n in work["batches"]] + [("prefill", n) for n in work["prefill"]]
    for name, sizes in work["models"].items():
        model, reason = None, None
        try:
            model = HubModel(sizes) if "architectures" in sizes else Model(sizes)
        except Exception as error:  # PyTorch is not installed, or memory ran out
            reason = first_line(error)
        for phase, num_seqs in cases:
            answer: dict[str, Any] = {"absent": reason}
            if model is not None:
                try:
                    if phase == "decode":
                        seconds = model.time_decode(num_seqs, work["context"], work["steps"])
                    else:
                        seconds = model.time_prefill(num_seqs, work["context"])
                    answer = {"us": 1e6 * seconds}
                except Exception as error:
                    traceback.print_exc()
                    answer = {"absent": first_line(error)}
                model.forget()
            results.write(json.dumps({"model": name, "phase": phase, "num_seqs": num_seqs, **answer}) + "\n")
            results.flush()


class Model:
    """A decoder's random weights and its caches, on the GPU if there is one."""

    def __init__(self, sizes: dict[str, Any]):
        import torch

        self.sizes = sizes
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.caches: list[tuple[Any, Any]] = []
        torch.set_grad_enabled(False)
        heads = sizes["num_heads"] * sizes["head_size"]
        kv_heads = sizes["num_kv_heads"] * sizes["head_size"]
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        up = inner if sizes["family"] == "opt" else 2 * inner
        self.layers = [
            {
                "attention_norm": self._norm(),
                "qkv": self._linear(hidden, heads + 2 * kv_heads, sizes["qkv_bias"]),
                "o": self._linear(heads, hidden, sizes["o_bias"]),
                "mlp_norm": self._norm(),
                "up": self._linear(hidden, up, sizes["mlp_bias"]),
                "down": self._linear(inner, hidden, sizes["mlp_bias"]),
            }
            for _ in sizes["layers"]
        ]
        self.final_norm = self._norm()
        self.embedding = self._random(sizes["vocab_size"], hidden)
        self.head = self.embedding if sizes["tie_embeddings"] else self._random(sizes["vocab_size"], hidden)
        self.positions = (
            None if sizes["layers"][0]["rope"] else self._random(sizes["max_position_embeddings"] + 2, hidden)
        )

    def _random(self, *shape: int) -> Any:
        import torch

        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device).mul_(0.02)

    def _linear(self, inputs: int, outputs: int, has_bias: bool) -> tuple[Any, Any]:
        return self._random(outputs, inputs), self._random(outputs) if has_bias else None

    def _norm(self) -> tuple[Any, Any]:
        import torch

        ones = torch.ones(self.sizes["hidden_size"], dtype=torch.bfloat16, device=self.device)
        return ones, torch.zeros_like(ones) if self.sizes["family"] == "opt" else None

    def allocate(self, num_seqs: int, longest: int) -> None:
        """Makes caches of random numbers."""
        shape = num_seqs, self.sizes["num_kv_heads"], longest, self.sizes["head_size"]
        self.caches = [(self._random(*shape), self._random(*shape)) for _ in self.layers]

    def forget(self) -> None:
        """Frees the caches, and the code that is compiled for them."""
        import torch

        self.caches = []
        torch.compiler.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def norm(self, hidden: Any, parameters: tuple[Any, Any]) -> Any:
        import torch.nn.functional as F

        weight, bias = parameters
        shape, eps = (self.sizes["hidden_size"],), self.sizes["norm_eps"]
        return (
            F.rms_norm(hidden, shape, weight, eps) if bias is None else F.layer_norm(hidden, shape, weight, bias, eps)
        )

    def forward(self, layer: Any, token_ids: Any, positions: Any, is_decode: bool) -> Any:
        """The likeliest next token of each row.

        Args:
            layer: `self.layer`, or its compiled form.
            token_ids: [num_seqs, num_tokens].
            positions: [num_tokens], the same for every sequence.
            is_decode: whether num_tokens is 1 and the earlier tokens are in the caches.
        """
        import torch
        import torch.nn.functional as F

        sizes = self.sizes
        hidden = self.embedding[token_ids]
        rotation = None
        if self.positions is not None:
            hidden = hidden + self.positions[positions + 2]
        else:
            half = torch.arange(0, sizes["head_size"], 2, device=self.device, dtype=torch.float32)
            angles = positions[:, None].float() * sizes["layers"][0]["rope"]["theta"] ** (-half / sizes["head_size"])
            rotation = torch.cos(angles), torch.sin(angles)
        added = torch.zeros_like(hidden)
        for weights, cache in zip(self.layers, self.caches, strict=True):
            hidden, added = layer(hidden, added, weights, cache, rotation, positions, is_decode)
        return F.linear(self.norm((hidden + added)[:, -1], self.final_norm), self.head).argmax(dim=-1)

    def layer(
        self, hidden: Any, added: Any, weights: Any, cache: Any, rotation: Any, positions: Any, is_decode: bool
    ) -> tuple[Any, Any]:
        """Returns the residual stream after attention, and the MLP's output. `added` is the previous MLP's output."""
        import torch.nn.functional as F

        sizes = self.sizes
        num_seqs, num_tokens, _ = hidden.shape
        splits = [sizes["num_heads"], sizes["num_kv_heads"], sizes["num_kv_heads"]]
        hidden = hidden + added
        heads = F.linear(self.norm(hidden, weights["attention_norm"]), *weights["qkv"])
        heads = heads.view(num_seqs, num_tokens, -1, sizes["head_size"]).transpose(1, 2)
        query, key, value = heads.split(splits, dim=1)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        cache[0].index_copy_(2, positions, key)
        cache[1].index_copy_(2, positions, value)
        out = attend_cached(query, cache[0], cache[1], positions) if is_decode else attend_new(query, key, value)
        hidden = hidden + F.linear(out.transpose(1, 2).reshape(num_seqs, num_tokens, -1), *weights["o"])
        up = F.linear(self.norm(hidden, weights["mlp_norm"]), *weights["up"])
        if sizes["family"] == "opt":
            up = F.relu(up)
        else:
            gate, up = up.chunk(2, dim=-1)
            up = F.silu(gate) * up
        return hidden, F.linear(up, *weights["down"])

    def time_decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Measures the seconds of a decode step that is called once for each token."""
        import torch

        self.allocate(num_seqs, context + num_steps)
        token_ids = torch.zeros(num_seqs, 1, dtype=torch.int64, device=self.device)
        positions = torch.zeros(1, dtype=torch.int64, device=self.device)
        # As in gpt-fast, except that graphs are captured here: the compiler's own graphs take more time on the host.
        options = {"coordinate_descent_tuning": True} if self.device == "cuda" else {}
        layer = torch.compile(self.layer, fullgraph=True, dynamic=False, options=options)

        def step():
            token_ids.copy_(self.forward(layer, token_ids, positions, True)[:, None])
            positions.add_(1)

        positions.fill_(context - num_steps // 2)
        replay = captured(self.device, step)
        return best_seconds(self.device, lambda: positions.fill_(context - num_steps // 2), replay, num_steps)

    def time_prefill(self, num_seqs: int, context: int) -> float:
        """Measures the seconds in which prompts of `context` tokens are written."""
        import torch

        self.allocate(num_seqs, context)
        token_ids = (torch.arange(context, device=self.device) % 1000).expand(num_seqs, context).contiguous()
        positions = torch.arange(context, device=self.device)
        layer = torch.compile(self.layer, fullgraph=True, dynamic=False)
        self.forward(layer, token_ids, positions, False)
        return best_seconds(self.device, lambda: None, lambda: self.forward(layer, token_ids, positions, False), 1)


def rotate(heads: Any, rotation: tuple[Any, Any]) -> Any:
    import torch

    cos, sin = rotation
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def attend_cached(query: Any, key_cache: Any, value_cache: Any, positions: Any) -> Any:
    """Attention of each sequence's one token to all cached tokens up to it: [num_seqs, num_heads, 1, head_size]."""
    import torch

    num_seqs, num_kv_heads, longest, head_size = key_cache.shape
    grouped = query.reshape(num_seqs, num_kv_heads, -1, head_size)
    logits = (grouped @ key_cache.transpose(2, 3)).float() * head_size**-0.5
    seen = torch.arange(longest, device=query.device) <= positions
    weights = torch.softmax(logits.masked_fill(~seen, float("-inf")), dim=-1).to(query.dtype)
    return (weights @ value_cache).reshape(query.shape)


def attend_new(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of each prompt to itself."""
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


if __name__ == "__main__":
    main()
