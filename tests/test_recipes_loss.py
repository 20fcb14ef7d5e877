"""The chunked loss against the model's own, value and gradients, for heads of every kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from reading import Largest

import hf_posenc
from eval.memory import why_not
from recipes.chunked_loss import chunked_loss
from recipes.memory import peak

FAMILIES = ("llama", "gemma2", "cohere", "granite", "gpt2", "opt", "bloom", "qwen3", "falcon_h1", "gpt_neox")


def labelled(rows: int = 2, length: int = 17):
    ids = tiny.tokens(rows, length)
    labels = ids.clone()
    labels[0, :4], labels[1, 9:12] = -100, -100
    return {"input_ids": ids, "labels": labels}


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def assert_same(model, inputs, **chunked):
    """`chunked`: arguments of the chunked loss."""
    loss = model(**inputs).loss
    loss.backward()
    wanted = gradients(model)
    with chunked_loss(model, **chunked):
        found = model(**inputs)
        found.loss.backward()
    assert found.logits is None
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-5)
    got = gradients(model)
    assert got.keys() == wanted.keys() and any(float(one.abs().max()) > 1e-3 for one in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_loss_and_gradients_are_those_of_the_whole(family, chunk):
    model = tiny.tiny_model(family).train()
    model.config.use_cache = False
    assert_same(model, labelled(), chunk=chunk)


@pytest.mark.parametrize(
    "method", ["yarn:factor=4", "self_extend:group_size=2,window=8", "alibi", "toeplitz:max_distance=8"]
)
def test_under_a_scheme(method):
    model = hf_posenc.patch(tiny.TL().train(), method)
    assert_same(model, labelled(), chunk=5)


def test_encoder_and_decoder():
    model = tiny.tiny_model("t5", decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0).train()
    labels = labelled(2, 9)["labels"]
    assert_same(model, {"input_ids": tiny.tokens(2, 14), "labels": labels}, chunk=4)


def test_items_of_the_whole_batch_divide_the_sum():
    model, inputs = tiny.TL().train(), labelled()
    wanted = model(**inputs, num_items_in_batch=torch.tensor(100)).loss
    with chunked_loss(model, 5):
        for count in (100, torch.tensor(100)):
            torch.testing.assert_close(model(**inputs, num_items_in_batch=count).loss, wanted)


def test_the_model_is_as_before_afterwards_and_without_labels():
    model, inputs = tiny.TL(), labelled()
    wanted = model(**inputs)
    with chunked_loss(model, 5):
        assert torch.equal(model(input_ids=inputs["input_ids"]).logits, wanted.logits)
    assert "forward" not in vars(model) and torch.equal(model(**inputs).logits, wanted.logits)


def test_no_tensor_holds_the_logits_of_all_tokens():
    model = tiny.TL(vocab_size=4096, hidden_size=16)
    ids = torch.randint(3, 4096, (1, 64))
    with chunked_loss(model, 8), Largest() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    with Largest() as whole:
        model(input_ids=ids, labels=ids).loss.backward()
    assert whole.numbers >= 64 * 4096 > 16 * 4096 >= seen.numbers


def test_experts_whose_loss_would_be_left_out_are_refused():
    model = tiny.TL()
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="set it to false"), chunked_loss(model):
        pass


def test_labels_that_come_shifted_are_not_shifted_again():
    """As for a part of a row under context parallelism, whose last label stands in the next part."""
    model, inputs = tiny.TL().train(), labelled()
    shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    with chunked_loss(model, 5):
        wanted = model(**inputs).loss
        found = model(input_ids=inputs["input_ids"], labels=inputs["labels"].flip(1), shift_labels=shifted).loss
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.skipif(why_not(torch.device("cpu")) is not None, reason="memory is measured on Linux")
def test_a_step_does_not_need_the_memory_of_all_logits():
    logits = 4096 * 49152 * 4
    assert peak("chunked", 4096) < logits < 2 * logits < peak("whole", 4096)


@pytest.mark.slow
def test_a_model_in_shards_has_the_same_loss_and_gradients():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here)])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", here / "sharded.py"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "alike" in done.stdout, done.stderr[-3000:]
