"""The bugs that `tests.mutants` makes on purpose in single decisions of the engine and of the examples."""

from tests.mutants_made import Mutant

MUTANTS_OF_DECISIONS = [
    Mutant(
        "speculation: penalties make the host wait",
        "engine/scheduler.py",
        "is_decoding = all(s.has_drawn and not s.params.is_adjusted for s in self.running)",
        "is_decoding = all(s.has_drawn for s in self.running)",
        "tests/test_engine_units.py -k promise",
    ),
    Mutant(
        "scheduler: a bound makes steps larger",
        "engine/scheduler.py",
        "return min(budget, max(most - num_decodes, 1) - num_prompt_tokens)",
        "return max(most - num_decodes, 1) - num_prompt_tokens",
        "tests/test_engine_units.py -k bound_beside",
    ),
    Mutant(
        "scheduler: a preempted sample tells of cached tokens",
        "engine/scheduler.py",
        """    child.num_found = 0
""",
        """    pass
""",
        "tests/test_engine_units.py -k first_sample",
    ),
    Mutant(
        "scheduler: only prompts are looked up",
        "engine/scheduler.py",
        "self.counters.looked_up_tokens += sequence.num_tokens",
        "self.counters.looked_up_tokens += sequence.num_prompt",
        "tests/test_engine_units.py -k looked_up",
    ),
    Mutant(
        "pools: the next token of full blocks needs none",
        "engine/pools.py",
        "manager.needed(num_computed, num_tokens + 1)",
        "manager.needed(num_computed, num_tokens)",
        "tests/test_engine_parts.py -k kept_back",
    ),
    Mutant(
        "blocks: what is free is evicted, too",
        "engine/blocks.py",
        "missing = error.requested - error.free",
        "missing = error.requested",
        "tests/test_engine_units.py -k evicted",
    ),
    Mutant(
        "runner: only some rows have drafts",
        "engine/runner.py",
        "min(num_rows, num_tokens // 2), len(self.groups)",
        "min(num_rows, num_tokens // 3), len(self.groups)",
        "tests/test_engine_units.py -k verified",
    ),
    Mutant(
        "speculation: a pause never ends",
        "engine/speculation.py",
        """            self._num_paused -= 1
""",
        "",
        "tests/test_engine_units.py -k pause",
    ),
    Mutant(
        "speculation: drafts that do not pay are tried at once",
        "engine/speculation.py",
        """        if hopeful and not best:
            self.pause()
""",
        "",
        "tests/test_engine_units.py -k pause",
    ),
    Mutant(
        "speculation: a draft gains more than it has",
        "engine/speculation.py",
        "gain += min(guess.expected, len(drafts[sequence]))",
        "gain += guess.expected",
        "tests/test_engine_units.py -k gains",
    ),
    Mutant(
        "groups: a step begins no block",
        "engine/groups.py",
        "for_each = _most_touched(window - 1, block_size) + 1",
        "for_each = _most_touched(window - 1, block_size)",
        "tests/test_engine_units.py -k window",
    ),
    Mutant(
        "groups: the last tokens of a step have no block",
        "engine/groups.py",
        "for_each + -(-config.max_tokens_per_step // block_size))",
        "for_each + config.max_tokens_per_step // block_size)",
        "tests/test_engine_units.py -k window",
    ),
    Mutant(
        "groups: the host keeps blocks that nobody has",
        "engine/groups.py",
        "return config.num_host_blocks if most is None else min(config.num_host_blocks, config.max_num_seqs * most)",
        "return config.num_host_blocks",
        "tests/test_engine_units.py -k window",
    ),
    Mutant(
        "groups: a window of the longest text is one",
        "engine/groups.py",
        """if window is None or window >= config.max_model_len:
            return num_blocks""",
        """if window is None:
            return num_blocks""",
        "tests/test_engine_units.py -k window",
    ),
    Mutant(
        "mask: what it allowed before it raised is allowed",
        "engine/mask.py",
        """            if self.error is not None:
                self._allowed[:] = 0
            elif""",
        "            if",
        "tests/test_engine_units.py -k half_way",
    ),
    Mutant(
        "speculation: hopes stay where nothing is guessed",
        "engine/speculation.py",
        """            if not guess.tokens:
                guess.close()
""",
        "",
        "tests/test_engine_units.py -k leaves_a_place",
    ),
    Mutant(
        "speculation: a draft takes the last token's place",
        "engine/speculation.py",
        "sequence.max_total - len(sequence.tokens) - 1)",
        "sequence.max_total - len(sequence.tokens))",
        "tests/test_engine_units.py -k leaves_a_place",
    ),
    Mutant(
        "blocks: any number of blocks is shared out evenly",
        "engine/blocks.py",
        "num_shards = num_shards if num_blocks % num_shards == 0 else 1",
        "num_shards = num_shards",
        "tests/test_engine_units.py -k evenly",
    ),
    Mutant(
        "results: a stop text in the last piece is no reason",
        "engine/results.py",
        """            text += sequence.text.flush()
            stop_reason = sequence.text.stopped_by if stop_reason is None else stop_reason
        sequence.finish""",
        """            text += sequence.text.flush()
        sequence.finish""",
        "tests/test_engine_units.py -k half_a_character",
    ),
    Mutant(
        "adjust: a minimum of one token is none",
        "engine/adjust.py",
        """if params.min_tokens:
                end""",
        """if params.min_tokens > 1:
                end""",
        "tests/test_engine_units.py -k minimum_of_one",
    ),
    Mutant(
        "blocks: a window's pool never bounds requests",
        "engine/blocks.py",
        "if self.most_held is not None and self.num_blocks >= self.most_held:",
        "if self.most_held is not None:",
        "tests/test_engine_units.py -k pool_of_a_window",
    ),
    Mutant(
        "pools: a swapped sequence is computed again",
        "engine/pools.py",
        "begun = restored or hits.num_blocks * self.block_size",
        "begun = hits.num_blocks * self.block_size",
        "tests/test_engine_units.py -k swapped",
    ),
    Mutant(
        "weights: an update with which requests go on forgets a restart",
        "engine/engine.py",
        "self._restarted = self._restarted or []",
        "self._restarted = []",
        "tests/test_engine_weights.py -k outlasts",
    ),
    Mutant(
        "sharding: every device has all latents",
        "examples/sharding.py",
        "{4: POOL, 3: LATENT_POOL, 1: KV_SCALE}",
        "{4: POOL, 1: KV_SCALE}",
        "tests/test_sharding.py -k of_a_cache",
    ),
    Mutant(
        "config: key heads that are null are the family's default",
        "examples/common_fields.py",
        'kv_heads_default = num_heads if "num_key_value_heads" in fields else num_kv_heads or num_heads',
        "kv_heads_default = num_kv_heads or num_heads",
        "tests/test_model_configs.py -k other_config_fields",
    ),
]
