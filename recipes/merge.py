"""An adapter and its base as one model that keeps the positional encoding.

    python recipes/merge.py runs/yarn_lora OUT
    python recipes/merge.py runs/yarn_lora OUT --target llama.cpp

Load OUT with `hf_posenc.from_pretrained(OUT)`. A target is other software that is to read it: `transformers` and
`vllm` read OUT, and `llama.cpp` a GGUF made of OUT/unpatched with the flags that are written beside it.
"""

import sys
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from torch import nn
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hf_posenc
from eval.commands import console
from hf_posenc.export import require_target
from hf_posenc.persistence import ADAPTER

UNPATCHED = "unpatched"


def main(
    adapter: Annotated[str, typer.Argument(help="Folder that a recipe wrote with train: lora.")],
    out: Annotated[str, typer.Argument(help="Is created.")],
    target: Annotated[str | None, typer.Option(help="transformers, vllm or llama.cpp.")] = None,
) -> None:
    """Merges an adapter into its base."""
    try:
        console.print(merge(adapter, out, target), soft_wrap=True, markup=False)
    except ValueError as error:
        console.print("[red]Error:[/]", escape(str(error)), soft_wrap=True)
        sys.exit(2)


def merge(adapter: str, out: str, target: str | None = None) -> str:
    """Writes the merged model and its tokenizer.

    Returns:
        How to load it.

    Raises:
        ValueError: no adapter, a folder that is in use, or a target that cannot express the encoding.
    """
    if target is not None:
        require_target(target)
    if not Path(adapter, ADAPTER).exists():
        raise ValueError(f"{adapter} holds no {ADAPTER}: a whole model needs no merge, and hf-posenc export writes it "
                         "for other software")  # fmt: skip
    if Path(out).exists() and any(Path(out).iterdir()):
        raise ValueError(f"{out} is not empty: give another folder")
    with warnings.catch_warnings():
        for said in ("Model has `tie_word_embeddings", "Input and output embeddings are no longer tied"):
            warnings.filterwarnings("ignore", said)  # they are tied below
        model = hf_posenc.from_pretrained(adapter, dtype="auto").merge_and_unload()
    tie(model)
    tokenizer, folder, told = AutoTokenizer.from_pretrained(adapter), out, f"hf_posenc.from_pretrained({out!r})"
    if target is not None:
        model.name_or_path = out
        told = str(hf_posenc.export(model, out, target))
    if target == "llama.cpp":
        hf_posenc.unpatch(model)
        tie(model)
        folder = str(Path(out, UNPATCHED))
        told = f"convert_hf_to_gguf.py {folder} --outfile MODEL.gguf\n{told}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return told


def tie(model: nn.Module) -> None:
    """Weights of the model's own kind of tie that are equal become one again: PEFT parts them."""
    parts = list({id(config): config for config in (model.config, model.config.get_text_config())}.values())
    before = [config.tie_word_embeddings for config in parts]
    for config in parts:
        config.tie_word_embeddings = True
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    if all(torch.equal(model.get_parameter(one), model.get_parameter(other)) for one, other in pairs):
        model.tie_weights()
        return
    for config, value in zip(parts, before, strict=True):
        config.tie_word_embeddings = value


if __name__ == "__main__":
    typer.run(main)
