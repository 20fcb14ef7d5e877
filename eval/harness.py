"""A patched model for lm-evaluation-harness (`pip install "hf-posenc[lm-eval]"`), and our offline tasks as its tasks.

    lm = as_lm(model, tokenizer)
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])
    lm_eval.simple_evaluate(model=lm, tasks=offline_tasks(tokenizer, ["passkey", "vt"], 4096),
                            task_manager=TaskManager(include_defaults=False))

The harness cuts what is too long from the left, needle and all, and goes on; here that is an error. Prompts, their
lengths and the room for answers are those of `passkey.py` and `ruler.py`, token by token, and so are the scores, but
from 0 to 1 as the harness has them. Its perplexity reads each text apart, a prefix token before it.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from datasets import Dataset

try:
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as error:
    raise ValueError('this needs lm-evaluation-harness: pip install "hf-posenc[lm-eval]"') from error

from eval import passkey, ruler
from eval.grading import grade
from eval.models import encode
from eval.retrieval import DEPTHS
from eval.ruler_tasks import TASKS

PASSKEY, PERPLEXITY = "passkey", "perplexity"
OFFLINE = (PASSKEY, PERPLEXITY, *TASKS)
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "until": []}
RATES = ("bits_per_byte", "byte_perplexity", "word_perplexity")


class UncutLM(HFLM):  # type: ignore[misc]
    """The harness's transformers model, but what does not fit is an error instead of being cut."""

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Any, Any]:
        """Tokens and mask of prompts to be continued, `(batch, tokens)`; `left_truncate_len` is what they may take."""
        ids, mask = super().tok_batch_encode(strings, padding_side=padding_side)
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            raise ValueError(self._too_long(f"a prompt of {ids.shape[1]} tokens", left_truncate_len))
        return ids, mask

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **settings: Any) -> list[tuple[float, bool]]:
        longest = max((len(context) + len(answer) for _, context, answer in requests), default=0)
        if longest > self.max_length + 1:  # the last token is not read
            raise ValueError(self._too_long(f"a text of {longest} tokens", self.max_length + 1))
        found: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **settings)
        return found

    def _too_long(self, what: str, room: int) -> str:
        return (f"{what} does not fit into the {room} that max_length {self.max_length} leaves; take a larger "
                "max_length, an encoding that reaches further, or shorter prompts")  # fmt: skip


class OfflineTask(ConfigurableTask):  # type: ignore[misc]
    """A task of the harness in which each prompt says how many tokens its answer may take."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **settings: Any) -> Any:
        request = super().construct_requests(doc, ctx, **settings)
        if self.OUTPUT_TYPE == "generate_until":
            request.arguments[1]["max_gen_toks"] = doc["room"]
        return request


def as_lm(model: Any, tokenizer: Any, max_length: int | None = None) -> UncutLM:
    """The model as it is, patched or not, for `lm_eval.simple_evaluate(model=...)`.

    Args:
        max_length: tokens of prompt and answer together. By default what the model's configuration says, which a patch
            changes to the length it reaches.
    """
    if max_length is None:
        max_length = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if max_length is None:
        raise ValueError("this model's configuration says no max_position_embeddings: give max_length")
    return UncutLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=1)


def offline_tasks(
    tokenizer: Any, names: Sequence[str], length: int, *, limit: int = 20, seed: int = 0, text: str | None = None
) -> list[dict[str, Any]]:
    """Tasks of the harness that need no hub; for a `TaskManager(include_defaults=False)`.

    Args:
        names: some of `OFFLINE`.
        length: tokens of prompt and answer together, or of a piece of text.
        limit: prompts per task; of `perplexity` the most pieces, from the start of the text.
        text: what `perplexity` reads.

    Raises:
        ValueError: an unknown name, a length that a task cannot meet, or no text of that length.
    """
    strange = [name for name in names if name not in OFFLINE]
    if strange:
        raise ValueError(f"{', '.join(strange)} is not known; choose among {', '.join(OFFLINE)}")
    if PERPLEXITY in names and text is None:
        raise ValueError(f"{PERPLEXITY} needs a text")
    tasks = []
    for name in names:
        if name == PERPLEXITY:
            pieces = [{"text": piece} for piece in _pieces(tokenizer, text or "", length, limit)]
            tasks.append(_task(name, pieces, output_type="loglikelihood_rolling", doc_to_text="",
                               doc_to_target=_text, metric_list=[{"metric": rate} for rate in RATES]))  # fmt: skip
        else:
            make = _keys if name == PASSKEY else _questions
            metric, score = ("acc", _is_key) if name == PASSKEY else ("string_match", _match)
            tasks.append(_task(name, make(tokenizer, name, length, limit, seed), output_type="generate_until",
                               doc_to_text=_text, doc_to_target="", generation_kwargs=GREEDY, process_results=score,
                               metric_list=[{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
                               ))  # fmt: skip
    return tasks


def unknown(names: Sequence[str]) -> list[str]:
    """Those that are tasks neither here nor of the harness, whose list takes seconds to read."""
    others = [name for name in names if name not in OFFLINE]
    known = _manager().all_tasks if others else []
    return [name for name in others if name not in known]


def score(
    model: Any, tokenizer: Any, task: str, length: int | None, *, limit: int, text: str | None = None, seed: int = 0
) -> dict[str, Any]:
    """One task's metrics in the harness's scale, with `better` (higher or lower) by metric, and how many prompts.

    Args:
        length: of one of `OFFLINE`; None for a task of the harness, whose prompts may take what the model reaches.

    Raises:
        ValueError: a prompt that does not fit, data that cannot be had, or a group of tasks without a score.
    """
    lm = as_lm(model, tokenizer, length)
    if length is None:
        tasks, manager = [task], _manager()
    else:
        tasks = offline_tasks(tokenizer, [task], length, limit=limit, seed=seed, text=text)
        manager = TaskManager(include_defaults=False)
    try:
        with _alone():
            found = lm_eval.simple_evaluate(
                model=lm, tasks=tasks, limit=limit, bootstrap_iters=0, log_samples=False, task_manager=manager
            )
    except OSError as error:
        raise ValueError(f"{task} of lm-evaluation-harness needs data from the hub: {error}") from error
    better = {name: more for by_metric in found["higher_is_better"].values() for name, more in by_metric.items()}
    numbers = {name.removesuffix(",none"): value for name, value in found["results"].get(task, {}).items()
               if "," in name and "_stderr," not in name and isinstance(value, int | float)}  # fmt: skip
    if not numbers:
        raise ValueError(f"{task} has no score of its own: name the tasks in it")
    order = list(better)
    metrics = dict(sorted(numbers.items(), key=lambda pair: order.index(pair[0].split(",")[0])))
    return {
        "metrics": metrics,
        "better": {name: "higher" if better[name.split(",")[0]] else "lower" for name in metrics},
        "prompts": sum(samples["effective"] for samples in found["n-samples"].values()),
    }


@contextmanager
def _alone() -> Iterator[None]:
    """The harness gives results to the first of several processes only; here each scores tasks of its own."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        yield


