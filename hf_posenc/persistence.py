"""The scheme in ``config.json``, beside PEFT adapters, and in the forms that other engines read."""

import copy
import functools
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from . import twin
from .families import Family, text_config_of
from .guard import guarded
from .journal import Journal
from .methods.base import Method

logger = logging.getLogger(__name__)
LEARNED = "posenc"
SIDECAR = "hf_posenc.json"
ADAPTER = "adapter_config.json"
# A key of ADAPTER: PEFT shows those that it does not know when it loads an adapter.
WARNING = "load with hf_posenc.from_pretrained"
VERSION = 1
_LOADING = {"dtype", "torch_dtype", "quantization_config", "attn_implementation"}  # not configuration alone


def original_of(config: PreTrainedConfig, length: int) -> dict[str, Any]:
    """What a configuration said before the scheme: enough to load the model without it."""
    return {
        "rope_parameters": copy.deepcopy(getattr(config, "rope_parameters", None)),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "length": length,
    }


def record(
    model: nn.Module, family: Family, method: Method, original: dict[str, Any], native: bool, journal: Journal
) -> None:
    """Write the scheme into the configuration, and into every adapter of ``model`` saved from now on.

    A scheme that plain transformers cannot express also names a rope type and an attention implementation that only
    this package registers, so that a plain load stops with an error instead of dropping the scheme.
    """
    entry = {"method": str(method), "version": VERSION, "original": original}
    if native and family.native is not None and not family.native.knows(method):
        entry["in_weights"] = True  # loads as it is, and is not to be made again
    for config in {id(config): config for config in (family.root.config, family.config)}.values():
        journal.set(config, "hf_posenc", entry)
        if not native:
            journal.set(config, "attn_implementation", "hf_posenc")
    if not native:
        _guard(family, journal)
    journal.before_state_dict(family.root, watch_adapters)
    if model is not family.root:
        watch(model, family.root)


def _guard(family: Family, journal: Journal) -> None:
    """Name our rope type; where a family has none, or builds nothing but types that it lists itself (Phi-3), an
    implementation of experts that nobody knows, which transformers looks up for every model, with experts or without.
    """
    mark = len(journal.entries)
    try:
        if family.native is None:
            journal.set(family.config, "rope_parameters", guarded(family.config.rope_parameters))
            family.config.validate()
            family.root.config.validate()
            twin.build(family.owner, family.config)
            return
    except (StrictDataclassError, ValueError, KeyError, TypeError):
        journal.rollback(mark)
    for config in {id(config): config for config in (family.root.config, family.config)}.values():
        journal.set(config, "experts_implementation", "hf_posenc")


def recorded(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The record of a scheme in a configuration.

    Raises:
        ValueError: it was written by a later version, or by hand.
    """
    entry = getattr(config, "hf_posenc", None) or getattr(text_config_of(config), "hf_posenc", None)
    if entry is None:
        return None
    if isinstance(entry, dict) and entry.get("version", 0) > VERSION:
        raise ValueError(
            f"config.hf_posenc has version {entry['version']}, this package reads up to {VERSION}: upgrade hf_posenc."
        )
    if not _is_record(entry):
        raise ValueError(f"config.hf_posenc is not a scheme that this package wrote: {entry!r}.")
    return entry


def _is_record(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("method"), str):
        return False
    original = entry.get("original")
    return isinstance(original, dict) and {"rope_parameters", "max_position_embeddings", "length"} <= original.keys()


def settings_of(entry: dict[str, Any]) -> list[str]:
    """Names of what a record puts back into the configuration."""
    return [name for name in entry["original"] if name != "length"]


def without_scheme(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration with its recorded scheme taken out: that of the model before it was patched."""
    config = copy.deepcopy(config)
    entry = recorded(config)
    if entry is None:
        return config
    text = text_config_of(config)
    for name in settings_of(entry):
        if entry["original"][name] is not None:
            setattr(text, name, copy.deepcopy(entry["original"][name]))
        elif vars(text).get(name) is not None:
            del vars(text)[name]
    for part in (config, text):
        for name in ("hf_posenc", "attn_implementation", "experts_implementation"):
            vars(part).pop(name, None)
        if part._experts_implementation == "hf_posenc":
            part._experts_implementation = None
        if str(part._attn_implementation).startswith("hf_posenc"):
            part._attn_implementation = None
    return config


def warn_of_edits(saved: PreTrainedConfig, restored: PreTrainedConfig) -> None:
    """Say so if somebody edited a configuration that was saved with a scheme: the record of the scheme counts.

    Args:
        restored: the configuration with the scheme put on anew
    """
    entry = recorded(saved)
    found, expected = (
        json.loads(json.dumps(getattr(text_config_of(part), "rope_parameters", None))) for part in (saved, restored)
    )
    if entry is not None and found != expected:
        logger.warning(
            "rope_parameters is %s, but the recorded scheme %r stands for %s, which is now in force. Patch and save "
            "again to change the scheme, or take hf_posenc out of config.json to have the edited parameters.",
            found, entry["method"], expected,
        )  # fmt: skip


def load_base(path: str | Path, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """Load a model folder or hub id without its scheme.

    Returns:
        The model, and the configuration as it was saved.
    """
    if kwargs.pop("output_loading_info", False):
        raise ValueError("output_loading_info is not supported here: load with transformers, then hf_posenc.restore.")
    config = kwargs.pop("config", None)
    if not isinstance(config, PreTrainedConfig):
        shared = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "trust_remote_code", "gguf_file",
                                               "subfolder", "local_files_only") if key in kwargs}  # fmt: skip
        config = AutoConfig.from_pretrained(config or path, **shared)
    entry = recorded(config)
    plain = copy.deepcopy(config) if entry and entry.get("in_weights") else without_scheme(config)
    shifted = sorted({"rope_parameters", "max_position_embeddings"} & kwargs.keys())
    if shifted and recorded(config) is not None:
        raise ValueError(
            f"{', '.join(shifted)} would change what the scheme of {path} was made for: load without, then patch it."
        )
    # As transformers does: what the configuration knows goes there.
    for name in [name for name in kwargs if hasattr(plain, name) and name not in _LOADING]:
        setattr(plain, name, kwargs.pop(name))
    if kwargs.get("gguf_file") and "quantization_config" not in kwargs:
        # A model left quantised can be neither saved nor trained.
        kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return model_class(config).from_pretrained(path, config=plain, **kwargs), config


