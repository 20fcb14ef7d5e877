"""What is trained: adapters with norms and embeddings, everything, or the encoding's own parameters.

Adapters of the linear layers alone hardly extend a context: perplexity 11.44 against 8.12 with norms and embeddings
trained, 8.08 with everything (LongLoRA, arXiv 2309.12307, table 2).
"""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import nn

import hf_posenc
from hf_posenc.embeddings import Learned, learned_table
from hf_posenc.families import locate
from hf_posenc.persistence import LEARNED
from recipes.settings import Recipe


def own_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters of the positional encoding: those in modules `posenc`, T5's tables, a stretched one."""
    family = locate(model)
    table = learned_table(family) if isinstance(family.native, Learned) else None
    modules = {LEARNED, "relative_attention_bias"}
    return [name for name, weight in model.named_parameters() if weight is table or modules & set(name.split("."))]


def reads(model: nn.Module, length: int) -> bool:
    """Whether a model can take a text of so many tokens: one with a table of positions ends where that does."""
    table = isinstance(locate(model).native, Learned)
    return not table or length <= model.config.get_text_config().max_position_embeddings


def require_own_parameters(model: nn.Module) -> None:
    """Raises:
    ValueError: the encoding has nothing to train.
    """
    if not own_parameters(model):
        raise ValueError(f"train: posenc trains what the encoding learns, and {hf_posenc.current(model) or 'none'} "
                         "learns nothing: give train: lora or full")  # fmt: skip


def prepare(model: nn.Module, recipe: Recipe, wide: bool) -> nn.Module:
    """The model with what is trained set to require gradients, in a PEFT wrapper for `lora`.

    Args:
        model: patched.
        wide: makes what is trained float32, for training under autocast.
    """
    if recipe.train == "lora":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings")  # they are tied below
            model = get_peft_model(model, _lora(model, recipe))
        _tie(model)
    else:
        own = set(own_parameters(model)) if recipe.train == "posenc" else None
        for name, weight in model.named_parameters():
            weight.requires_grad_(own is None or name in own)
    if wide:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(torch.float32)
    return model


def _lora(model: nn.Module, recipe: Recipe) -> LoraConfig:
    """Adapters of linear layers; norms, embeddings, heads tied to these, and what the encoding learns are copied."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    whole = {
        name.rpartition(".")[2]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(vars(module)["_parameters"].get("weight")) in embeddings
        or ("Norm" in type(module).__name__ and [*module.parameters()])
    }
    if any(LEARNED in name.split(".") for name, _ in model.named_modules()):
        whole.add(LEARNED)
    targets = "all-linear" if recipe.lora_targets == ["all-linear"] else recipe.lora_targets
    return LoraConfig(
        r=recipe.lora_rank, lora_alpha=recipe.lora_alpha, target_modules=targets, modules_to_save=sorted(whole),
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )  # fmt: skip


def _tie(model: nn.Module) -> None:
    """Copies of what was one weight become one weight: PEFT ties only some heads, and no two embeddings."""
    first: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper) and hasattr(module.original_module, "weight"):
            known = first.setdefault(id(module.original_module.weight), module)
            for name, copy in module.modules_to_save.items():
                copy.weight = known.modules_to_save[name].weight