@functools.cache
def _manager() -> Any:
    return TaskManager()


def _task(name: str, documents: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    def dataset(**metadata: Any) -> dict[str, Dataset]:
        return {"test": Dataset.from_list(documents)}

    return {"task": name, "class": OfflineTask, "custom_dataset": dataset, "test_split": "test", **settings}


def _keys(tokenizer: Any, name: str, length: int, limit: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of `passkey`, the first trial at each depth, then the second."""
    documents = []
    for index in range(limit):
        depth, trial = DEPTHS[index % len(DEPTHS)], index // len(DEPTHS)
        prompt = passkey.build(tokenizer, length, depth, trial, seed=seed)
        text = _readable(tokenizer, prompt.ids)
        documents.append({"text": text, "room": prompt.room, "references": prompt.references})
    return documents


def _questions(tokenizer: Any, name: str, length: int, limit: int, seed: int) -> list[dict[str, Any]]:
    prompts = (ruler.build(tokenizer, name, length, trial, seed=seed) for trial in range(limit))
    return [{"text": _readable(tokenizer, prompt.ids), "room": prompt.room, "references": prompt.references}
            for prompt in prompts]  # fmt: skip


def _readable(tokenizer: Any, ids: list[int]) -> str:
    """The text of a prompt, which the harness will make tokens of again."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    if encode(tokenizer, text) != ids:
        raise ValueError("this tokenizer reads its own text otherwise than it wrote it, so the harness cannot ask it")
    return text


def _pieces(tokenizer: Any, text: str, length: int, limit: int) -> Iterator[str]:
    """Consecutive parts of a text, of whole words, that take `length` tokens each or little less."""
    words = re.findall(r"\S+\s*", text)
    begin = found = 0
    while begin < len(words) and found < limit:
        size = _fitting(lambda count, begin=begin: len(encode(tokenizer, "".join(words[begin : begin + count]))),
                        length, len(words) - begin)  # fmt: skip
        if begin + size == len(words):
            break
        yield "".join(words[begin : begin + size]).rstrip()
        begin, found = begin + size, found + 1
    if not found:
        raise ValueError(f"the text is shorter than {length} tokens: give a longer one or take a shorter length")


def _fitting(size: Callable[[int], int], room: int, most: int) -> int:
    """The largest count up to `most` whose size fits into `room`, at least 1."""
    low, high = 1, min(most, room) + 1
    while high - low > 1:
        middle = math.ceil((low + high) / 2)
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return low


def _text(doc: dict[str, Any]) -> str:
    return str(doc["text"])


def _is_key(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"acc": grade(passkey.SCORING, results[0], doc["references"])}


def _match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"string_match": ruler.string_match_all(results, [doc["references"]]) / 100}