def load_learned(model: nn.Module, path: str | Path, **kwargs: Any) -> None:
    """Fill what a method learned, the modules named ``posenc``, from the weights saved in a model folder or hub id.

    Args:
        kwargs: those of ``load_base``

    Raises:
        ValueError: the weights are not there.
    """
    wanted = {name: weight for name, weight in model.state_dict().items() if LEARNED in name.split(".")}
    if not wanted:
        return
    names = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
    shared = {key: value for key, value in kwargs.items() if key in names}
    found: dict[str, torch.Tensor] = {}
    for file in _weight_files(path, set(wanted), kwargs.get("variant"), shared):
        with safe_open(file, framework="pt") as weights:
            found.update({name: weights.get_tensor(name) for name in weights.keys() & wanted.keys()})
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ValueError(f"The weights in {path} lack what the scheme learned: {', '.join(missing[:3])} ...")
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(found[name])


def _weight_files(path: str | Path, names: set[str], variant: str | None, shared: dict[str, Any]) -> list[str]:
    """The files that hold the weights ``names``, of a folder or hub id."""

    def find(file: str) -> str | None:
        stem, suffix = file.rsplit(".", 1)
        named = f"{stem}.{variant}.{suffix}" if variant else file
        return cached_file(str(path), named, _raise_exceptions_for_missing_entries=False, **shared)

    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        whole = find(SAFE_WEIGHTS_NAME)
        return [whole] if whole else []
    places = json.loads(Path(index).read_text())["weight_map"]
    files = sorted({places[name] for name in names & places.keys()})
    return [file for file in (cached_file(str(path), name, **shared) for name in files) if file]


def model_class(config: PreTrainedConfig) -> Any:
    """The class that a configuration names, or the automatic one for causal language models."""
    for name in config.architectures or ():
        if isinstance(getattr(transformers, name, None), type):
            return getattr(transformers, name)
    return AutoModelForCausalLM


def watch_adapters(root: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Pre-hook of ``state_dict``: PEFT configurations of ``root`` write the scheme wherever they are saved.

    PEFT wraps a model after it was patched and tells nobody, but it takes the state dict before it saves, and leaves
    its configurations on the model. Where it leaves them on the wrapper, ``adapters`` sees to it.
    """
    watch(root, root)


def watch(holder: nn.Module, root: nn.Module) -> None:
    """Let the PEFT configurations on ``holder`` write the scheme of ``root`` when they are saved."""
    for adapter in adapters_of(holder):
        adapter.save_pretrained = functools.partial(_save_with_scheme, type(adapter), adapter, root.config)


def adapters_of(module: nn.Module) -> list[Any]:
    """The PEFT configurations that a module holds."""
    held = getattr(module, "peft_config", None)
    return list(held.values()) if isinstance(held, dict) else []


def _save_with_scheme(adapter_class: Any, adapter: Any, config: Any, folder: str, *args: Any, **kwargs: Any):
    adapter_class.save_pretrained(adapter, folder, *args, **kwargs)
    entry = getattr(config, "hf_posenc", None)
    if entry is None:
        Path(folder, SIDECAR).unlink(missing_ok=True)
        return
    Path(folder, SIDECAR).write_text(json.dumps(entry, indent=2) + "\n")
    settings = json.loads(Path(folder, ADAPTER).read_text())
    Path(folder, ADAPTER).write_text(json.dumps(settings | {WARNING: entry["method"]}, indent=2) + "\n")


def read_sidecar(folder: str | Path) -> dict[str, Any] | None:
    """The scheme beside an adapter, or None.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder, SIDECAR)
    if not path.exists():
        return None
    try:
        entry = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} does not hold a scheme ({error}): save the adapter again.") from error
    if not _is_record(entry):
        raise ValueError(f"{path} does not hold a scheme: save the adapter again.")
    return entry


def check_base(entry: dict[str, Any], config: PreTrainedConfig, folder: str | Path) -> None:
    """Refuse a base model other than the one that an adapter's scheme was made for.

    Raises:
        ValueError: its rotation or trained length differs.
    """
    text = text_config_of(config)
    found = original_of(text, entry["original"].get("length"))
    found |= {name: getattr(text, name, None) for name in settings_of(entry)}
    if json.loads(json.dumps(found)) != entry["original"]:
        raise ValueError(
            f"The adapter in {folder} was saved with {entry['method']!r} over a base with {entry['original']}, but "
            f"this base has {found}: give the base model it was trained on."
        )
