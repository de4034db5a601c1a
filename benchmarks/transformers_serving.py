"""transformers' side of bench_serving.py: its continuous batching on the same requests, in a process without JAX.

The model is its own Llama with random weights, made on the device in bfloat16; attention is PyTorch's over its paged
cache, which is what it has without further packages; all else is as it chooses by itself. A few requests run first, so
that nothing is loaded or captured while the clock runs.

Reads one JSON object with the model's sizes and the requests, writes one line.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # Whatever the libraries print goes to stderr; stdout carries the result only.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.loads(sys.stdin.read())
    try:
        answer = run(make_model(work["sizes"]), work["requests"])
    except Exception as error:  # no PyTorch, no transformers, or no room
        answer = {"absent": f"{type(error).__name__}: {error}".splitlines()[0]}
    results.write(json.dumps(answer) + "\n")
    results.flush()
    os._exit(0)  # its threads may not end by themselves


def make_model(sizes: dict[str, Any]) -> Any:
    """A Llama of these sizes with random weights, on the GPU where there is one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_size"],
        max_position_embeddings=sizes["max_position_embeddings"],
        rms_norm_eps=sizes["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope"]["theta"]},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config).eval()


def run(model: Any, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Serves all requests, prompts and how many tokens to generate of each, at once."""
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    prompts, counts = zip(*requests, strict=True)
    hints = WorkloadHints(max(map(len, prompts)), max(counts), len(requests))
    # No token ends a text, so that every request gets as many as it asks for.
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(counts))
    with model.continuous_batching_context_manager(generation_config=greedy, workload_hints=hints) as manager:
        _serve(manager, [(prompt, 4) for prompt, _ in requests[:8]])
        began = time.perf_counter()
        outputs = _serve(manager, requests)
        seconds = time.perf_counter() - began
    generated = [len(output.generated_tokens) for output in outputs]
    if generated != list(counts):
        raise ValueError(f"{sum(generated)} tokens came of {sum(counts)}")
    stamps = [[stamp - began for stamp in output.timestamps] for output in outputs]
    return {"us": 1e6 * seconds, "stamps": stamps}


def _serve(manager: Any, requests: list[tuple[list[int], int]]) -> list[Any]:
    ids = [manager.add_request(prompt, max_new_tokens=count, record_timestamps=True) for prompt, count in requests]
    found: dict[str, Any] = {}
    while len(found) < len(ids):
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            if output.error is not None:
                raise RuntimeError(output.error)
            found[output.request_id] = output
        elif output is None and not manager.is_running():
            raise RuntimeError("its thread ended early")
    return [found[request_id] for request_id in ids]


if __name__ == "__main__":
    main()
