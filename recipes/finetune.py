"""Fine-tune a model under another positional encoding.

    accelerate launch recipes/finetune.py --config recipes/configs/yarn_lora.yaml
    accelerate launch --config_file recipes/launch/ddp.yaml recipes/finetune.py \\
        --config recipes/configs/yarn_lora.yaml --model Qwen/Qwen3-0.6B --output_dir out

Options are those of `recipes/settings.py` and all of transformers' TrainingArguments. A run that was killed goes on
with `--resume_from_checkpoint auto`. Load the result with `hf_posenc.from_pretrained(output_dir)`.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hf_posenc
from eval import data as texts
from eval import models
from eval.commands import console
from recipes import card, evaluation
from recipes.checks import check_plan, check_same, find_checkpoint, form_of, is_sharded, load_tokenizer, parallelism
from recipes.chunked_loss import chunked_loss
from recipes.data import Blocks, check_apart, collate, load_documents
from recipes.schedules import Repatch, Schedule, Stage, steps_of
from recipes.settings import Recipe, parse
from recipes.trained import prepare, reads


def main(arguments: Sequence[str]) -> None:
    """Runs a recipe; wrong input is one line that says what to do, not a traceback."""
    try:
        recipe, training = parse(arguments)
        finetune(recipe, training)
    except ValueError as error:
        console.print("[red]Error:[/]", escape(str(error)), soft_wrap=True)
        sys.exit(2)


def finetune(recipe: Recipe, training: TrainingArguments) -> nn.Module:
    """Checks everything that needs no weights, then loads, patches, trains, measures and saves.

    Returns:
        The trained model, patched, in its PEFT wrapper if it has one.

    Raises:
        ValueError: options that do not fit each other, the model or the data.
    """
    set_seed(training.seed)
    checkpoint = find_checkpoint(training)
    check_same(recipe, training, checkpoint is not None)
    path = str(texts.smollm2()) if recipe.model == "smollm2" else recipe.model
    tokenizer = load_tokenizer(path, recipe.pad_token)
    skeleton = check_plan(path, recipe, training)
    form = form_of(recipe, skeleton, tokenizer)
    spans = skeleton.config.is_encoder_decoder
    held_out = evaluation.held_out(recipe, tokenizer, spans) if recipe.evaluate else {}
    with training.main_process_first():
        documents = load_documents(recipe, tokenizer)
    schedule = plan(recipe, training, documents, form)
    if training.should_log:
        describe(schedule)

    model, _ = models.load(path, recipe.dtype, "cpu", causal=False)
    trained = models.trained_length(model)
    measured = evaluation.Measured(training.output_dir, resumed=checkpoint is not None)
    measure = functools.partial(measure_if_main, measured, tokenizer, recipe, training, held_out)
    if reads(model, evaluation.lengths_of(recipe)[-1]):
        measure(evaluation.BEFORE, model)
    elif training.should_log:
        console.print("unpatched, the model has no position for so long a text, and is not measured")
    last, first = recipe.posenc_at(recipe.lengths[-1]), schedule.at(0).posenc
    if last != models.NONE:
        hf_posenc.patch(model, last, tokenizer=tokenizer)
        measure(f"before, {hf_posenc.current(model)}", model)
        if first != last:
            hf_posenc.patch(model, first)
    partitioned = is_sharded(training, "DEEPSPEED")  # from loading on: no weight is whole
    if recipe.documents == "packed" and not partitioned:
        check_apart(model)
    model = prepare(model, recipe, wide=(training.bf16 or training.fp16) and not partitioned)
    whole_parts = 2 * parallelism(training).cp_size if parallelism(training).cp_size > 1 else 1
    batches = functools.partial(collate, pad_id=tokenizer.pad_token_id, multiple=whole_parts)
    trainer = Trainer(
        model, training, batches, schedule, processing_class=tokenizer, callbacks=[Repatch(schedule, first)]
    )
    if recipe.chunk == 0:
        trainer.train(checkpoint)
    else:
        with chunked_loss(model, recipe.chunk):
            trainer.train(checkpoint)
            trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trainer.save_model()
    trainer.save_state()
    measure(evaluation.AFTER, model)
    if training.process_index == 0:
        if recipe.evaluate:
            measured.show(trained, spans)
        table = list(measured.lines(trained, spans)) if recipe.evaluate else []
        card.write(recipe, training, schedule, model, trained, table)
        console.print(f"Saved in {training.output_dir}", soft_wrap=True, markup=False)
    return model


def plan(recipe: Recipe, training: TrainingArguments, documents: Any, form: Any) -> Schedule:
    """The samples of all steps; sets `max_steps`."""
    copies = training.world_size // parallelism(training).non_data_parallel_size
    per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * copies
    blocks = [Blocks(documents, length, recipe.documents) for length in recipe.lengths]
    shares = recipe.shares or [1.0] * len(blocks)
    steps = steps_of([len(one) for one in blocks], shares, per_step, training.num_train_epochs, training.max_steps)
    stages = [Stage(one, recipe.posenc_at(one.length), count) for one, count in zip(blocks, steps, strict=True)]
    training.max_steps = sum(steps)
    return Schedule(stages, per_step, form, training.seed, mixed=recipe.schedule == "mixed")


def describe(schedule: Schedule) -> None:
    """Prints what will be read."""
    for stage in schedule.stages:
        blocks = stage.blocks
        console.print(
            f"{stage.steps} steps of {schedule.per_step} blocks of {blocks.length:,} tokens under {stage.posenc}; the "
            f"data has {len(blocks):,}, and {blocks.whole:.0%} of its tokens in texts as long as a block",
            soft_wrap=True,
        )


def measure_if_main(measured: evaluation.Measured, tokenizer: Any, recipe: Recipe, training: TrainingArguments,
                    held_out: dict[str, torch.Tensor], name: str, model: nn.Module) -> None:  # fmt: skip
    """Measures on the main process, once for all resumed runs; the others wait."""
    if recipe.evaluate and training.process_index == 0 and (name == evaluation.AFTER or name not in measured.rows):
        dtype = torch.float16 if training.fp16 else torch.bfloat16
        with torch.autocast(training.device.type, dtype, enabled=training.fp16 or training.bf16):
            measured.add(name, evaluation.measure(model.to(training.device), tokenizer, recipe, held_out))
    training.distributed_state.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1:])
