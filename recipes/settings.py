"""What a recipe can say: own fields and all of transformers' `TrainingArguments`, from YAML and the command line."""

# ruff: noqa: RUF009 (`option` makes a field)
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser, TrainingArguments

from eval.data import is_dataset
from eval.models import DTYPES

LAYOUTS = ("packed", "single", "joined")
SCHEDULES = ("plain", "curriculum", "mixed", "pose")
TRAINED = ("lora", "full", "posenc")
HELD_OUT = ("persuasion", "northanger_abbey")
# The order of a schedule is the order in which its data set answers.
FIXED = {
    "remove_unused_columns": False, "train_sampling_strategy": "sequential", "prediction_loss_only": True,
    "eval_strategy": "no",
}  # fmt: skip
# Remove when the oldest supported transformers knows these only.
RENAMED = {
    old: old.replace("gradient", "activation")
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs")
    if hasattr(TrainingArguments, old.replace("gradient", "activation"))
}


def option(default: Any, text: str) -> Any:
    """A field with a help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class Recipe:
    """Model, positional encoding, data and schedule; everything else is in `TrainingArguments`."""

    model: str = option("smollm2", "Model folder, hub id, or smollm2.")
    posenc: str = option("none", "A method as in yarn:factor=4; {length} becomes the length of the stage.")
    dtype: str = option("auto", "Of the weights. What is trained is float32 under bf16 or fp16.")
    train: str = option("lora", f"One of {', '.join(TRAINED)}; lora trains norms and embeddings too.")
    lora_rank: int = option(8, "Of the adapters of the linear layers.")
    lora_alpha: int = option(16, "Scale of the adapters, over the rank.")
    lora_targets: list[str] = option(["all-linear"], "Names of linear layers, or all-linear.")
    data: list[str] = option([], "Texts, files, folders or data sets, as --text of python -m eval takes them.")
    documents_per_source: int | None = option(None, "At most, from the first; a data set needs it.")
    documents: str = option(
        "packed", f"One of {', '.join(LAYOUTS)}: several to a block but apart, one, or read on across."
    )
    pad_token: str | None = option(None, "A token of the tokenizer, where it names none itself.")
    schedule: str = option("plain", f"One of {', '.join(SCHEDULES)}.")
    lengths: list[int] = option([2048], "Tokens of a block; several for curriculum (in this order) and mixed.")
    shares: list[float] | None = option(None, "Share of the steps at each length. Default: equal.")
    target_length: int | None = option(None, "For pose: tokens that its positions reach.")
    chunk: int | None = option(None, "Tokens whose logits exist at once; 0: all. Default: what fits in 2^25 logits.")
    evaluate: bool = option(True, "Loss and pass key before and after.")
    evaluate_lengths: list[int] | None = option(None, "Tokens. Default: those trained at, and target_length.")
    evaluate_texts: list[str] = option(["persuasion"], "Texts kept out of training, each read once.")
    passkey_trials: int = option(2, "Prompts per length and depth.")

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Recipe).items():
            if not _fits(getattr(self, name), kind):
                raise ValueError(f"{name} should be {getattr(kind, '__name__', kind)}, got {getattr(self, name)!r}")
        least = {"lora_rank": 1, "chunk": 0, "passkey_trials": 0}
        for name, low in least.items():
            if (getattr(self, name) or low) < low or getattr(self, name) == 0 < low:
                raise ValueError(f"{name} {getattr(self, name)} must be {low} or more")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.evaluate_lengths is not None and min(self.evaluate_lengths, default=0) < 2:
            raise ValueError(f"evaluate_lengths {self.evaluate_lengths} must be 2 tokens or more")
        for name, values in (("documents", LAYOUTS), ("schedule", SCHEDULES), ("train", TRAINED)):
            given = getattr(self, name)
            if given not in values:
                raise ValueError(f"{name} is one of {', '.join(values)}, got {given!r}{_hint(given, values)}")
        if not self.data:
            raise ValueError("give data: files, folders, data sets or names of texts")
        named = [source for source in self.data if is_held_out(source)]
        if named:
            raise ValueError(f"{', '.join(named)} is kept out of training, to be evaluated on: take other texts")
        if self.documents_per_source is None and any(is_dataset(source) for source in self.data):
            raise ValueError("give documents_per_source: a data set may be endless")
        if self.documents_per_source is not None and self.documents_per_source < 1:
            raise ValueError(f"documents_per_source {self.documents_per_source} must be 1 or more")
        if self.evaluate and not self.evaluate_texts:
            raise ValueError("give evaluate_texts, or evaluate: false")
        shared = sorted({*self.evaluate_texts} & {*self.data}) if self.evaluate else []
        if shared:
            raise ValueError(f"{', '.join(shared)} is trained on: give other evaluate_texts, or evaluate: false")
        self._check_schedule()

    def _check_schedule(self) -> None:
        several = self.schedule in ("curriculum", "mixed")
        if not self.lengths or min(self.lengths) < 2 or (len(self.lengths) < 2) == several:
            raise ValueError(f"the schedule {self.schedule} takes {'several lengths' if several else 'one length'} of "
                             f"2 tokens or more, got lengths: {self.lengths}")  # fmt: skip
        if self.shares is not None and (len(self.shares) != len(self.lengths) or min(self.shares) <= 0):
            raise ValueError(f"shares {self.shares} must be positive, one for each of the lengths {self.lengths}")
        if (self.schedule == "pose") != (self.target_length is not None):
            raise ValueError("target_length and the schedule pose belong together: give both or neither")
        if self.target_length is not None and self.target_length < self.lengths[0]:
            raise ValueError(f"target_length {self.target_length} is shorter than the blocks of {self.lengths[0]}")
        if self.schedule == "pose" and self.documents == "packed":
            raise ValueError("pose skips positions, by which packed documents are told apart: give documents: single "
                             "or joined")  # fmt: skip
        if self.schedule == "mixed" and "{length}" in self.posenc:
            raise ValueError("a mixed schedule has one encoding for all lengths: write its length out in posenc")

    def posenc_at(self, length: int) -> str:
        """The encoding of a stage."""
        return self.posenc.replace("{length}", str(self.target_length or length))

    @property
    def longest(self) -> int:
        """Positions that training reaches."""
        return self.target_length or max(self.lengths)


def parse(arguments: Sequence[str]) -> tuple[Recipe, TrainingArguments]:
    """`--config FILE.yaml` and `--key value` that override it.

    Raises:
        ValueError: an unknown key, with the nearest known one.
    """
    arguments = [f"--{RENAMED.get(word[2:], word[2:])}" if word.startswith("--") else word for word in arguments]
    parser = HfArgumentParser((Recipe, TrainingArguments), allow_abbrev=False)
    parser.add_argument("--config", help="A YAML file of these options.")
    known = {one.name for kind in (Recipe, TrainingArguments) for one in fields(kind) if one.init}
    config = parser.parse_known_args(arguments)[0].config
    written = {RENAMED.get(key, key): value for key, value in (_read(config) if config else {}).items()}
    given = [word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
    for key in [
        *written,
        *(key for key in given if key not in ("config", "help") and key.removeprefix("no_") not in known),
    ]:
        if key not in known:
            raise ValueError(f"{key!r} is no option of a recipe{_hint(key, known)}")
    fixed = [key for key in (*written, *given) if key in FIXED]
    if fixed:
        raise ValueError(f"leave out {', '.join(fixed)}: the schedule decides over the order and form of the data")
    parser.set_defaults(**FIXED, **written)
    recipe, training, _, rest = parser.parse_args_into_dataclasses(
        arguments, return_remaining_strings=True, look_for_args_file=False
    )
    if rest:
        raise ValueError(f"{' '.join(rest)} belongs to no option")
    if training.per_device_train_batch_size < 1 or (training.max_steps <= 0 and training.num_train_epochs <= 0):
        raise ValueError("give a per_device_train_batch_size of 1 or more, and max_steps or num_train_epochs above 0")
    return recipe, training


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of the type of its option: YAML can say anything."""
    inner = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def is_held_out(document: str) -> bool:
    """Whether a text, or the document of that name, is kept for evaluation."""
    return Path(document).stem in HELD_OUT


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(f"there is no configuration {path}")
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold options, as in `lengths: [2048]`")
    return content


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), sorted(known), 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
