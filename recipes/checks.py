"""What can be said of a recipe before any weight is loaded."""

import inspect
import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from transformers import AutoTokenizer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_posenc
from eval import models
from hf_posenc.inspection import look, weightless_whole
from recipes.evaluation import lengths_of
from recipes.schedules import Form, Sample, skip_positions
from recipes.settings import Recipe
from recipes.spans import hide_spans, sentinels_of
from recipes.trained import own_parameters, require_own_parameters

# What may differ in a resumed run, and what of the arguments of training may not.
FREE = ("evaluate", "chunk")
RESUMED = ("seed", "learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs", "optim",
           "weight_decay")  # fmt: skip


def find_checkpoint(training: TrainingArguments) -> str | None:
    """The checkpoint to go on from: the last whole one for `auto`, none where there is none.

    Raises:
        ValueError: the folder holds checkpoints, and nothing was said about them.
    """
    folders = sorted(
        (folder for folder in Path(training.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _is_whole(folder)),
        key=lambda folder: int(folder.name.rpartition("-")[2]),
    )
    if training.resume_from_checkpoint not in (None, "auto"):
        if not _is_whole(Path(training.resume_from_checkpoint)):
            raise ValueError(
                f"{training.resume_from_checkpoint} is no whole checkpoint: give auto, or the folder of one"
            )
        return training.resume_from_checkpoint
    if training.resume_from_checkpoint is None and folders:
        raise ValueError(f"{training.output_dir} holds checkpoints of an earlier run: give --resume_from_checkpoint "
                         "auto to go on from the last, or another --output_dir")  # fmt: skip
    kept = [path.name for path in Path(training.output_dir).glob("*model*") if path.suffix in (".safetensors", ".bin")]
    if kept and not folders:
        raise ValueError(f"{training.output_dir} holds a model already ({kept[0]}), which would be taken for that of "
                         "this run: give another --output_dir")  # fmt: skip
    return str(folders[-1]) if folders else None


def check_same(recipe: Recipe, training: TrainingArguments, resumed: bool) -> None:
    """Writes down what a run is, or compares a resumed one with it.

    Raises:
        ValueError: a resumed run that would be another.
    """
    path = Path(training.output_dir, "recipe.json")
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    now = {name: value for name, value in asdict(recipe).items() if name not in FREE}
    now |= {name: str(getattr(training, name)) for name in RESUMED} | {"rows of a step": rows}
    if resumed and path.exists():
        before = json.loads(path.read_text())
        changed = [name for name, value in now.items() if before.get(name) != value]
        if changed:
            told = ", ".join(f"{name} ({before.get(name)!r}, now {now[name]!r})" for name in changed)
            raise ValueError(f"the run in {training.output_dir} was another: {told}. Give what it had, or another "
                             "--output_dir")  # fmt: skip
    elif training.process_index == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n")


def _is_whole(checkpoint: Path) -> bool:
    """Whether it was written to its end: the state of the trainer comes last."""
    try:
        return bool(json.loads((checkpoint / "trainer_state.json").read_text()))
    except (OSError, json.JSONDecodeError):
        return False


def load_tokenizer(path: str, pad_token: str | None) -> Any:
    """Raises:
    ValueError: no tokenizer, or one without a token to pad with.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"cannot load a tokenizer of {path!r}: {error}") from error
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"pad_token {pad_token!r} is not in the vocabulary of the tokenizer")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has no pad token: give one of its own, such as --pad_token "
                         f"{tokenizer.eos_token or tokenizer.unk_token!r}; padding is never learned")  # fmt: skip
    return tokenizer


def check_plan(path: str, recipe: Recipe, training: TrainingArguments) -> nn.Module:
    """Puts every encoding of the recipe on a model without weights.

    Returns:
        That model, unpatched.

    Raises:
        ValueError: the model takes none of them, or blocks are longer than what one reads.
    """
    if recipe.evaluate and (is_sharded(training, "FSDP") or is_sharded(training, "DEEPSPEED")):
        raise ValueError("a sharded model is not measured here: give --evaluate false, and run python -m eval on the "
                         "output afterwards")  # fmt: skip
    if parallelism(training).cp_size > 1 and recipe.documents != "joined":
        raise ValueError("context parallelism knows no mask but the causal one: give documents: joined")
    config, _ = look(path)
    model = weightless_whole(config).root
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} writes no text, and has no loss of the next token to train it by: "
                         "give a causal language model, or T5")  # fmt: skip
    configured = getattr(config.get_text_config(), "max_position_embeddings", None)
    for length in recipe.lengths:
        posenc, asked = recipe.posenc_at(length), recipe.target_length or length
        reads = configured
        if posenc != models.NONE:
            reads = _put(model, posenc, recipe)
        if reads is not None and asked > reads:
            raise ValueError(f"blocks reach position {asked}, but under {posenc} the model reads {reads} tokens: give "
                             "shorter lengths, or a larger factor")  # fmt: skip
    if recipe.train == "posenc" and recipe.posenc == models.NONE:
        require_own_parameters(model)
    return model


def is_sharded(training: TrainingArguments, by: str) -> bool:
    """Whether weights are split among processes, by `FSDP` or `DEEPSPEED`, as told or as `accelerate launch` says."""
    return bool(getattr(training, by.lower())) or os.environ.get(f"ACCELERATE_USE_{by}", "false").lower() == "true"


def parallelism(training: TrainingArguments) -> ParallelismConfig:
    """How processes share the work: as told, or as `accelerate launch` says in the environment."""
    return getattr(training, "parallelism_config", None) or ParallelismConfig()


def _put(model: nn.Module, posenc: str, recipe: Recipe) -> int | None:
    """Tries an encoding; returns the tokens that the model then reads, None if the encoding leaves that open."""
    told = SimpleNamespace(model_max_length=None)  # in the place of a tokenizer
    models.full_names(model, [posenc], lengths_of(recipe)[-1:] if recipe.evaluate else [])
    with hf_posenc.patched(model, posenc, tokenizer=told):
        if recipe.train == "posenc":
            require_own_parameters(model)
        if "{length}" in recipe.posenc and len(recipe.lengths) > 1 and own_parameters(model):
            raise ValueError(f"{posenc} learns, and patching anew for each length would lose that: give one encoding "
                             "for all lengths")  # fmt: skip
        return told.model_max_length


def form_of(recipe: Recipe, model: nn.Module, tokenizer: Any) -> Form:
    """The function that makes what the model reads from a row of a block, with a source of chance.

    Raises:
        ValueError: a layout or schedule that this model cannot take.
    """
    placed = "position_ids" in inspect.signature(model.forward).parameters
    if recipe.documents == "packed" and (model.config.is_encoder_decoder or not placed):
        raise ValueError(f"{type(model).__name__} takes no positions, by which packed documents are kept apart: give "
                         "documents: single or joined")  # fmt: skip
    if recipe.schedule == "pose" and not placed:
        raise ValueError(f"{type(model).__name__} takes no positions: the schedule pose cannot skip any")
    if model.config.is_encoder_decoder:
        marks = sentinels_of(tokenizer)
        return lambda row, draw: hide_spans(row["input_ids"], marks, tokenizer.eos_token_id, draw)
    if recipe.schedule == "pose":
        return lambda row, draw: skip_positions(row, recipe.target_length, draw)
    return _masked if recipe.documents == "single" or not placed else _as_it_is


def _masked(row: Sample, draw: random.Random) -> Sample:
    ids = row["input_ids"]
    return {"input_ids": ids, "labels": row["labels"], "attention_mask": torch.ones_like(ids)}


def _as_it_is(row: Sample, draw: random.Random) -> Sample:
    return row
