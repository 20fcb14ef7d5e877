"""What a results folder was made with, for whoever reads its numbers later, and whether its encodings can be trusted.

Generation reads a text through a cache, scoring reads it in one pass. Under a sound encoding both see the same model;
under transformers' own `dynamic` and `longrope` they do not, once a text crosses the trained length. So every encoding
is checked: some tokens are read in two pieces, more are generated, and one forward reads it all again.
"""

import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import hf_posenc
from eval import models, processes
from eval.likelihood import read_on
from eval.results import Results
from eval.retrieval import new_cache

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "lm_eval", "hf-posenc")
NEW_TOKENS = 8
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the largest logit; 5 % for half precision


def write_manifest(
    results: Results,
    model: nn.Module,
    tokenizer: Any,
    posencs: Sequence[str],
    *,
    length: int,
    check: int = 0,
    tasks: Sequence[Results] = (),
) -> dict[str, Any]:
    """Writes `manifest.json` into a results folder.

    Args:
        posencs: the encodings of this run, by their full names.
        length: the longest that was read, in tokens.
        check: tokens of the check of each encoding, at most `length`; 0 leaves it out.
        tasks: folders whose samples count too.
    """
    samples = [sample for folder in (results, *tasks) for sample in folder.samples.values()]
    check = min(check, length - NEW_TOKENS)
    content = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        **{name: value for name, value in results.config.items() if name != "code"},
        "model_type": model.config.model_type,
        "trained_length": models.trained_length(model),
        "tokenizer_class": type(tokenizer).__name__,
        "encodings": [_encoding(model, name, check) for name in posencs],
        "samples": len(samples),
        "truncated": sum(sample.get("truncated", 0) for sample in samples),
        "code": results.config["code"],
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": hardware(model),
        "processes": processes.count(),
        "threads": torch.get_num_threads(),
    }
    results.write("manifest.json", content)
    return content


@torch.no_grad()
def check_cache(model: nn.Module, tokens: int, new: int = NEW_TOKENS) -> dict[str, Any]:
    """Whether tokens read in two pieces and generated through the cache have the logits of one forward over them.

    Args:
        tokens: of the prompt, drawn from the vocabulary by a fixed seed.
        new: tokens generated greedily behind it.

    Returns:
        `largest_difference` of logits, relative to the largest logit; `same_tokens`, of `new_tokens`, that the forward
        would choose too; and `agrees`: the difference lies within rounding.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    cache, rows = new_cache(model), []
    read_on(model, ids[: tokens // 2], cache)
    rows.append(read_on(model, ids[tokens // 2 :], cache)[-1])
    for _ in range(new):
        ids.append(int(rows[-1].argmax()))
        rows.append(read_on(model, ids[-1:], cache)[-1])
    whole = read_on(model, ids, new_cache(model), keep=new + 1)
    cached = torch.stack(rows).to(whole.device)
    largest = float((cached.float() - whole.float()).abs().max() / whole.float().abs().max())
    same = int((whole.argmax(-1) == cached.argmax(-1))[:-1].sum())
    return {
        "prompt_tokens": tokens, "new_tokens": new, "same_tokens": same,
        "largest_difference": largest, "agrees": largest <= TOLERANCE.get(next(model.parameters()).dtype, 5e-2),
    }  # fmt: skip


def _encoding(model: nn.Module, posenc: str, check: int) -> dict[str, Any]:
    with models.applied(model, posenc):
        method = hf_posenc.current(model)
        config = model.config.get_text_config(decoder=True)
        found = {
            "posenc": posenc,
            "method": None if method is None else repr(method),
            "max_position_embeddings": getattr(config, "max_position_embeddings", None),
            "rope_parameters": getattr(config, "rope_parameters", None),
            "attention": config._attn_implementation,
        }
        if check > 1 and processes.is_main():
            found["cache"] = check_cache(model, check)
    return found


def _versions() -> dict[str, str]:
    installed = {
        distribution.metadata["Name"].lower().replace("-", "_") for distribution in importlib.metadata.distributions()
    }
    return {name: importlib.metadata.version(name) for name in PACKAGES if name.replace("-", "_") in installed}


def hardware(model: nn.Module) -> dict[str, Any]:
    """Device, its name and the system."""
    device = models.input_device(model)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": device.type, "name": named, "system": platform.platform()}
