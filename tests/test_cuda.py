"""On an accelerator: the kernels that only it has, and whole models against the CPU."""

import pytest
import torch
from tiny import TL, tiny_model, tokens
from torch.testing import assert_close

import hf_posenc
from hf_posenc import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, "causal", "numbers"])
def test_fused_kernels_equal_plain_ones(mask, dtype):
    make = {"dtype": dtype, "device": "cuda"}
    query, grad = (torch.randn(2, 3, 2 * 70, 64, **make) for _ in range(2))
    key, value = (torch.randn(2, 3, 70, 64, **make) for _ in range(2))
    hidden = torch.ones(70, 70, device="cuda").triu(1).bool().repeat(2, 1)
    numbers = torch.zeros(1, 1, 140, 70, **make).masked_fill_(hidden, torch.finfo(dtype).min / 2)
    given = (0.125, numbers if mask == "numbers" else mask, 2)
    output, total = kernels.plain(query, key, value, 0.125, numbers if mask else None)
    noise = {"atol": 1e-4 if dtype == torch.float32 else 3e-2, "rtol": 1e-2}
    (found,) = kernels.attend(query, key, value, *given)
    for one, other in zip(found, (output, total), strict=True):
        assert_close(one, other, check_dtype=False, **noise)
    fused = kernels.attend_backward(grad, query, key, value, output, total, *given)
    plain = kernels.plain_backward(grad, query, key, value, output, total, 0.125, numbers if mask else None)
    for one, other in zip(fused, plain, strict=True):
        assert_close(one, other, check_dtype=False, atol=10 * noise["atol"], rtol=1e-2)


@pytest.mark.parametrize(
    "method", ["self_extend:group_size=3,window=10", "dca:chunk_size=12,local_window=4", "dynamic_ntk"]
)
@pytest.mark.parametrize("family", ["llama", "glm", "deepseek_v3", "gemma3_text"])
def test_models_equal_the_cpu(family, method):
    model, ids = hf_posenc.patch(tiny_model(family), method), tokens(2, 96)
    expected = model(ids).logits
    model.cuda()
    assert_close(model(ids.cuda()).logits.cpu(), expected, atol=1e-3, rtol=1e-3)


def test_gradients_equal_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        model, ids = hf_posenc.patch(TL(), "self_extend:group_size=3,window=10").to(device).train(), tokens(1, 96)
        model(ids.to(device), labels=ids.to(device)).loss.backward()
        found.append(torch.cat([weight.grad.flatten().cpu() for weight in model.parameters()]))
    assert (found[0] - found[1]).norm() <= 1e-3 * found[0].norm()
