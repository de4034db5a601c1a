"""The bugs that `tests.mutants` makes on purpose in the allocator, caches, metadata and models."""

from tests.mutants_made import Mutant

MUTANTS_OF_CACHES = [
    Mutant(
        "allocator: what never fits needs a whole pool",
        "allocator/grow.py",
        "growth.need.sum(dtype=xp.int32), state.ref_counts.shape[0] + 1)",
        "growth.need.sum(dtype=xp.int32), state.ref_counts.shape[0])",
        "tests/test_allocator_edges.py -k never_fits",
    ),
    Mutant(
        "allocator: arrays of a device are written to",
        "allocator/state.py",
        "array if donate and array.flags.writeable else array.copy()",
        "array if donate else array.copy()",
        "tests/test_allocator_edges.py -k of_a_device",
    ),
    Mutant(
        "allocator: nobody ends right behind what is released",
        "allocator/release.py",
        "is_held = (lens % state.block_size == 0) | (last >= 0)",
        "is_held = (lens == 0) | (last >= 0)",
        "tests/test_allocator_edges.py -k right_behind",
    ),
    Mutant(
        "allocator: the table is always to blame",
        "allocator/grow.py",
        """    detail = "" if fits.all() else detail
""",
        "",
        "tests/test_allocator_edges.py -k error_names",
    ),
    Mutant(
        "allocator: traced integers wrap around",
        "allocator/arguments.py",
        "limits = np.asarray((max(_INT32.min, np.iinfo(array.dtype).min), _INT32.max), array.dtype)",
        "limits = np.asarray((np.iinfo(array.dtype).min, _INT32.max), array.dtype)",
        "tests/test_allocator_edges.py -k 64_bits",
    ),
    Mutant(
        "metadata: the second of two writes is any of them",
        "metadata.py",
        'order = np.argsort(slot_mapping, kind="stable")',
        "order = np.argsort(slot_mapping)",
        "tests/test_metadata.py -k two_writes",
    ),
    Mutant(
        "metadata: unsigned starts fall",
        "metadata.py",
        "query_lens = np.diff(query_start_loc.astype(np.int64))",
        "query_lens = np.diff(query_start_loc)",
        "tests/test_metadata.py -k unsigned",
    ),
    Mutant(
        "metadata: the last query is behind the end",
        "metadata.py",
        """query_lens = np.int32(1)
""",
        """query_lens = np.int32(0)
""",
        "tests/test_metadata.py -k behind_a_window",
    ),
    Mutant(
        "metadata: starts of any shape have a window",
        "metadata.py",
        "if query_start_loc is not None and query_start_loc.shape == (len(seq_lens) + 1,):",
        "if query_start_loc is not None:",
        "tests/test_metadata.py -k behind_a_window",
    ),
    Mutant(
        "cache: the last slot of int32 is one too many",
        "shapes.py",
        "if num_blocks * block_size > 2**31:",
        "if num_blocks * block_size >= 2**31:",
        "tests/test_cache.py -k get_kv",
    ),
    Mutant(
        "cache: the largest latents are too large",
        "shapes.py",
        "not 16 <= latent_size <= 1024",
        "not 16 <= latent_size < 1024",
        "tests/test_mla.py -k create",
    ),
    Mutant(
        "cache: copies choose an implementation themselves",
        "cache.py",
        """block_mapping, implementation=implementation)
        return self._with(*zip""",
        """block_mapping)
        return self._with(*zip""",
        "tests/test_cache_methods.py -k hands_its",
    ),
    Mutant(
        "cache: writes of latents choose an implementation themselves",
        "latent_cache.py",
        "slot_mapping, scale=self.latent_scale, implementation=implementation",
        "slot_mapping, scale=self.latent_scale",
        "tests/test_cache_methods.py -k hands_its",
    ),
    Mutant(
        "models: a norm widens the residual stream",
        "examples/decoder.py",
        "out = out_norm(out).astype(self.dtype)",
        "out = out_norm(out)",
        "tests/test_models.py -k 'of_bfloat16 and gemma2'",
    ),
    Mutant(
        "models: a norm after the sum widens the residual stream",
        "examples/decoder.py",
        "return norm(total).astype(self.dtype) if",
        "return norm(total) if",
        "tests/test_models.py -k 'of_bfloat16 and opt'",
    ),
    Mutant(
        "models: logits are rounded",
        "examples/decoder.py",
        'logits = jnp.einsum("nh,vh->nv", hidden, embedding, preferred_element_type=jnp.float32)',
        'logits = jnp.einsum("nh,vh->nv", hidden, embedding)',
        "tests/test_models.py -k 'of_bfloat16 and gemma2'",
    ),
    Mutant(
        "models: latents are wider than the cache",
        "examples/mla.py",
        "shared], axis=1).astype(self.dtype)",
        "shared], axis=1)",
        "tests/test_models.py -k 'of_bfloat16 and deepseek'",
    ),
    Mutant(
        "experts: normalised scores have no factor",
        "examples/moe.py",
        "return experts, jax.nn.softmax(values, axis=-1) * config.scale",
        "return experts, jax.nn.softmax(values, axis=-1)",
        "tests/test_moe.py -k router",
    ),
    Mutant(
        "experts: one expert speaks for its group",
        "examples/moe.py",
        '1 if config.group_score == "best" else 2)',
        "1)",
        "tests/test_moe.py -k router",
    ),
    Mutant(
        "experts: scores of 0 are divided by 0",
        "examples/moe.py",
        "weights /= weights.sum(axis=-1, keepdims=True) + 1e-20",
        "weights /= weights.sum(axis=-1, keepdims=True)",
        "tests/test_moe.py -k router",
    ),
    Mutant(
        "experts: one part of the router's sums counts",
        "examples/moe.py",
        'einsum("rpi,pio->pro", *parts, **options).sum(axis=0)',
        'einsum("rpi,pio->pro", *parts, **options).max(axis=0)',
        "tests/test_moe.py -k summed_in_parts",
    ),
    Mutant(
        "experts: one half has no lower limit",
        "examples/moe.py",
        "jnp.maximum(jnp.minimum(up, limit), -limit)",
        "jnp.minimum(up, limit)",
        "tests/test_moe.py -k swiglu",
    ),
    Mutant(
        "experts: each Hopper GPU adds the bias",
        "examples/moe.py",
        """            biases["down_bias"] = jnp.where(part == 0, parameters["down_bias"], 0)
""",
        """            pass
""",
        "tests/test_moe.py -k hopper_gpus",
    ),
    Mutant(
        "experts: rows of other devices' pairs count",
        "examples/moe.py",
        "scaled = jnp.where(factor != 0, out * factor, 0)",
        "scaled = out * factor",
        "tests/test_moe.py -k other_devices",
    ),
    Mutant(
        "attend: rows of one token choose an implementation themselves",
        "examples/attend.py",
        "decode_lens, **options, implementation=implementation)",
        "decode_lens, **options)",
        "tests/test_attend.py -k every_op",
    ),
    Mutant(
        "attend: latents have shared prefixes",
        "examples/attend.py",
        "if prefixes is not None and value is not None and is_full:",
        "if prefixes is not None and is_full:",
        "tests/test_attend.py -k shared_prefixes",
    ),
    Mutant(
        "attend: sinks are lost beside shared prefixes",
        "examples/attend.py",
        '("sliding_window", "alibi_slopes", "sinks"))',
        '("sliding_window", "alibi_slopes"))',
        "tests/test_attend.py -k shared_prefixes",
    ),
    Mutant(
        "attend: ALiBi favours what is far away",
        "examples/attend.py",
        "logits -= alibi_slopes.reshape",
        "logits += alibi_slopes.reshape",
        "tests/test_attend.py -k without_a_cache",
    ),
]
