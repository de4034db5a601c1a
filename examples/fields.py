"""The fields of a config.json, each read once with its type checked; what is not read is refused by name."""

import sys
from collections.abc import Iterable
from typing import Any

from examples.config import CheckpointError

# Fields that no forward pass of transformers depends on: names, training, generation, and how results are returned.
_IGNORED = """
_attn_implementation _name_or_path _commit_hash _flash_attn_2_enabled activation_dropout architectures
attention_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha base_model_pp_plan base_model_tp_plan
cache_implementation chunk_size_feed_forward classifier_dropout dropout dtype embd_pdrop ep_size finetuning_task
gradient_checkpointing hidden_dropout id2label init_std initializer_factor initializer_range is_decoder
is_encoder_decoder label2id layerdrop model_type name_or_path num_labels output_attentions output_hidden_states
output_router_logits prefix pretraining_tp problem_type resid_pdrop return_dict router_aux_loss_coef
router_jitter_noise seq_aux task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype
torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id forced_bos_token_id
forced_eos_token_id bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
IGNORED = frozenset(_IGNORED.split())
NO_DEFAULT: Any = object()


class Fields:
    """An object of a config.json that knows which of its fields were read.

    Args:
        raw: the object.
        where: what messages call it.
    """

    def __init__(self, raw: dict[str, Any], where: str = "config.json"):
        self.raw, self.where = raw, where
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.raw

    def get(self, key: str, default: Any = None) -> Any:
        """A field as it is, for the caller to check."""
        self._read.add(key)
        return self.raw.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; null stands for the default."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.where} has no {key}")
        if type(value) is not int or not 0 < value < 2**31:
            raise CheckpointError(f"{self.where} has {key} {value!r}; expected a positive integer below 2**31")
        return value

    def count(self, key: str, default: int) -> int:
        """An integer, at least 0."""
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise CheckpointError(f"{self.where} has {key} {value!r}; expected an integer")
        return value

    def optional_size(self, key: str, default: int | None = None) -> int | None:
        """A positive integer; null stands for None."""
        return None if self.get(key, default) is None else self.size(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        if not isinstance(value := self.get(key, default), bool):
            raise CheckpointError(f"{self.where} has {key} {value!r}; expected true or false")
        return value

    def number(self, key: str, default: float = NO_DEFAULT) -> float:
        """A positive, finite number."""
        if (value := self.get(key, default)) is NO_DEFAULT:
            raise CheckpointError(f"{self.where} has no {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"{self.where} has {key} {value!r}; expected a positive, finite number")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A positive, finite number; null stands for None."""
        return None if self.get(key, default) is None else self.number(key, default or NO_DEFAULT)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of this many positive numbers."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length or not all(_is_positive(x) for x in value):
            raise CheckpointError(f"{self.where} has {key} {value!r}; expected {length} positive numbers")
        return tuple(map(float, value))

    def only(self, key: str, *supported: Any) -> Any:
        """Reads one of these values; the first is the default."""
        if not any(type(found := self.get(key, supported[0])) is type(value) and found == value for value in supported):
            raise CheckpointError(f"{key} {found!r} is not supported; supported: {', '.join(map(repr, supported))}")
        return found

    def ignore(self, *keys: str) -> None:
        """Counts fields as read that transformers does not read in this family either."""
        self._read.update(keys)

    def same(self, key: str, alias: str) -> None:
        """Makes `alias` another name of `key`; a file that gives both must give them one value."""
        self.ignore(alias)
        if alias in self.raw and self.raw.setdefault(key, self.raw[alias]) != self.raw[alias]:
            values = f"{key} {self.raw[key]!r} and {alias} {self.raw[alias]!r}"
            raise CheckpointError(f"{self.where} has {values}, which are one")

    def refuse_unread(self, ignored: Iterable[str] = IGNORED) -> None:
        """Refuses the object if it has a field that was not read and is not null.

        Raises:
            CheckpointError: names the fields.
        """
        given = {key for key, value in self.raw.items() if value is not None}
        if unread := sorted(given - self._read - set(ignored)):
            raise CheckpointError(f"{self.where} has fields that are not supported here: {', '.join(unread)}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
