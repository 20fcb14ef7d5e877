"""`python -m eval passkey`."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from eval import data, models, passkey
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

NOISE = "noise"


def command(
    model: ModelName = "smollm2",
    posenc: PosEncs = (models.NONE,),
    lengths: Lengths = ("2048,4096",),
    depths: retrieval.Depths = retrieval.ALL_DEPTHS,
    trials: retrieval.Trials = TRIALS,
    digits: Annotated[int, typer.Option(help="Of the key.", min=1)] = 5,
    filler: Annotated[
        str, typer.Option(help="noise, a few dull sentences over and over, or a file or offline text.")
    ] = NOISE,
    scoring: retrieval.Scoring = passkey.SCORING,
    seed: int = 0,
    share: retrieval.Share = True,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    check: Check = CHECK,
    results: Root = "results",
) -> None:
    """Passkey retrieval by length and depth.

    Example: python -m eval passkey --posenc none --posenc yarn:factor=2 --lengths 4096,12288 --depths 0.1,0.5,0.9
    """
    tokens, places = models.numbers(lengths), models.numbers(depths, float, "depths")
    retrieval.check(tokens, places, trials, scoring, passkey.answer_tokens(digits))
    _text(filler)
    loaded, tokenizer = models.load(model, dtype, device)
    found = run(loaded, tokenizer, model, posenc, tokens, places, trials=trials, digits=digits, filler=filler,
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
    digits: int = 5,
    filler: str = NOISE,
    scoring: str = passkey.SCORING,
    seed: int = 0,
    share: bool = True,
    root: str = "results",
) -> Results:
    """Passkey retrieval under several encodings; every cell of length and depth gets `trials` prompts.

    Args:
        filler: `noise`, or a text's name or file as for `data.text`.
        scoring: one of `grading.SCORINGS`; samples hold what all of them need.
        share: reads the common start of prompts once, under encodings for which that makes no difference.
    """
    retrieval.check(lengths, depths, trials, scoring, passkey.answer_tokens(digits))
    text = _text(filler)
    parameters = {"digits": digits, "filler": NOISE if text is None else sha256(text.encode()), "seed": seed}
    build = functools.partial(passkey.build, tokenizer, digits=digits, seed=seed, text=text)
    return retrieval.run(model, tokenizer, model_name, posencs, lengths, depths, trials, task="passkey", build=build,
                         parameters=parameters, shown=("model", "digits", "seed", "dtype"), scoring=scoring,
                         share=share, root=root)  # fmt: skip


def scores_of(
    results: Results, depths: Sequence[float], trials: int, scoring: str = passkey.SCORING
) -> list[dict[str, Any]]:
    """One dictionary per encoding and length, as `retrieval.scores_of` makes them; accuracy in percent."""
    return retrieval.scores_of(results, depths, trials, scoring)


def _text(filler: str) -> str | None:
    return None if filler == NOISE else data.text(filler)
