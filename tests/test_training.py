"""Small models trained from scratch at 128 tokens and read at 512: which encodings reach beyond what was trained."""

import logging
from pydoc_data.topics import topics

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc

pytestmark = pytest.mark.slow
TRAINED, READ, SCORED, STEPS, BATCH = 128, 512, 64, 300, 16
TEXT = torch.frombuffer(
    bytearray("\n\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8
).long()
HELD_OUT = 40_000  # bytes at the end


def trained(method: str | None) -> LlamaForCausalLM:
    """A byte-level Llama after some hundred steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=TRAINED, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip
    if method is not None:
        hf_posenc.patch(model, method)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS, pct_start=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(len(TEXT) - HELD_OUT - TRAINED, (BATCH,), generator=generator)
        ids = TEXT[starts[:, None] + torch.arange(TRAINED)]
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def losses(model) -> tuple[float, float]:
    """Mean loss of the same held-out bytes, read behind 64 others and behind 448."""
    rows = TEXT[-HELD_OUT:][: READ * 64].view(-1, READ)

    def loss(ids):
        logits = torch.cat([model(part).logits[:, -SCORED - 1 : -1] for part in ids.split(16)])
        return float(torch.nn.functional.cross_entropy(logits.mT, ids[:, -SCORED:]))

    return loss(rows[:, -TRAINED:]), loss(rows)


def test_alibi_and_rerope_reach_beyond_what_was_trained_and_rope_does_not(caplog):
    caplog.set_level(logging.ERROR)
    alibi, rope = trained("alibi"), trained(None)
    short, long = losses(alibi)
    assert long < short + 0.03
    short, long = losses(rope)
    assert long > short + 0.5
    hf_posenc.patch(rope, "rerope:window=96")
    assert losses(rope)[1] < short + 0.03
