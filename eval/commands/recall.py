"""The task `recall` of `python -m eval compare`, and all of `python -m eval demo`."""

import json
from collections.abc import Sequence
from typing import Any

from eval import data, models
from eval.commands import identity, progress, sha256
from eval.recall import hide, layers, read_and_answer
from eval.results import Results


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    text: str,
    *,
    seed: int = 0,
    root: str = "results",
) -> Results:
    """Loss by position and an answer from afar, under several encodings and at several lengths.

    Args:
        lengths: tokens of text, question and answer.
        text: a file or an offline text.
    """
    names, content = models.full_names(model, posencs, lengths), data.text(text)
    prompts = {length: hide(tokenizer, content, length, seed=seed) for length in lengths}
    known = {"text": text, "text_sha256": sha256(content.encode()), "seed": seed}
    parameters = {**identity(model, model_name, tokenizer), **known}
    results = Results(root, "recall", parameters, ("model", "text", "dtype"), ("posenc", "length"))
    with progress() as bar:
        for name in names:
            missing = [length for length in lengths if results.lacks(posenc=name, length=length)]
            for length in missing:
                prompt, read = prompts[length]
                task = bar.add_task(f"{name} reads {read:,} tokens", total=len(layers(model)))
                with models.applied(model, name):
                    sample = read_and_answer(model, tokenizer, prompt, read, lambda task=task: bar.advance(task))
                digest = sha256(json.dumps(prompt.ids).encode())
                results.add({"posenc": name, **sample, "prompt_sha256": digest})
    results.complete()
    return results
