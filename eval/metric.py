"""The passkey score as an `evaluate.Metric`, without a hub: `evaluate.load` would look for it there.

    PasskeyScore().compute(predictions=[" 12345."], references=["12345"])  # {"accuracy": 100.0, ...}

`evaluate` is optional (`pip install hf-posenc[eval]`); the rest of this package does without it.
"""

from collections.abc import Sequence
from typing import Any

import evaluate
from datasets import Features, Value

from eval.grading import FIRST_NUMBER, grade
from eval.scores import wilson


class PasskeyScore(evaluate.Metric):  # type: ignore[misc]
    """Accuracy in percent and its 95 % interval, of generated answers (`predictions`) to keys (`references`).

    Keys are text, not numbers, so that leading zeros count. An answer is what was generated, without its prompt.
    `compute(..., scoring="substring")` grades otherwise; `exact_tokens` needs tokens, and here there is only text.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Whether the first digits of an answer are the pass key, all of it and nothing more.",
            citation="",
            inputs_description="predictions: generated answers; references: the keys, as text",
            features=Features({"predictions": Value("string"), "references": Value("string")}),
        )

    def _compute(
        self, predictions: Sequence[str], references: Sequence[str], scoring: str = FIRST_NUMBER
    ) -> dict[str, Any]:
        pairs = zip(predictions, references, strict=True)
        correct = sum(int(grade(scoring, answer, [key])) for answer, key in pairs)
        low, high = wilson(correct, len(predictions))
        return {
            "accuracy": 100 * correct / len(predictions), "correct": correct, "prompts": len(predictions),
            "interval": [100 * low, 100 * high],
        }  # fmt: skip
