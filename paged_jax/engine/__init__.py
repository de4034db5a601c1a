"""Continuous batching over any model that offers `step(weights, caches, batch) -> (logits, caches)`.

- engine.py     Engine: requests in, tokens out, step by step
- request.py    what a request wants, the sequences it becomes, what comes back
- config.py     sizes and policies
- scheduler.py  what each step computes: token budget, admission, preemption; plain Python
- blocks.py     who holds which block; prefix.py: which full block holds which tokens
- batch.py      what a model gets, and how it travels to the device
- runner.py     the compiled programs and the arrays they work on
- sampling.py   draws tokens on the device
- text.py       tokens to text, stop texts
- processes.py  one engine over several processes
"""

from paged_jax.engine.batch import Batch as Batch
from paged_jax.engine.batch import Step as Step
from paged_jax.engine.batch import StepShape as StepShape
from paged_jax.engine.config import EngineConfig as EngineConfig
from paged_jax.engine.engine import Engine as Engine
from paged_jax.engine.engine import Stats as Stats
from paged_jax.engine.processes import LeadingEngine as LeadingEngine
from paged_jax.engine.processes import follow as follow
from paged_jax.engine.request import Completion as Completion
from paged_jax.engine.request import Delta as Delta
from paged_jax.engine.request import SamplingParams as SamplingParams
from paged_jax.engine.request import Tokenizer as Tokenizer
from paged_jax.engine.request import TokenLogprob as TokenLogprob
