"""The model card of an output folder, in place of PEFT's: what was trained, how, what changed, how to load it."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import datasets
import peft
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import TrainingArguments

import hf_posenc
from eval import models
from eval.data import is_dataset
from eval.rows import parse
from recipes.evaluation import as_markdown, lengths_of
from recipes.schedules import Schedule
from recipes.settings import RENAMED, Recipe

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what `smollm2` is on the hub
HYPERPARAMETERS = ("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "adam_beta1", "adam_beta2",
                   "weight_decay", "max_grad_norm", "seed", "bf16", "fp16",
                   RENAMED.get("gradient_checkpointing", "gradient_checkpointing"))  # fmt: skip


def write(recipe: Recipe, training: TrainingArguments, schedule: Schedule, model: nn.Module, trained: int | None,
          table: Sequence[Sequence[str]]) -> None:  # fmt: skip
    """Writes `README.md`.

    Args:
        model: after training.
        trained: tokens of its context before.
        table: of `evaluation.Measured`, or empty.
    """
    method = hf_posenc.current(model)
    sections = {
        "How to load": _loading(recipe, training.output_dir, method),
        "Positional encoding": _encoding(recipe, method, trained),
        "Data": _data(recipe, schedule),
        "Training": _training(recipe, training, schedule),
        "Before and after": _results(recipe, table),
        "Versions": _items(_versions()),
    }
    title = f"# {_base(recipe)}, tuned under `{method or 'its own positions'}`"
    body = "\n\n".join([title, *(f"## {name}\n\n{text}" for name, text in sections.items())])
    card = ModelCard(f"---\n{_metadata(recipe, model, method).to_yaml()}\n---\n\n{body}\n")
    card.save(Path(training.output_dir, "README.md"))


def _metadata(recipe: Recipe, model: nn.Module, method: Any) -> ModelCardData:
    both = model.config.is_encoder_decoder
    return ModelCardData(
        base_model=_base(recipe),
        library_name="peft" if recipe.train == "lora" else "transformers",
        pipeline_tag=None if both else "text-generation",
        tags=["hf_posenc", *([method.name] if method else []), *(["lora"] if recipe.train == "lora" else [])],
        datasets=[parse(source).name for source in recipe.data if _is_on_hub(source)] or None,
    )


def _base(recipe: Recipe) -> str:
    return SMOLLM2 if recipe.model == "smollm2" else recipe.model


def _is_on_hub(source: str) -> bool:
    """Whether a source is a data set of somebody: `owner/name`, and no folder."""
    return is_dataset(source) and "/" in parse(source).name and not Path(parse(source).name).exists()


def _loading(recipe: Recipe, folder: str, method: Any) -> str:
    lines = ["```python", "import hf_posenc", "", f'model = hf_posenc.from_pretrained("{folder}")', "```"]
    if recipe.train == "lora":
        lines += ["", f"This is an adapter of `{_base(recipe)}`. PEFT alone loads it without the encoding, and warns. "
                  f"`python recipes/merge.py {folder} OUT` makes a whole model of it."]  # fmt: skip
    return "\n".join(lines)


def _encoding(recipe: Recipe, method: Any, trained: int | None) -> str:
    before = "open" if trained is None else f"{trained:,} tokens"
    after = f"{recipe.longest:,} tokens"
    if recipe.target_length:
        after += f" (positions up to there, in blocks of {recipe.lengths[0]:,} tokens)"
    parameters = {"with all parameters": f"`{method!r}`"} if method else {}
    return _items({"method": f"`{method or models.NONE}`", **parameters, "trained length before": before,
                   "read in this training": after})  # fmt: skip


def _data(recipe: Recipe, schedule: Schedule) -> str:
    documents = schedule.stages[0].blocks.documents
    return _items({
        "sources": ", ".join(f"`{source}`" for source in recipe.data),
        "documents": f"{len(documents):,}, of {sum(documents['length']):,} tokens",
        "documents in blocks": recipe.documents,
        "tokens read": f"{schedule.count_tokens():,}",
    })  # fmt: skip


def _training(recipe: Recipe, training: TrainingArguments, schedule: Schedule) -> str:
    steps = (f"{stage.steps:,} of {schedule.per_step} blocks of {stage.blocks.length:,} tokens under `{stage.posenc}`"
             for stage in schedule.stages)  # fmt: skip
    trained = {"train": recipe.train, "schedule": recipe.schedule, "steps": "; ".join(steps)}
    if recipe.train == "lora":
        targets = ", ".join(recipe.lora_targets)
        trained["adapters"] = f"rank {recipe.lora_rank}, alpha {recipe.lora_alpha}, {targets}; norms and embeddings"
    values = {name: getattr(training, name) for name in HYPERPARAMETERS}
    return _items(trained | {name: getattr(value, "value", value) for name, value in values.items()})


def _results(recipe: Recipe, table: Sequence[Sequence[str]]) -> str:
    if not table:
        return "Not measured."
    said = (f"{', '.join(recipe.evaluate_texts)}, read once up to {lengths_of(recipe)[-1]:,} tokens, in nats per "
            "token; behind a loss its difference to the model before training under the same encoding, with the 95 % "
            "interval of a paired bootstrap.")  # fmt: skip
    return f"{said}\n\n{as_markdown(table)}"


def _versions() -> dict[str, str]:
    modules = (hf_posenc, transformers, peft, accelerate, datasets, torch)
    return {"Python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}


def _items(values: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())
