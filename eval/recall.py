"""Recall: one reading of a real text gives both the loss by position and an answer from afar.

A note with a pass key is hidden in a text. The model reads the text once: that gives the loss of every token, within
the trained length and beyond, and a cache, on top of which it is asked for the key. The key follows from the seed.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from eval import models
from eval.haystack import Prompt
from eval.likelihood import token_losses
from eval.passkey import KEY, QUESTION, answer_tokens
from eval.retrieval import ask, new_cache

DEPTH = 0.3  # of the note in the text: at twice the trained length, the question comes 1.4 trained lengths after it


def hide(tokenizer: Any, text: str, length: int, depth: float = DEPTH, seed: int = 0) -> tuple[Prompt, int]:
    """A text with a note between two of its paragraphs and a question about it, and how many tokens are the text.

    Args:
        length: tokens of text, question and answer.
        depth: where the note stands in what is read of the text, 0 to 1.

    Raises:
        ValueError: the text, or the length, is too short.
    """
    key = str(random.Random(seed).randrange(10_000, 100_000))
    question = models.encode(tokenizer, QUESTION, start=False)
    read = length - len(question) - answer_tokens(len(key))
    start = tokenizer.decode(models.encode(tokenizer, text)[: max(0, round(depth * read))], skip_special_tokens=True)
    gap = text.rfind("\n\n", 0, len(start))
    place = gap + 2 if gap >= 0 else len(start)
    before = models.encode(tokenizer, text[:place])
    note = models.encode(tokenizer, f"{KEY.format(key=key)}\n\n", start=False)
    ids = before + note + models.encode(tokenizer, text[place:], start=False)
    if read < len(before) + len(note):
        raise ValueError(f"length {length} is too short for the note and the question: give a longer one")
    if len(ids) < read:
        raise ValueError(f"the text has {len(ids)} tokens, {read} are needed: give a longer text or a shorter length")
    return Prompt(length, depth, 0, [key], len(before), ids[:read] + question, [], answer_tokens(len(key))), read


def read_and_answer(
    model: Any, tokenizer: Any, prompt: Prompt, read: int, after_layer: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Losses of the first `read` tokens of a prompt and the answer to it, from one pass over the text.

    Args:
        after_layer: called after every layer of that pass.
    """
    began = time.perf_counter()
    cache = new_cache(model)
    hooks = [layer.register_forward_hook(lambda *_: after_layer()) for layer in layers(model)]
    try:
        losses = token_losses(model, torch.tensor([prompt.ids[:read]]), cache=cache)[0]
    finally:
        for hook in hooks:
            hook.remove()
    answer = asdict(ask(model, tokenizer, prompt, cache))
    return {
        **answer,
        "seconds": round(time.perf_counter() - began, 2),
        "losses": [round(x, 5) for x in losses.tolist()],
    }


def layers(model: nn.Module) -> list[nn.Module]:
    """What a forward runs one after the other."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
