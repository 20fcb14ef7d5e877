"""Recipes before any weight is trained: options, data, schedules, and what is refused."""

import dataclasses
import os
import random
from types import SimpleNamespace

import pytest
import tiny
import torch
from datasets import Dataset
from test_eval_passkey import characters
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, PreTrainedTokenizerFast, T5Config, TrainingArguments

import hf_posenc
from recipes import checks, data
from recipes.checks import check_plan, find_checkpoint, form_of, load_tokenizer
from recipes.chunked_loss import IGNORED
from recipes.data import Blocks, check_apart, collate, load_documents
from recipes.finetune import main
from recipes.schedules import Schedule, Stage, skip_positions, steps_of
from recipes.settings import HELD_OUT, Recipe, parse
from recipes.spans import hide_spans, sentinels_of
from recipes.trained import own_parameters, prepare

TEXT = ["--data", "python_topics"]


def documents(*sizes: int) -> Dataset:
    """Documents whose tokens are all different."""
    ids, start = [], 10
    for size in sizes:
        ids.append(list(range(start, start + size)))
        start += size
    return Dataset.from_dict({"input_ids": ids, "length": list(sizes)}).with_format("torch")


def config_file(folder, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


# Options


def test_yaml_is_read_numbers_as_people_write_them_and_the_command_line_wins(tmp_path):
    file = config_file(tmp_path, "data: [a.txt]\nlearning_rate: 2e-5\nlengths: [64, 128]\nschedule: mixed\n")
    recipe, training = parse(["--config", file, "--lengths", "32", "64", "--seed=7"])
    assert recipe.data == ["a.txt"] and recipe.lengths == [32, 64] and recipe.evaluate
    assert training.learning_rate == 2e-5 and training.seed == 7


@pytest.mark.parametrize(
    "key, near", [("learning_rat", "learning_rate"), ("posenk", "posenc"), ("lenghts", "lengths")]
)
def test_an_unknown_key_names_the_nearest(tmp_path, key, near):
    with pytest.raises(ValueError, match=f"'{key}' is no option .* mean '{near}'"):
        parse(["--config", config_file(tmp_path, f"{key}: 1")])
    with pytest.raises(ValueError, match=f"'{key}' is no option .* mean '{near}'"):
        parse([*TEXT, f"--{key}", "1"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give data: files"),
        (["--data", "dataset:json:data_files=x.jsonl"], "give documents_per_source"),
        ([*TEXT, "--documents_per_source", "0"], "must be 1 or more"),
        (["--data", "emma", "persuasion"], "persuasion is kept out of training"),
        (["--data", "some/northanger_abbey.txt"], "kept out of training"),
        (["--data", "emma", "--evaluate_texts", "emma"], "emma is trained on"),
        ([*TEXT, "--schedule", "curiculum"], "did you mean 'curriculum'"),
        ([*TEXT, "--train", "lorra"], "did you mean 'lora'"),
        ([*TEXT, "--schedule", "mixed"], "takes several lengths"),
        ([*TEXT, "--lengths", "64", "128"], "plain takes one length"),
        ([*TEXT, "--lengths", "1"], "2 tokens or more"),
        ([*TEXT, "--lengths", "64", "--shares", "0.5", "0.5"], "one for each"),
        ([*TEXT, "--target_length", "512"], "belong together"),
        ([*TEXT, "--schedule", "pose", "--documents", "single"], "belong together"),
        ([*TEXT, "--schedule", "pose", "--target_length", "4096"], "give documents: single"),
        ([*TEXT, "--schedule", "mixed", "--lengths", "64", "128", "--posenc", "yarn:target_length={length}"], "mixed"),
        ([*TEXT, "--train_sampling_strategy", "random"], "leave out train_sampling_strategy"),
        ([*TEXT, "--config", "nowhere.yaml"], "no configuration nowhere.yaml"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(arguments)


def test_texts_for_evaluation_are_the_default_and_held_out():
    assert set(Recipe(data=["emma"]).evaluate_texts) <= set(HELD_OUT)


# Data


@pytest.mark.parametrize("layout", ["packed", "single", "joined"])
@pytest.mark.parametrize("sizes", [(5, 17, 8, 3, 3, 1, 16), (2,), (8, 8), (40,)])
def test_every_token_stands_once_in_blocks_that_are_not_too_long(layout, sizes):
    blocks = Blocks(documents(*sizes), 8, layout)
    rows = [blocks[index] for index in range(len(blocks))]
    tokens = torch.cat([row["input_ids"] for row in rows])
    assert sorted(tokens.tolist()) == list(range(10, 10 + sum(sizes)))
    assert all(0 < len(row["input_ids"]) <= 8 for row in rows)
    if layout != "single":
        assert len(rows) <= -(-sum(sizes) // 8) + 1
    for row in rows:
        assert torch.equal(row["labels"] == IGNORED, row["position_ids"] == 0)
        kept = row["labels"] != IGNORED
        assert torch.equal(row["labels"][kept], row["input_ids"][kept])


def test_packed_documents_start_at_zero_and_joined_ones_do_not():
    sizes = (3, 4, 6)
    packed, joined = (Blocks(documents(*sizes), 8, layout) for layout in ("packed", "joined"))
    starts = {10, 13, 17}
    for row in [packed[index] for index in range(len(packed))]:
        zero = row["position_ids"] == 0
        assert set(row["input_ids"][zero].tolist()) <= starts
        assert torch.equal(row["position_ids"].diff() != 1, zero[1:])
    assert joined[0]["position_ids"].tolist() == list(range(8)) and len(joined) == 2


def test_long_documents_fill_whole_blocks():
    assert Blocks(documents(20, 3), 8, "packed").whole == 16 / 23
    assert [len(row) for row in Blocks(documents(20, 3), 8, "packed").rows] == [1, 1, 2]


def test_padding_is_masked_or_a_document_of_its_own():
    blocks = Blocks(documents(6, 3), 8, "single")
    rows = [blocks[0], blocks[1]]
    batch = collate(rows, pad_id=1)
    assert batch["input_ids"][1].tolist() == [16, 17, 18, 1, 1, 1]
    assert batch["labels"][1, 3:].tolist() == [IGNORED] * 3
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 0, 1, 2]
    masked = [{"input_ids": row["input_ids"], "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    assert collate(masked, pad_id=1)["attention_mask"].tolist() == [[1] * 6, [1] * 3 + [0] * 3]


@pytest.mark.parametrize(
    "method",
    [None, "yarn:factor=4", "self_extend:group_size=2,window=4", "alibi", "dynamic_ntk:granularity=1",
     "learned:max_positions=64", "irope:interval=2"],
)  # fmt: skip
def test_packed_documents_and_padding_change_nothing(method):
    """Losses of every document in a padded batch of packed rows are those it has alone."""
    model = tiny.TL(max_position_embeddings=8)
    if method:
        hf_posenc.patch(model, method)
    check_apart(model)
    found = documents(20, 7, 5, 3, 4)
    blocks = Blocks(found, 16, "packed")
    batch = collate([blocks[index] for index in range(len(blocks))], pad_id=0)
    assert len(blocks) == 3 and (batch["labels"] != IGNORED).sum() == 39 - 6
    with torch.no_grad():
        total = model(**batch, num_items_in_batch=1, use_cache=False).loss
        pieces = [found[i]["input_ids"][start : start + 16] for i in range(5) for start in (0, 16)]
        alone = sum(
            model(input_ids=piece[None], labels=piece[None], num_items_in_batch=1, use_cache=False).loss
            for piece in pieces if len(piece) > 1
        )  # fmt: skip
    torch.testing.assert_close(total, alone, rtol=1e-5, atol=1e-4)


def test_a_model_that_sees_across_is_found_out():
    class Across(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny.TL()

        def forward(self, input_ids, position_ids, use_cache):
            return self.inner(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids)

    with pytest.raises(ValueError, match="give documents: single"):
        check_apart(Across())


def loaded(*sources, **more) -> list[str]:
    """Documents of a recipe's data, as text."""
    tokenizer = characters()
    found = load_documents(Recipe(data=[str(source) for source in sources], evaluate=False, **more), tokenizer)
    texts = [tokenizer.decode(row["input_ids"]) for row in found]
    assert [int(row["length"]) for row in found] == [len(row["input_ids"]) for row in found]
    assert all(text.endswith("</s>") for text in texts)
    return [text.removesuffix("</s>") for text in texts]


def test_texts_files_folders_and_data_sets_are_documents_with_an_end(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, text in (("b.txt", "second"), ("a.md", "first"), ("c.json", "no text")):
        (tmp_path / "folder" / name).write_text(text)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "third"}\n{"body": " "}\n{"body": "fourth"}\n{"body": "fifth"}\n')
    Dataset.from_dict({"text": ["sixth"]}).save_to_disk(tmp_path / "saved")
    named = f"dataset:json:data_files={lines},column=body"
    assert loaded(tmp_path / "folder") == ["first", "second"]
    assert loaded(tmp_path / "folder", tmp_path / "folder" / "a.md", documents_per_source=1) == ["first", "first"]
    assert loaded(named, f"dataset:{tmp_path / 'saved'}", documents_per_source=3) == ["third", "fourth", "sixth"]
    assert len(loaded("python_docs", documents_per_source=2)) == 2
    for source, message in (
        (f"dataset:json:data_files={lines}", "no text in column 'text'; its columns: body"),
        ("dataset:json:colum=x", "not colum"),
        (tmp_path / "none", "neither a file, nor"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded(source, documents_per_source=9)
    lines.write_text('{"body": " \\n"}')
    with pytest.raises(ValueError, match="the data set is empty"):
        loaded(named, documents_per_source=9)


def test_an_edited_file_is_read_anew(tmp_path):
    file = tmp_path / "a.txt"
    for text in ("first", "other"):
        file.write_text(text)
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        assert loaded(file) == loaded(file) == loaded(tmp_path) == [text]


def test_what_is_evaluated_on_is_kept_out_of_training_wherever_it_stands(tmp_path):
    (tmp_path / "held.txt").write_text("the text to evaluate on")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "copy.txt").write_text("the text to evaluate on")
    recipe = Recipe(data=[str(tmp_path / "folder")], evaluate_texts=[str(tmp_path / "held.txt")])
    with pytest.raises(ValueError, match=r"copy\.txt is kept out of training.*take it out of"):
        load_documents(recipe, characters())
    (tmp_path / "folder" / "copy.txt").write_text("another text")
    assert len(load_documents(recipe, characters())) == 1
    (tmp_path / "folder" / "persuasion.txt").write_text("a text of that name")
    with pytest.raises(ValueError, match=r"persuasion\.txt is kept out of training"):
        load_documents(recipe, characters())


# T5's task


def test_hidden_spans_and_what_is_read_make_the_text():
    marks = list(range(5000, 5010))
    for number, length in enumerate([2, 3, 20, 100, 1000]):
        text = torch.arange(5, 5 + length)
        row = hide_spans(text, marks, 1, random.Random(number))
        read, written = row["input_ids"].tolist(), row["labels"].tolist()
        assert written[-1] == 1 and written[-2] in marks
        spans, current = {}, None
        for token in written[:-1]:
            current = token if token in marks else current
            spans.setdefault(current, []).extend([] if token in marks else [token])
        whole = [one for token in read for one in (spans[token] if token in marks else [token])]
        assert whole == text.tolist() and all(spans[mark] for mark in read if mark in marks)
        hidden = sum(len(span) for span in spans.values())
        assert hidden == min(max(1, round(length * 0.15)), length - 1)
    assert sum(mark in marks for mark in read) == 9


def test_sentinels_are_looked_for():
    vocabulary = {"<extra_id_1>": 4, "a": 0, "<extra_id_0>": 7, "<extra_id_3>": 5}
    assert sentinels_of(SimpleNamespace(get_vocab=lambda: vocabulary)) == [7, 4]
    with pytest.raises(ValueError, match="no sentinels"):
        sentinels_of(characters())


# Schedules


def schedule(*stages: tuple[int, int], per_step: int = 4, seed: int = 0, mixed: bool = False) -> Schedule:
    """Stages of (length, steps) over 10 documents of 8 tokens."""
    found = documents(*[8] * 10)
    parts = [Stage(Blocks(found, length, "packed"), f"at {length}", steps) for length, steps in stages]
    return Schedule(parts, per_step, lambda row, draw: {**row, "draw": draw.random()}, seed, mixed)


def test_a_stage_reads_all_its_blocks_before_it_reads_one_again():
    run = schedule((8, 5))
    firsts = [int(run[number]["input_ids"][0]) for number in range(len(run))]
    assert len(run) == 20 and sorted(firsts[:10]) == sorted(firsts[10:]) == list(range(10, 90, 8))
    assert firsts[:10] not in (firsts[10:], sorted(firsts[:10]))
    assert firsts == [int(schedule((8, 5))[number]["input_ids"][0]) for number in range(20)]
    assert firsts != [int(schedule((8, 5), seed=1)[number]["input_ids"][0]) for number in range(20)]


def test_chance_depends_on_the_number_of_a_sample_alone():
    run, again = schedule((8, 5)), schedule((8, 5))
    drawn = [again[number]["draw"] for number in reversed(range(20))][::-1]
    assert [run[number]["draw"] for number in range(20)] == drawn and len(set(drawn)) == 20


def test_lengths_follow_one_another_or_are_mixed_step_by_step():
    stages = [(4, 2), (8, 6)]
    assert [schedule(*stages).at(step).blocks.length for step in range(8)] == [4] * 2 + [8] * 6
    run = schedule(*stages, mixed=True)
    lengths = [run.at(step).blocks.length for step in range(8)]
    assert sorted(lengths) == [4] * 2 + [8] * 6 != lengths
    for step, length in enumerate(lengths):
        assert {len(run[4 * step + row]["input_ids"]) for row in range(4)} == {length}


def test_steps_follow_shares():
    assert steps_of([100, 30], [1, 1], 8, 3, max_steps=11) in ([5, 6], [6, 5])
    assert steps_of([100, 30], [3, 1], 8, 3, max_steps=100) == [75, 25]
    assert steps_of([100], [1.0], 8, 2, max_steps=-1) == [25]
    assert steps_of([100, 30], [1, 1], 8, 1, max_steps=-1) == [7, 2]
    with pytest.raises(ValueError, match="without a step"):
        steps_of([100, 30], [99, 1], 8, 3, max_steps=3)


def test_pose_skips_once_and_covers_the_target():
    row, draw = {"input_ids": torch.zeros(16, dtype=torch.long)}, random.Random(0)
    drawn = [skip_positions(row, 128, draw) for _ in range(4000)]
    positions = torch.stack([one["position_ids"] for one in drawn])
    steps = positions.diff(dim=1)
    assert (positions[:, 0] == 0).all() and ((steps != 1).sum(1) <= 1).all() and (steps >= 1).all()
    assert positions.max() == 127 and set(positions.flatten().tolist()) == set(range(128))
    skips = positions[:, -1] - 15
    assert abs(float(skips.double().mean()) - 56) < 2 and skips.min() == 0
    cuts = (steps != 1).long().argmax(1)[skips > 0] + 1
    assert abs(float(cuts.double().mean()) - 8) < 0.5 and {int(cuts.min()), int(cuts.max())} == {1, 15}
    assert all(one["attention_mask"].all() for one in drawn)


def test_skipped_positions_do_not_part_a_row():
    """transformers takes a gap in positions for another document unless it is given a mask."""
    model = tiny.TL()
    row = skip_positions({"input_ids": tiny.tokens(1, 16)[0]}, 64, random.Random(1))
    batch = collate([row], 0)
    assert (batch["position_ids"].diff() > 1).any()
    with torch.no_grad():
        wanted = model(**batch).logits
        batch["input_ids"][0, 0] = (batch["input_ids"][0, 0] + 1) % 100
        assert (model(**batch).logits - wanted)[0, -1].abs().max() > 1e-4


# What is refused before weights are loaded


def folder_of(config, path, tokenizer=None) -> str:
    config.architectures = [{"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel",
                             "t5": "T5ForConditionalGeneration"}[config.model_type]]  # fmt: skip
    config.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return str(path)


def small_llama() -> LlamaConfig:
    return LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip


def checked(tmp_path, config, *arguments: str):
    recipe, training = parse([*TEXT, "--output_dir", str(tmp_path / "out"), *arguments])
    path = folder_of(config, tmp_path / "model")
    return recipe, check_plan(path, recipe, training)


def test_blocks_longer_than_planned_are_refused(tmp_path):
    with pytest.raises(ValueError, match="reach position 512, but under yarn:factor=4 the model reads 256"):
        checked(tmp_path, small_llama(), "--posenc", "yarn:factor=4", "--lengths", "512")
    with pytest.raises(ValueError, match="reach position 128, but under none the model reads 64"):
        checked(tmp_path, small_llama(), "--lengths", "128")
    with pytest.raises(ValueError, match="reach position 1024"):
        checked(tmp_path, small_llama(), "--posenc", "yarn:factor=4", "--lengths", "64", "--schedule", "pose",
                "--documents", "single", "--target_length", "1024")  # fmt: skip
    for posenc in ("yarn:target_length={length}", "abf:rope_theta=100000", "rerope:window=32", "nope"):
        checked(tmp_path, small_llama(), "--posenc", posenc, "--lengths", "256")


def test_encodings_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match="yarm"):
        checked(tmp_path, small_llama(), "--posenc", "yarm:factor=4")
    with pytest.raises(ValueError, match="learns nothing"):
        checked(tmp_path, small_llama(), "--posenc", "yarn:factor=64", "--train", "posenc")
    with pytest.raises(ValueError, match="would lose that"):
        checked(tmp_path, small_llama(), "--posenc", "learned:max_positions={length}", "--schedule", "curriculum",
                "--lengths", "64", "128")  # fmt: skip


def test_models_without_positions_to_give_are_read_one_document_at_a_time(tmp_path):
    t5 = T5Config(vocab_size=300, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    recipe, model = checked(tmp_path, t5)
    with pytest.raises(ValueError, match="give documents: single"):
        form_of(recipe, model, characters())
    recipe.documents = "single"
    with pytest.raises(ValueError, match="no sentinels"):
        form_of(recipe, model, characters())


def test_a_tokenizer_without_padding_is_refused_until_given_a_token(tmp_path):
    path = folder_of(small_llama(), tmp_path, characters())
    with pytest.raises(ValueError, match=r"no pad token: .* --pad_token '</s>'"):
        load_tokenizer(path, None)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        load_tokenizer(path, "<pad>")
    tokenizer = load_tokenizer(path, "</s>")
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.pad_token_id == tokenizer.eos_token_id


def test_the_last_whole_checkpoint_is_found(tmp_path):
    def training(resume=None):
        return SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=resume)

    assert find_checkpoint(training()) is find_checkpoint(training("auto")) is None
    for step, state in ((9, "{}"), (20, '{"global_step": 20}'), (100, '{"global_step": 100}'), (110, '{"glob')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-120").mkdir()
    assert find_checkpoint(training("auto")) == str(tmp_path / "checkpoint-100")
    assert find_checkpoint(training(str(tmp_path / "checkpoint-20"))) == str(tmp_path / "checkpoint-20")
    with pytest.raises(ValueError, match="no whole checkpoint"):
        find_checkpoint(training("elsewhere"))
    with pytest.raises(ValueError, match="--resume_from_checkpoint auto"):
        find_checkpoint(training())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lenghts", "64"], "'lenghts' is no option of a recipe; did you mean 'lengths'?"),
        (["--data", "EMPTY"], "the data set is empty"),
        (["--lengths", "512"], "blocks reach position 512"),
        (["--pad_token", "NONE"], "no pad token"),
        (["--documents", "single", "--schedule", "pose", "--target_length", "300"], "reach position 300"),
        (["--posenc", "yarn:factr=4"], "factr"),
        (["--evaluate", "true", "--evaluate_lengths", "900"], "gives 600 tokens to evaluate on"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_before_weights_are_loaded(tmp_path, monkeypatch, capsys, arguments, message):
    def load(*given):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("eval.models.load", load)
    tokenizer = characters()
    path = folder_of(small_llama(), tmp_path / "model", tokenizer)
    (tmp_path / "empty.txt").write_text("")
    for name in ("text.txt", "held.txt"):
        (tmp_path / name).write_text("a b c " * 100)
    given = [str(tmp_path / "empty.txt") if word == "EMPTY" else word for word in arguments]
    given = ["--pad_token", "</s>", *given] if "NONE" not in given else given[2:]
    with pytest.raises(SystemExit, match="2"):
        main(["--model", path, "--data", str(tmp_path / "text.txt"), "--posenc", "yarn:factor=4", "--lengths", "64",
              "--output_dir", str(tmp_path / "out"), "--use_cpu", "true", "--evaluate", "false",
              "--evaluate_texts", str(tmp_path / "held.txt"), *given])  # fmt: skip
    assert message in capsys.readouterr().out.replace("\n", " ")


# What is trained


def trainable(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_adapters_come_with_norms_and_embeddings():
    model = prepare(tiny.TL(), Recipe(data=["emma"]), wide=False)
    kinds = [name.split("default")[0].rstrip(".").split("model.model.")[-1] for name in trainable(model)]
    assert any("embed_tokens" in kind for kind in kinds) and any("input_layernorm" in kind for kind in kinds)
    assert "model.norm.modules_to_save" in kinds and any("down_proj.lora_A" in kind for kind in kinds)
    assert not any("lm_head" in kind for kind in kinds)


def test_everything_or_the_encoding_alone():
    whole = prepare(tiny.TL(), Recipe(data=["emma"], train="full"), wide=False)
    assert trainable(whole) == {name for name, _ in whole.named_parameters()}
    for model, method, part in (
        (tiny.TL(), "toeplitz:max_distance=8", "posenc"),
        (tiny.TL(), "learned:max_positions=128", "posenc"),
        (tiny.tiny_model("t5"), "t5_bias:max_distance=512", "relative_attention_bias"),
        (tiny.tiny_model("gpt2"), "learned:max_positions=128", "wpe"),
    ):
        hf_posenc.patch(model, method)
        prepare(model, Recipe(data=["emma"], train="posenc"), wide=False)
        assert trainable(model) == set(own_parameters(model))
        assert trainable(model) and all(part in name.split(".") for name in trainable(model))


def test_what_is_trained_is_float32_under_autocast():
    model = prepare(tiny.TL().bfloat16(), Recipe(data=["emma"]), wide=True)
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.float32 if weight.requires_grad else torch.bfloat16), name


def test_a_rest_of_one_token_joins_the_piece_before():
    for size in (1, 2, 32, 33, 34, 65, 97):
        rows = data._cut([size], 32)
        pieces = [piece for row in rows for piece in row]
        assert [token for piece in pieces for token in range(piece.start, piece.stop)] == list(range(size))
        assert all(1 < len(piece) <= 32 for piece in pieces) or size == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "emma"}, "data should be"),
        ({"lengths": 64}, "lengths should be"),
        ({"lengths": [64.5]}, "lengths should be"),
        ({"lora_rank": None}, "lora_rank should be int"),
        ({"posenc": None}, "posenc should be str"),
        ({"lora_rank": 0}, "lora_rank 0 must be 1"),
        ({"chunk": -3}, "chunk -3 must be 0"),
        ({"dtype": "float17"}, "dtype is one of"),
        ({"evaluate_lengths": [1]}, "2 tokens or more"),
    ],
)
def test_values_of_a_wrong_kind_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**{"data": ["emma"], **options})


def test_a_text_kept_out_is_known_again_in_other_white_space():
    kept = "".join(f"Sentence number {index} of a book. " for index in range(100))
    assert data._holds(kept.replace(". ", ".\r\n") + "more", [kept])
    assert not data._holds("Another text. " * 400, [kept]) and not data._holds(kept, [])


def test_what_is_in_the_way_is_said(tmp_path):
    recipe = Recipe(data=["emma"])
    training = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    checks.check_same(recipe, training, resumed=False)
    checks.check_same(dataclasses.replace(recipe, evaluate=False), training, resumed=True)
    training.seed = 7
    with pytest.raises(ValueError, match=r"lora_alpha \(16, now 64\), seed \('42', now '7'\)"):
        checks.check_same(dataclasses.replace(recipe, lora_alpha=64), training, resumed=True)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds a model already"):
        checks.find_checkpoint(training)


def test_a_model_that_writes_no_text_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(tmp_path)
    training = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="writes no text"):
        check_plan(str(tmp_path), Recipe(data=["emma"]), training)
