"""The bugs that `tests.mutants` makes on purpose in plans and blocks; most would give wrong tokens now and then."""

from tests.mutants_made import Mutant

SIMULATED = "tests/test_engine_simulated.py"
WEIGHTS = "tests/test_engine_weights.py"
PARTS = "tests/test_engine_parts.py"

MUTANTS_OF_SCHEDULER = [
    Mutant(
        "engine: a decode step reads what it writes",
        "engine/scheduler.py",
        " and plan.adopted.isdisjoint(plan.row_blocks)",
        "",
        SIMULATED,
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
        "engine: children have no counts",
        "engine/scheduler.py",
        "        plan.seated += parent.children\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "engine: a child shares its parent's list of names",
        "engine/scheduler.py",
        "child.hashes = list(parent.hashes)",
        "child.hashes = parent.hashes",
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
        "engine: a block that samples share is wasted twice",
        "engine/blocks.py",
        "_, rows = np.unique(last, return_index=True)",
        "rows = np.arange(last.size)",
        PARTS,
    ),
    Mutant(
        "logprobs: a prompt that is scored begins with cached blocks",
        "engine/scheduler.py",
        " and not sequence.is_scored else []",
        " else []",
        "tests/test_engine_simulated.py",
    ),
    Mutant(
        "logprobs: scored tokens take the logits of new sequences",
        "engine/scheduler.py",
        "if 1 + len(sequence.children) > self._num_spare(tokens):",
        "if 1 + len(sequence.children) > len(self.free_seats):",
        "tests/test_engine_simulated.py",
    ),
    Mutant(
        "engine: names of blocks have 16 bits of each token",
        "engine/prefix.py",
        "np.int32).tobytes()",
        "np.int32).astype(np.uint16).tobytes()",
        PARTS,
    ),
]
