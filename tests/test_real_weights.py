"""SmolLM2-135M beyond its 8192 tokens: the smallest run on real weights that can fail for the right reasons."""

from pydoc_data.topics import topics

import pytest
import torch

import hf_posenc
from eval import data, models
from eval.likelihood import token_losses

LENGTH = 16_384
EXTENDED, CLIPPED = "self_extend:group_size=4,window=2048", "rerope:window=4096"
METHODS = ("pi:factor=2", "yarn:factor=2", "dynamic_yarn", EXTENDED, CLIPPED)


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = data.smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, models.quickest_dtype("cpu"))).eval()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return model, torch.tensor([AutoTokenizer.from_pretrained(folder)(text).input_ids[:LENGTH]])


@pytest.mark.slow
def test_methods_without_training_read_on_where_the_unpatched_model_falls_apart(smollm2):
    model, ids = smollm2
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        losses = {"none": token_losses(model, ids)[0]}
        for method in METHODS:
            with hf_posenc.patched(model, method):
                losses[method] = token_losses(model, ids)[0]
    finally:
        torch.set_num_threads(threads)
    within = {name: loss[:8191].mean().item() for name, loss in losses.items()}
    beyond = {name: loss[-2048:].mean().item() for name, loss in losses.items()}
    for method in METHODS[1:]:
        assert beyond["none"] > beyond[method] + 2
        assert beyond["pi:factor=2"] > beyond[method] + 0.5  # it wants training
        assert within["pi:factor=2"] > within[method] + 0.5
    assert within["yarn:factor=2"] - within["none"] < 0.05
    assert abs(within["dynamic_yarn"] - within["none"]) < 0.01
    for method in (EXTENDED, CLIPPED):
        assert abs(within[method] - within["none"]) < 0.02
