"""The bugs that `tests.mutants` makes on purpose in the engine's steps, programs, draws and settings."""

from tests.mutants_made import Mutant

SIMULATED = "tests/test_engine_simulated.py"
PARTS = "tests/test_engine_parts.py tests/test_engine_batch.py tests/test_engine_refusals.py"
FAILURES = "tests/test_engine_failures.py"
REQUESTS = "tests/test_engine_requests.py"
ENGINE = "tests/test_engine.py"

MUTANTS_OF_ENGINE = [
    Mutant(
        "engine: a reset that raises counts as one",
        "engine/engine.py",
        """        with self._changing("reset"):
            self._reset(config)""",
        """        self._failure = None
        self._reset(config)""",
        FAILURES,
    ),
    Mutant(
        "engine: after an update of the weights a seat's last token is another sequence's",
        "engine/engine.py",
        "self._restarted = self._restarted or []\n",
        "self._restarted = self._restarted or None\n",
        SIMULATED,
    ),
    Mutant(
        "engine: followers are told of refused requests",
        "engine/engine.py",
        """        max_total = self.check(prompt, params)
        with self._changing("add_request"):""",
        """        with self._changing("add_request"):
            max_total = self.check(prompt, params)""",
        FAILURES,
    ),
    Mutant(
        "engine: priorities are ignored",
        "engine/sequence.py",
        "return self.params.priority, self.request_id, self.index",
        "return 0, self.request_id, self.index",
        "tests/test_engine_fairness.py -k urgent",
    ),
    Mutant(
        "engine: prompts hold up decodes",
        "engine/scheduler.py",
        "min(budget, max(most - num_decodes, 1) - num_prompt_tokens)",
        "budget",
        "tests/test_engine_fairness.py -k bounded",
    ),
    Mutant(
        "engine: a drawn token is not counted",
        "engine/sampling.py",
        "adjustments.count(seats, drawn.token_ids), drawn",
        "adjustments, drawn",
        "tests/test_engine_adjust.py -k tokens_are_those_of_the_formulas",
    ),
    Mutant(
        "engine: masks are gathered before the tokens are read",
        "engine/engine.py",
        "if launched is not None and not launched.plan.is_masked:\n            self._runner.draw(launched)",
        "if launched is not None:\n            self._runner.draw(launched)",
        SIMULATED,
    ),
    Mutant(
        "engine: an adjusted row changes the others",
        "engine/sampling.py",
        "adjust(plain, rows, unpacked.position, masks), plain)",
        "adjust(plain, rows, unpacked.position, masks), -plain)",
        "tests/test_engine_adjust.py -k tokens_are_those_of_the_formulas",
    ),
    Mutant(
        "engine: both caches have the same scales",
        "engine/arrays.py",
        "copies = jax.tree.map(jnp.array, scales)",
        "copies = scales",
        "tests/test_engine.py -k narrow",
    ),
    Mutant(
        "engine: top_p is sent as 1",
        "engine/seats.py",
        "[sequence.params.temperature, sequence.params.top_p]",
        "[sequence.params.temperature, 1.0]",
        SIMULATED,
    ),
    Mutant(
        "engine: top_k is sent as 0", "engine/seats.py", "floats[0], sequence.params.top_k,", "floats[0], 0,", SIMULATED
    ),
    Mutant(
        "engine: a sample goes on after its stop token",
        "engine/sequence.py",
        "self.mask is not None or self.params.stop_token_ids",
        "self.mask is not None",
        SIMULATED,
    ),
    Mutant(
        "engine: a sample without stop tokens does not tell that it began again",
        "engine/sequence.py",
        "(is_watched or self.is_restarted or",
        "(is_watched or",
        SIMULATED,
    ),
    Mutant(
        "engine: the first 32 pairs of a swap and 512 changes of tables are made again",
        "engine/arrays.py",
        "some := items[start : start + shape[0]]",
        "some := items[: shape[0]]",
        SIMULATED,
    ),
    Mutant(
        "engine: unseeded requests repeat after a reset",
        "engine/engine.py",
        "        self._seeds.restart()\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "engine: the seed of an unseeded request is its number",
        "engine/request.py",
        "return dataclasses.replace(params, seed=int.from_bytes(seed))",
        "return dataclasses.replace(params, seed=request_id)",
        SIMULATED,
    ),
    Mutant(
        "engine: outputs that are computed again count as prompts",
        "engine/scheduler.py",
        "np.maximum(np.minimum(ends, seats.num_prompt[order]) - starts, 0).sum()",
        "rows.counts.sum()",
        SIMULATED + " -k count_as_such",
    ),
    Mutant(
        "engine: the waste of small engines counts like that of large ones",
        "engine/stats.py",
        "sum(part.waste * part.held_blocks for part in parts)",
        "sum(part.waste for part in parts)",
        PARTS,
    ),
    Mutant(
        "logprobs: rows of decode steps have no room for scores",
        "engine/runner.py",
        "max(len(plan.rows), len(plan.samples) + len(plan.scores))",
        "max(len(plan.rows), len(plan.samples))",
        "tests/test_engine_simulated.py",
    ),
    Mutant(
        "engine: a reset takes another max_logprobs",
        "engine/config.py",
        "            self.max_logprobs,\n",
        "",
        ENGINE + " -k what_a_reset_cannot",
    ),
    Mutant(
        "engine: logprobs=0 asks for nothing",
        "engine/results.py",
        "logprobs = () if params.logprobs is None else",
        "logprobs = () if not params.logprobs else",
        REQUESTS + " -k are_the_models",
    ),
    Mutant(
        "engine: what is held back is lost at a stop token",
        "engine/results.py",
        """        if sequence.text is not None:
            text += sequence.text.flush()""",
        """        if sequence.text is not None and is_full:
            text += sequence.text.flush()""",
        REQUESTS + " -k stop_tokens",
    ),
    Mutant(
        "engine: a preempted prompt is scored again",
        "engine/seats.py",
        "return self.wants_scores & (self.num_tokens == self.num_prompt)",
        "return self.wants_scores",
        SIMULATED,
    ),
    Mutant(
        "engine: max_logprobs=0 compiles no log-probabilities",
        "engine/sampling.py",
        "if max_logprobs is not None or not kind.has_logprobs",
        "if max_logprobs or not kind.has_logprobs",
        ENGINE + " -k drawn_tokens_alone",
    ),
    Mutant(
        "engine: blocks are copied before others are swapped out",
        "engine/runner.py",
        """        self._move("swap_out", plan.swap_out)
        self._move("swap_in", plan.swap_in)
        self._move("copy", plan.copies)
""",
        """        self._move("copy", plan.copies)
        self._move("swap_out", plan.swap_out)
        self._move("swap_in", plan.swap_in)
""",
        SIMULATED,
    ),
    Mutant(
        "engine: a sample's draws are the next sample's a token later",
        "engine/sampling.py",
        "jax.random.fold_in(jax.random.fold_in(key, index), position)",
        "jax.random.fold_in(key, index + position)",
        PARTS,
    ),
    Mutant(
        "engine: a model is told its longest text in blocks",
        "engine/batch.py",
        "longest = self.block_tables.shape[1] * block_size",
        "longest = self.block_tables.shape[1]",
        PARTS,
    ),
    Mutant(
        "engine: a reset takes another num_host_blocks",
        "engine/config.py",
        "            self.num_host_blocks,\n",
        "",
        ENGINE + " -k what_a_reset_cannot",
    ),
    Mutant(
        "engine: sizes of steps may stay the same",
        "engine/config.py",
        "any(a >= b for a, b",
        "any(a > b for a, b",
        "tests/test_engine_refusals.py",
    ),
    Mutant(
        "engine: the longest text is too long to be measured",
        "engine/engine.py",
        "if not 1 <= context_len <= self.config.max_model_len:",
        "if not 1 <= context_len < self.config.max_model_len:",
        ENGINE + " -k measured",
    ),
    Mutant(
        "engine: each delta tells the prompt's log-probabilities",
        "engine/results.py",
        "        sequence.scored = {}\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "engine: the rate is one of steps",
        "engine/engine.py",
        "self._num_output_tokens / self._seconds if",
        "self._num_steps / self._seconds if",
        SIMULATED,
    ),
    Mutant(
        "engine: a measured step has any number of prompts",
        "engine/pack.py",
        "np.minimum(rows, shape.num_prompts) * row_len",
        "rows * row_len",
        PARTS,
    ),
    Mutant(
        "engine: a swap moves the blocks of one layer",
        "engine/groups.py",
        "sum(caches[layer].nbytes for layer in layers)",
        "first.nbytes",
        ENGINE + " -k bytes_of_all",
    ),
    Mutant(
        "engine: a vocabulary is split unevenly",
        "engine/arrays.py",
        "    if axis is None or vocab_size % num_parts(at, axis):",
        "    if axis is None:",
        "tests/test_engine.py -k vocabulary",
    ),
    Mutant(
        "engine: a reset keeps adjustments that were donated",
        "engine/runner.py",
        "        self._adjustments = jax.tree.map(usable, self._adjustments)\n",
        "",
        "tests/test_engine_adjust.py -k took",
    ),
    Mutant(
        "engine: tokens before the last restart count",
        "engine/request.py",
        "deltas = deltas[max((i for i, delta in enumerate(deltas) if delta.is_restarted), default=0) :]",
        "deltas = deltas[min((i for i, delta in enumerate(deltas) if delta.is_restarted), default=0) :]",
        "tests/test_engine_weights.py -k twice",
    ),
    Mutant(
        "engine: a request without tokens begins again",
        "engine/engine.py",
        "[s for s in sequences if s.has_drawn and s.finish_reason is None]",
        "[s for s in sequences if s.finish_reason is None]",
        "tests/test_engine_weights.py -k twice",
    ),
    Mutant(
        "engine: a mask that raised allows what it had set",
        "engine/mask.py",
        """            if self.error is not None:
                self._allowed[:] = 0
            elif""",
        "            if",
        "tests/test_engine_adjust.py -k masks_end",
    ),
    Mutant(
        "engine: min_p of 1 forbids the likeliest token",
        "engine/sampling.py",
        "scaled = jnp.where(scaled >= jnp.log(min_p)",
        "scaled = jnp.where(scaled > jnp.log(min_p)",
        "tests/test_engine_adjust_logits.py -k min_p",
    ),
    Mutant(
        "engine: a row beside full prefixes skips the last one",
        "engine/batch.py",
        "skipped = jnp.where(row < starts[-1],",
        "skipped = jnp.where(row <= starts[-1],",
        "tests/test_engine_sharing.py -k one_by_one",
    ),
    Mutant(
        "engine: a window that holds the longest sequence has a small pool",
        "engine/groups.py",
        "if window is None or window >= config.max_model_len:",
        "if window is None or window > config.max_model_len:",
        "tests/test_engine_windows.py -k as_large_as",
    ),
    Mutant(
        "engine: min_p of a seat holds for rows without adjustments",
        "engine/sampling.py",
        "min_p = jnp.where(is_adjusted, rows.min_p, 0.0)",
        "min_p = rows.min_p",
        "tests/test_engine_adjust_logits.py -k not_adjusted",
    ),
    Mutant(
        "engine: a partly used last block has no column",
        "engine/runner.py",
        "-(-self.config.max_model_len // self.block_size)",
        "self.config.max_model_len // self.block_size",
        SIMULATED + " -k histories",
    ),
    Mutant(
        "engine: drafts of a dropped text are kept",
        "engine/engine.py",
        "            if self._speculator is not None:\n                self._speculator.forget([sequence])\n",
        "",
        SIMULATED + " -k histories",
    ),
    Mutant(
        "engine: the same place under another name is refused",
        "engine/weights.py",
        "if not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):",
        "if leaf.sharding != like.sharding:",
        "tests/test_engine_weights.py -k another_name",
    ),
    Mutant(
        "engine: a reset keeps the speculator's config",
        "engine/engine.py",
        "Speculator(config, self._proposer) if config.max_draft_tokens else None",
        "self._speculator or (Speculator(config, self._proposer) if config.max_draft_tokens else None)",
        "tests/test_engine_speculation.py -k switches",
    ),
    Mutant(
        "engine: a measured step that verifies is not full",
        "engine/pack.py",
        "max(shape.num_prompts, 1)",
        "shape.num_rows",
        "tests/test_engine_batch.py -k verifies",
    ),
]
