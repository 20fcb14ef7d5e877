"""PoSE as a recipe: a small model trained at 128 tokens, tuned in blocks of 128, reads 1,024."""

import copy

import pytest
import torch
from test_training import HELD_OUT, TEXT, TRAINED, trained
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import hf_posenc
from recipes.finetune import finetune
from recipes.settings import parse

pytestmark = pytest.mark.slow
READ, SCORED = 1024, 64


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, its value."""
    letters = bytes_to_unicode()
    backend = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=letters[0], pad_token=letters[0])


@torch.no_grad()
def loss(model, length: int) -> float:
    """Mean loss of the same held-out bytes, each read behind `length` − 64 others or more."""
    rows = TEXT[-HELD_OUT:][: HELD_OUT // READ * READ].view(-1, READ)[:, -length:]
    found = torch.cat([model.eval()(part).logits[:, -SCORED - 1 : -1] for part in rows.split(8)])
    return float(torch.nn.functional.cross_entropy(found.mT, rows[:, -SCORED:]))


def test_blocks_of_128_teach_1024(tmp_path):
    base = trained(None)
    base.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_bytes(bytes(TEXT[:-HELD_OUT].tolist()).decode(errors="ignore").encode())
    tuned = {}
    for schedule, more in (("plain", []), ("pose", ["--target_length", str(READ)])):
        recipe, training = parse([
            "--model", str(tmp_path / "base"), "--data", str(tmp_path / "text.txt"), "--posenc", "pi:factor=8",
            "--train", "full", "--schedule", schedule, *more, "--documents", "single", "--lengths", str(TRAINED),
            "--max_steps", "150", "--per_device_train_batch_size", "16", "--learning_rate", "1e-3", "--save_strategy",
            "no", "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--evaluate", "false",
            "--output_dir", str(tmp_path / schedule),
        ])  # fmt: skip
        tuned[schedule] = finetune(recipe, training)
    untuned = hf_posenc.patch(copy.deepcopy(base), "pi:factor=8")
    short = loss(base, TRAINED)
    assert loss(base, READ) > short + 0.8 and loss(untuned, READ) > short + 0.8
    assert loss(tuned["pose"], READ) < short + 0.4 < loss(tuned["plain"], READ)
    assert loss(tuned["pose"], TRAINED) < short + 0.2
