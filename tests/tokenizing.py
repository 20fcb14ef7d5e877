"""Tokenizers for prompts: of bytes, a small trained one with a first BOS, and real ones where they can be had."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eval import data
from eval.haystack import FILLER
from eval.ruler_tasks import ADJECTIVES, FRAMES, NOUNS


def finish(backend, **tokens):
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **tokens)


def byte_level():
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return finish(Tokenizer(models.BPE({letter: index for index, letter in enumerate([*alphabet, "</s>"])}, [])))


def trained():
    """A small BPE, with a first BOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator([*FILLER, *FRAMES, " ".join(ADJECTIVES + NOUNS)], trainer)
    return finish(backend, bos_token="<s>", add_bos_token=True)


def smollm2():
    folder = data.cache() / "models" / f"smollm2-135m-instruct-{data.SMOLLM2.sha256[:12]}"
    return AutoTokenizer.from_pretrained(folder) if folder.exists() else None


TOKENIZERS = {"byte_level": byte_level(), "trained": trained(), "smollm2": smollm2()}


@functools.cache
def real(name):
    """One of `TOKENIZERS`, or `gemma`; fetched if it is not in the cache yet."""
    if name == "gemma":
        return AutoTokenizer.from_pretrained(data.gemma_tokenizer())
    return TOKENIZERS[name] or AutoTokenizer.from_pretrained(data.smollm2())
