"""Continuous batching over any model that offers `step(weights, caches, batch) -> (logits, caches)`.

- engine.py     `Engine`: takes requests, runs steps, gives back tokens
- replicas.py   `Replicas`: several engines, each with a copy of the model, share the requests
- base.py       `BaseEngine`: the interface of both
- stats.py      their statistics
- request.py    a request's parameters, and the results; sequence.py: the sequences it becomes
- config.py     sizes and policies
- scheduler.py  decides what each step computes: token budget, admission, preemption; plain Python. plan.py: its plans
- groups.py     groups of layers, by their sliding windows; each has pools and block tables of its own
- blocks.py     keeps track of who holds which block; prefix.py: which full block holds which tokens
- pools.py      the blocks of all groups together
- sharing.py    finds prefixes that a decode step can read once for all sequences that share them;
                shared_prefixes.py: what a model is told of them
- batch.py      the batch that a model is given, and the array in which it travels to the device
- pack.py       fills that array from a plan
- runner.py     the compiled programs; arrays.py: the pools they work on; compiling.py: compiles them
- sampling.py   draws tokens on the device
- results.py    what becomes of the drawn tokens
- speculation.py guesses tokens that a step then verifies
- weights.py    checks weights that are to replace the engine's
- adjust.py     changes logits before: penalties, biases, minimum lengths; mask.py: which tokens may come
- text.py       turns tokens into text and finds stop texts
- processes.py  one engine over several processes

Words that these files share:

- sequence: one sample of a request, its prompt and its output. A request with n > 1 becomes n sequences.
- row: the new tokens of one sequence in the batch of one step.
- chunk: a row's tokens as the scheduler plans them. A long prompt is computed in several chunks.
- seat: a number that a sequence holds while it runs. It names the sequence's row of the allocator's block tables and
  its entry among the last tokens, which stay on the device.
- draft: guessed tokens of a sequence, which a step verifies together.
- host block: a block in pinned host memory, to which a preempted sequence's block is swapped out.
"""

from paged_jax.engine.base import BaseEngine, EngineFailed, RunningRequests
from paged_jax.engine.batch import Batch, Step, StepShape
from paged_jax.engine.compiling import CompilerOptions
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.engine import Engine
from paged_jax.engine.groups import pool_sizes
from paged_jax.engine.mask import MaskState, TokenMask
from paged_jax.engine.processes import LeadingEngine, follow
from paged_jax.engine.replicas import ReplicaFailed, Replicas
from paged_jax.engine.request import Completion, Delta, SamplingParams, Tokenizer, TokenLogprob
from paged_jax.engine.shared_prefixes import SharedPrefixes
from paged_jax.engine.speculation import DraftRow, PromptLookup, Proposer
from paged_jax.engine.stats import PoolStats, Stats
from paged_jax.engine.text import TextStream

__all__ = [
    "BaseEngine",
    "Batch",
    "CompilerOptions",
    "Completion",
    "Delta",
    "DraftRow",
    "Engine",
    "EngineConfig",
    "EngineFailed",
    "LeadingEngine",
    "MaskState",
    "PoolStats",
    "PromptLookup",
    "Proposer",
    "ReplicaFailed",
    "Replicas",
    "RunningRequests",
    "SamplingParams",
    "SharedPrefixes",
    "Stats",
    "Step",
    "StepShape",
    "TextStream",
    "TokenLogprob",
    "TokenMask",
    "Tokenizer",
    "follow",
    "pool_sizes",
]
