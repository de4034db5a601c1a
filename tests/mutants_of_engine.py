"""The bugs that `tests.mutants` makes on purpose in the engine; most would give wrong tokens only now and then."""

from tests.mutants_made import Mutant

SIMULATED = "tests/test_engine_simulated.py"
WEIGHTS = "tests/test_engine_weights.py"
PARTS = "tests/test_engine_parts.py"
REPLICAS = "tests/test_replicas.py"
FAILURES = "tests/test_engine_failures.py"
FOLLOWERS = "tests/test_engine_followers.py"

MUTANTS_OF_ENGINE = [
    Mutant(
        "engine: a decode step reads what it writes",
        "engine/scheduler.py",
        " and plan.adopted.isdisjoint(plan.row_blocks)",
        "",
        SIMULATED,
    ),
    Mutant(
        "engine: calls go on after a failure",
        "engine/base.py",
        """        if call != "reset":
            self._check_alive()
""",
        "",
        FAILURES,
    ),
    Mutant(
        "engine: Ctrl-C is no failure",
        "engine/base.py",
        """        self._failure = f"{call} did not end"
        try:
            yield
        except BaseException as error:""",
        """        try:
            yield
        except Exception as error:""",
        FAILURES,
    ),
    Mutant("engine: a generate that raises leaves its requests", "engine/base.py", "self._drop(ids)", "pass", FAILURES),
    Mutant(
        "engine: what ends a failed stream hides its error",
        "engine/base.py",
        "if not self.has_failed and self.is_unfinished(request_id):",
        "if self.is_unfinished(request_id):",
        FAILURES,
    ),
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
        "engine: an update of the weights leaves the prefix cache",
        "engine/blocks.py",
        "self.prefix.evict(self.num_blocks)",
        "self.prefix.evict(0)",
        WEIGHTS,
    ),
    Mutant(
        "engine: an update of the weights leaves what is swapped out",
        "engine/scheduler.py",
        "for sequence in self.waiting:\n            self.blocks.free_on_host",
        "for sequence in []:\n            self.blocks.free_on_host",
        WEIGHTS,
    ),
    Mutant(
        "engine: after an update of the weights a seat's last token is another sequence's",
        "engine/engine.py",
        "self._restarted = self._restarted or []\n",
        "self._restarted = self._restarted or None\n",
        SIMULATED,
    ),
    Mutant("engine: followers ignore cancel", "engine/processes.py", "engine.cancel(arguments[0])", "pass", FOLLOWERS),
    Mutant(
        "engine: a follower's process dies of a failed step",
        "engine/processes.py",
        "    except Exception as error:\n        _LOGGER",
        "    except ValueError as error:\n        _LOGGER",
        FOLLOWERS,
    ),
    Mutant(
        "engine: a follower leaves an idle leader",
        "engine/processes.py",
        "leader.settimeout(None)",
        "leader.settimeout(timeout_seconds)",
        FOLLOWERS,
    ),
    Mutant(
        "engine: a leader goes on without one of its followers' programs",
        "engine/processes.py",
        """if report["num_started"] != self._runner.num_started:""",
        "if False:",
        FOLLOWERS,
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
        "engine: a drawn token is not counted",
        "engine/sampling.py",
        "adjustments.count(seats, drawn.token_ids), drawn",
        "adjustments, drawn",
        "tests/test_engine_adjust.py -k formulas",
    ),
    Mutant(
        "engine: children have no counts",
        "engine/scheduler.py",
        "        plan.seated += parent.children\n",
        "",
        SIMULATED,
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
        "tests/test_engine_adjust.py -k alone",
    ),
    Mutant(
        "engine: both caches have the same scales",
        "engine/arrays.py",
        "copies = jax.tree.map(jnp.array, scales)",
        "copies = scales",
        "tests/test_engine.py -k narrow",
    ),
    Mutant(
        "engine: top_p is sent as 1", "engine/pack.py", "[p.top_p for p in params]", "[1.0 for p in params]", SIMULATED
    ),
    Mutant(
        "engine: top_k is sent as 0", "engine/pack.py", "[p.top_k for p in params]", "[0 for p in params]", SIMULATED
    ),
    Mutant(
        "engine: a child shares its parent's list of names",
        "engine/scheduler.py",
        "child.hashes = list(parent.hashes)",
        "child.hashes = parent.hashes",
        SIMULATED,
    ),
    Mutant(
        "engine: the first 32 pairs of a swap are moved again",
        "engine/runner.py",
        "some = pairs[start : start + _PAIRS]",
        "some = pairs[:_PAIRS]",
        SIMULATED,
    ),
    Mutant(
        "engine: hits count as available at admission",
        "engine/scheduler.py",
        "self.blocks.num_available - self.blocks.count_unused(hits)",
        "self.blocks.num_available",
        SIMULATED,
    ),
    Mutant(
        "engine: a child's seat is lost",
        "engine/scheduler.py",
        "[_seat(child) for child in reversed(sequence.children)]",
        "[_seat(child) for child in sequence.children[1:]]",
        SIMULATED,
    ),
    Mutant(
        "engine: the heads of chains are evicted first",
        "engine/blocks.py",
        "block for block in reversed(blocks) if",
        "block for block in blocks if",
        PARTS,
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
        "replicas: what is over is kept",
        "engine/replicas.py",
        "del self._placed[request_id], replica.request_ids[delta.request_id]",
        "del self._placed[request_id]",
        REPLICAS,
    ),
    Mutant("replicas: stats waits", "engine/replicas.py", "if replica.is_idle:", "if True:", REPLICAS),
    Mutant(
        "replicas: tokens of the others are lost with a failure",
        "engine/replicas.py",
        "            if deltas:\n                return deltas",
        "            if False:\n                return deltas",
        REPLICAS,
    ),
    Mutant(
        "replicas: an engine that failed is not reset",
        "engine/replicas.py",
        "            fresh.engine.reset()\n",
        "            pass\n",
        REPLICAS,
    ),
    Mutant(
        "replicas: requests go to engines that are lost",
        "engine/replicas.py",
        "(replica for replica in self._replicas if not replica.is_lost)",
        "self._replicas",
        REPLICAS,
    ),
    Mutant(
        "engine: the device is not told which blocks a sequence begins with",
        "engine/scheduler.py",
        "        if num_computed:\n            plan.entries",
        "        if False:\n            plan.entries",
        SIMULATED,
    ),
    Mutant(
        "engine: the device is not told of a child's blocks",
        "engine/scheduler.py",
        "*self.blocks.part(_seat(parent), 0, parent.num_computed)",
        "*self.blocks.part(_seat(parent), 0, 0)",
        SIMULATED,
    ),
    Mutant(
        "engine: a sequence that was swapped is found no more",
        "engine/scheduler.py",
        "        sequence.num_cached = 0\n        self.add",
        "        self.add",
        SIMULATED,
    ),
    Mutant(
        "allocator: a donated state is copied",
        "allocator/state.py",
        "return array if donate and array.flags.writeable else array.copy()",
        "return array.copy()",
        "tests/test_allocator_edges.py",
    ),
    Mutant(
        "allocator: any state is changed in place",
        "allocator/state.py",
        "return array if donate and array.flags.writeable else array.copy()",
        "return array",
        "tests/test_allocator_edges.py",
    ),
    Mutant(
        "engine: a swap is estimated one way",
        "engine/scheduler.py",
        "2 * num_blocks * self.block_bytes",
        "num_blocks * self.block_bytes",
        PARTS,
    ),
    Mutant(
        "engine: blocks that the prefix cache holds too count as shared",
        "engine/blocks.py",
        "- (block in cached) > 1",
        "> 1",
        PARTS,
    ),
    Mutant(
        "engine: the last step's blocks are not found again",
        "engine/scheduler.py",
        "        self.blocks.cache_full_blocks([sequence])\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "engine: nothing is kept back for what runs", "engine/scheduler.py", ") + len(self.running)\n", ")\n", PARTS
    ),
    Mutant(
        "engine: nothing is kept back for what was just admitted",
        "engine/scheduler.py",
        "            reserve += self.blocks.blocks_for(sequence.num_to_compute) + 1 + len(sequence.children)\n",
        "",
        PARTS,
    ),
    Mutant(
        "engine: nothing is kept back for children",
        "engine/scheduler.py",
        " + 1 + len(sequence.children)\n",
        " + 1\n",
        PARTS,
    ),
    Mutant(
        "engine: a host that is exactly full is too small",
        "engine/blocks.py",
        "if len(blocks) > len(self.free_host_blocks)",
        "if len(blocks) >= len(self.free_host_blocks)",
        SIMULATED + " -k many_blocks",
    ),
    Mutant(
        "engine: outputs that are computed again count as prompts",
        "engine/engine.py",
        "min(chunk.start + chunk.num_tokens, chunk.sequence.num_prompt) - chunk.start",
        "chunk.num_tokens",
        SIMULATED + " -k count_as_such",
    ),
    Mutant(
        "engine: a block that samples share is wasted twice",
        "engine/blocks.py",
        "_, rows = np.unique(last, return_index=True)",
        "rows = np.arange(last.size)",
        PARTS,
    ),
    Mutant(
        "engine: the waste of small engines counts like that of large ones",
        "engine/stats.py",
        "sum(part.waste * part.held_blocks for part in parts)",
        "sum(part.waste for part in parts)",
        PARTS,
    ),
    Mutant(
        "replicas: a cancelled request counts as one sample",
        "engine/replicas.py",
        "replica.num_unfinished -= placed.num_unfinished",
        "replica.num_unfinished -= 1",
        REPLICAS,
    ),
]
