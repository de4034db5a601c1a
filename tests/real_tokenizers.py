"""Tokenizers as real models have them, made by the tokenizers library from a few words, and random texts."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
SENTENCE = "the cat sat on the mat and the dog ran off with a hat; in 1969 def f(x): return x + 1 naïve über señor"
WORDS = SENTENCE.split()
SCRIPTS = "漢字仮名交じり文中国日本한국어ไทยहिन्दी", "🙂🐍👩‍👩‍👧‍👦🇫🇷👍🏽✨", "éñüßø—“”…", " \n\t  ", "abcxyz.,:;(){}"
CORPUS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]


def byte_level():
    """The sort that GPT-2, Llama 3 and Qwen have: any text is bytes, and some neighbouring bytes are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback():
    """A tokenizer like Llama 2's: characters without a token are bytes, a space is prepended, BOS is added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL[:3]))
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = SPECIAL[:3] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [token for token in trained["vocab"] if token not in SPECIAL]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in trained["merges"]]
    whole = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    whole.normalizer = tokenizer.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence(steps)
    whole.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    whole.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return whole


def metaspace():
    """A tokenizer like T5's: a word has its space at its beginning, and a text's first space is not shown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    characters = sorted({character for script in SCRIPTS for character in script})
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=characters)
    tokenizer.train_from_iterator([*CORPUS, " ".join(characters)], trainer)
    return tokenizer


def word_piece():
    """A tokenizer like BERT's: pieces that continue a word begin with ##, and decoding removes extra spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    return tokenizer


TOKENIZERS = {make.__name__: make for make in (byte_level, byte_fallback, metaspace, word_piece)}


def random_text(rng, longest=12):
    """Makes a text of up to this many parts: words, or some characters of one script."""
    parts = []
    for _ in range(rng.integers(0, longest + 1)):
        if rng.random() < 0.4:
            parts.append((" " if rng.random() < 0.7 else "") + str(rng.choice(WORDS)))
        else:
            script = SCRIPTS[rng.choice(len(SCRIPTS), p=[0.3, 0.3, 0.1, 0.15, 0.15])]
            parts.append("".join(script[i] for i in rng.integers(0, len(script), rng.integers(1, 4))))
    return "".join(parts)
