# SPDX-License-Identifier: Apache-2.0
"""Text of the running interpreter's standard library: files, split, tokenizer, windows."""

import hashlib
import json
import sysconfig
from pathlib import Path

import numpy as np
from settings import Settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"]

# A base model continues text, so a chat is laid out as text: system messages
# become comments, the other messages follow each other as they are.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{{ '# ' + message['content'] | replace('\\n', '\\n# ') + '\\n\\n' }}"
    "{%- else -%}"
    "{{ message['content'] }}"
    "{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def read_documents() -> list[tuple[str, str]]:
    """(relative path, text) of every readable .py file, in path order, without copies.

    The pydoc topics are one module of string literals; they are added as prose,
    one document per topic.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or name.startswith("encodings/"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 200 or digest in seen:
            continue
        seen.add(digest)
        if name != "pydoc_data/topics.py":
            documents.append((name, text))
    from pydoc_data.topics import topics

    documents += [(f"pydoc_data/{key}", topics[key]) for key in sorted(topics)]
    return documents


def is_held_out(name: str, percent: int) -> bool:
    """Whether a file is kept out of training; depends on its path alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < percent


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose first ids are SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "mask_token": SPECIAL_TOKENS[1],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def distinct_ngrams(tokens: np.ndarray, n: int = 4) -> float:
    """Distinct n-grams / n-grams of one token sequence."""
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return len(np.unique(grams, axis=0)) / len(grams)


def pack(tokenizer: Tokenizer, texts: list[str], settings: Settings) -> np.ndarray:
    """One int32 stream: documents ended by eos, repetitive windows (tables) left out."""
    pieces = []
    for encoding in tokenizer.encode_batch(texts):
        tokens = np.array(encoding.ids + [settings.eos_token_id], dtype=np.int32)
        for start in range(0, len(tokens), settings.window_tokens):
            window = tokens[start : start + settings.window_tokens]
            if len(window) < 64 or distinct_ngrams(window) >= settings.min_distinct:
                pieces.append(window)
    return np.concatenate(pieces)


def prepare(folder: Path, settings: Settings) -> None:
    """Writes folder/{tokenizer files, train.npy, held_out.npy}; done when all exist."""
    if (folder / "held_out.npy").exists():
        return
    documents = read_documents()
    held = [t for n, t in documents if is_held_out(n, settings.held_out_percent)]
    kept = [t for n, t in documents if not is_held_out(n, settings.held_out_percent)]
    tokenizer = train_tokenizer(kept, settings.vocab_size)
    save_tokenizer(tokenizer, folder, settings.max_position)
    for name, texts in (("train", kept), ("held_out", held)):
        stream = pack(tokenizer, texts, settings)
        size = sum(map(len, texts))
        print(
            f"corpus: {name}: {len(texts)} documents, {size / 1e6:.1f} M characters, "
            f"{len(stream) / 1e6:.2f} M tokens kept",
            flush=True,
        )
        partial = folder / f"{name}.partial.npy"
        np.save(partial, stream)
        partial.rename(folder / f"{name}.npy")


def sample_windows(
    stream: np.ndarray,  # [num_tokens] int32
    count: int,
    length: int,
    rng: np.random.Generator,
) -> np.ndarray:  # [count, length] int64
    """Windows at random positions of a token stream."""
    starts = rng.integers(0, len(stream) - length, size=count)
    return np.stack([stream[s : s + length] for s in starts]).astype(np.int64)
