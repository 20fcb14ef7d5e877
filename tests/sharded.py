"""For `tests/test_recipes_loss.py`, under torchrun: the chunked loss of a model in shards (FSDP2) on the CPU."""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hf_posenc
from recipes.chunked_loss import chunked_loss

dist.init_process_group("gloo")
ids = tiny.tokens(4, 24)
for method in ("yarn:factor=4", "self_extend:group_size=2,window=8"):
    whole, shards = (hf_posenc.patch(tiny.TL().train(), method) for _ in range(2))
    loss = whole(input_ids=ids, labels=ids).loss
    loss.backward()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    with chunked_loss(shards, 5):
        for layer in shards.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(shards, mesh=mesh)
        for _ in range(2):
            shards.zero_grad()
            mine = ids.chunk(2)[dist.get_rank()]
            found = shards(input_ids=mine, labels=mine, num_items_in_batch=ids[:, 1:].numel()).loss
            (found * 2).backward()
    total = found.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=1e-5)
    for (name, weight), wanted in zip(shards.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(weight.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-5, msg=name)
if dist.get_rank() == 0:
    print("alike")
dist.destroy_process_group()
