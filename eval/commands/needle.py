"""`python -m eval needle`."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from eval import data, models, needle
from eval.commands import (
    CHECK,
    Check,
    Device,
    DType,
    Lengths,
    ModelName,
    PosEncs,
    Root,
    file_manifest,
    retrieval,
    sha256,
)
from eval.results import Results
from eval.retrieval import TRIALS


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    lengths: Lengths = ("2048,4096",),
    depths: retrieval.Depths = retrieval.ALL_DEPTHS,
    trials: retrieval.Trials = TRIALS,
    text: Annotated[str, typer.Option(help="File or offline text to hide needles in.")] = needle.TEXT,
    needles: Annotated[int, typer.Option(help="Per prompt: the first at the depth, the others behind it.", min=1)] = 1,
    ask: Annotated[str, typer.Option(help="For all needles, or for one: the first.")] = needle.ALL,
    scoring: retrieval.Scoring = needle.SCORING,
    seed: int = 0,
    share: retrieval.Share = True,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = CHECK,
    results: Root = "results",
) -> None:
    """Needle in a haystack by length and depth: made-up facts in a real text.

    Example: python -m eval needle --posenc none --posenc dynamic_yarn --lengths 4096,12288 --needles 4 --ask one
    """
    tokens, places = models.numbers(lengths), models.numbers(depths, float, "depths")
    retrieval.check(tokens, places, trials, scoring, needle.answer_tokens(needles, ask))
    data.text(text)
    loaded, tokenizer = models.load(model, dtype, device)
    found = run(loaded, tokenizer, model, posenc, tokens, places, trials=trials, text=text, needles=needles, ask=ask,
        scoring=scoring, seed=seed, share=share, root=results)  # fmt: skip
    file_manifest(found, loaded, tokenizer, posenc, tokens, check)


def run(
    model: Any,
    tokenizer: Any,
    model_name: str,
    posencs: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: int = TRIALS,
    text: str = needle.TEXT,
    needles: int = 1,
    ask: str = needle.ALL,
    scoring: str = needle.SCORING,
    seed: int = 0,
    share: bool = True,
    root: str = "results",
) -> Results:
    """Needles in a text under several encodings; every cell of length and depth gets `trials` prompts.

    Args:
        text: a text's name or file as for `data.text`.
        needles, ask: as for `needle.needle`.
        scoring: one of `grading.SCORINGS`; samples hold what all of them need.
        share: reads the common start of prompts once, under encodings for which that makes no difference.
    """
    retrieval.check(lengths, depths, trials, scoring, needle.answer_tokens(needles, ask))
    haystack = data.text(text)
    asked = {"needles": needles, "ask": ask, "seed": seed}
    parameters = {**asked, "text": text, "text_sha256": sha256(haystack.encode())}
    build = functools.partial(needle.build, tokenizer, text=haystack, **asked)
    return retrieval.run(model, tokenizer, model_name, posencs, lengths, depths, trials, task="needle", build=build,
                         parameters=parameters, shown=("model", "text", "needles", "dtype"), scoring=scoring,
                         share=share, root=root)  # fmt: skip


def scores_of(
    results: Results, depths: Sequence[float], trials: int, scoring: str = needle.SCORING
) -> list[dict[str, Any]]:
    """One dictionary per encoding and length, as `retrieval.scores_of` makes them; accuracy in percent."""
    return retrieval.scores_of(results, depths, trials, scoring)
