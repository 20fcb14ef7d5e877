"""Memory of a training step with the loss in chunks and with all logits at once; Linux, on the CPU.

    python recipes/memory.py

A Llama of 2 layers and 64 dimensions with a vocabulary of 49,152 reads 8,192 tokens in float32, so that logits are
nearly all there is. Each figure is the growth of resident memory in a process of its own, as in `eval.memory`.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.memory import MALLOC, lap
from recipes.chunked_loss import chunked_loss

WAYS = ("whole", "chunked")


def peak(way: str, length: int = 8192, vocabulary: int = 49152) -> int:
    """Bytes of a step one `way`, measured in a new process.

    Raises:
        ValueError: that cannot be measured here.
    """
    command = [sys.executable, __file__, way, str(length), str(vocabulary)]
    done = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"memory of a step cannot be measured here: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])


def step(way: str, length: int, vocabulary: int) -> int:
    """Bytes of a step in this process."""
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=length)  # fmt: skip
    model, ids = LlamaForCausalLM(config).train(), torch.randint(vocabulary, (1, length))

    def learn(part: torch.Tensor) -> None:
        if way == "chunked":
            with chunked_loss(model):
                model(input_ids=part, labels=part).loss.backward()
        else:
            model(input_ids=part, labels=part, use_cache=False).loss.backward()

    learn(ids[:, :16])  # gradients are there from now on
    lap()
    before = lap()
    learn(ids)
    after = lap()
    if before is None or after is None:
        raise ValueError("Linux alone tells the peak of a process")
    return after - before


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(step(sys.argv[1], *map(int, sys.argv[2:])))
    else:
        for way in WAYS:
            print(f"{way:8} {peak(way) / 2**20:9,.0f} MiB")
