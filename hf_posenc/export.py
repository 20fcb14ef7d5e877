"""A patched model in the form that other software reads: plain transformers, vLLM, llama.cpp.

What the targets do was read in their sources in autumn 2026. vLLM: ``get_rope`` and ``_get_and_verify_max_len`` after
pull request 56446. llama.cpp: ``llama_context`` and ``ggml_rope_yarn_corr_dims``; there pi, ntk, abf, yarn and
ntk_by_parts were also run with these flags on SmolLM2 (a build of 2026) and gave this package's logits.
"""

import copy
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .api import current
from .families import Family, is_nested, locate
from .methods.base import Method
from .persistence import recorded
from .rotary import configs

OVERRIDES = "vllm_overrides.json"
FLAGS = "llama_cpp_flags.txt"
CONVERT = "Export with target='transformers' instead and convert that folder with llama.cpp's convert_hf_to_gguf.py."


@dataclass(frozen=True)
class Export:
    """What ``export`` wrote. ``print`` shows the command.

    Attributes:
        target: "transformers", "vllm" or "llama.cpp"
        path: the folder, or the file in it
        settings: for vLLM the overrides, for llama.cpp flag -> value, for transformers the rope parameters, if any
        command: how to load it
        notes: where the target differs, in sentences
    """

    target: str
    path: Path
    settings: dict[str, Any]
    command: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((self.command, *(f"Note: {note}" for note in self.notes)))


def export(model: nn.Module, folder: str | Path, target: str = "transformers") -> Export:
    """Write the scheme in force on a model for other software.

    Args:
        folder: is created. "transformers" saves model and configuration there; "vllm" ``vllm_overrides.json``, the
            value of ``--hf-overrides``; "llama.cpp" ``llama_cpp_flags.txt``, flags for a GGUF made from the checkpoint
            as it was before the patch

    Raises:
        ValueError: no scheme is in force, an unknown target, or a scheme that the target cannot express.
        TypeError: no transformers model.
    """
    require_target(target)
    family, method = locate(model), current(model)
    if method is None:
        raise ValueError("No scheme is in force on this model: call hf_posenc.patch(model, ...) first.")
    if vars(family.config).get("attn_implementation") == "hf_posenc":
        raise ValueError(
            f"'{method}' on {family.title} is not expressible for {target}: it needs this package at run time. Save "
            "it with model.save_pretrained(folder) and load it with hf_posenc.from_pretrained(folder)."
        )
    return _TARGETS[target](model, family, method, Path(folder))


def require_target(target: str) -> None:
    """Raises:
    ValueError: ``export`` knows no such target.
    """
    if target not in _TARGETS:
        raise ValueError(f"Unknown target: {target!r}. Available: {', '.join(_TARGETS)}.")


def _to_transformers(model: nn.Module, family: Family, method: Method, folder: Path) -> Export:
    if not isinstance(model, PreTrainedModel) or vars(model).get("_hf_peft_config_loaded"):
        raise ValueError(
            "This model carries adapters or another wrapper, so its weights would not load in plain transformers: "
            "export model.merge_and_unload(), or save the adapter with model.save_pretrained(folder)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    command = f"transformers.{type(model).__name__}.from_pretrained({str(folder)!r})"
    return Export("transformers", folder, {} if family.native else _plain(family.config.rope_parameters), command)


def _to_vllm(model: nn.Module, family: Family, method: Method, folder: Path) -> Export:
    config = _only_config(family, method, "vLLM")
    parameters = _plain(config.rope_parameters)
    notes: list[str] = []
    for entry in _entries(parameters):
        _check_vllm(entry, config, method, notes)
        if entry["rope_type"] == "longrope":
            entry["short_mscale"] = entry["long_mscale"] = entry["attention_factor"]
    # vLLM itself multiplies by a linear factor, except for Gemma 3.
    linear = any(entry["rope_type"] == "linear" for entry in _entries(parameters))
    original = _original(family)
    multiplies = linear and "gemma3" not in family.root.config.model_type
    length = original["max_position_embeddings"] if multiplies else config.max_position_embeddings
    overrides: dict[str, Any] = {"rope_parameters": parameters, "max_position_embeddings": length}
    for name in family.root.config.sub_configs:
        if vars(family.root.config).get(name) is config:
            _clear_stale(parameters, original["rope_parameters"])
            overrides = {name: overrides}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OVERRIDES
    path.write_text(json.dumps(overrides, indent=2) + "\n")
    command = (
        f'vllm serve {shlex.quote(_checkpoint(family))} --hf-overrides "$(cat {shlex.quote(str(path))})" '
        f"--max-model-len {config.max_position_embeddings}"
    )
    return Export("vllm", path, overrides, command, tuple(dict.fromkeys(notes)))


def _check_vllm(entry: dict[str, Any], config: PreTrainedConfig, method: Method, notes: list[str]) -> None:
    """Raises:
    ValueError: vLLM reads ``entry`` otherwise than transformers does, or not at all.
    """
    kind = entry["rope_type"]
    known = kind in ("default", "linear", "yarn", "llama3", "longrope") or (
        kind == "proportional" and "factor" not in entry
    )
    if not known:
        raise ValueError(
            f"'{method}' is not expressible for vLLM: it does not read the rope type {kind!r} with a factor."
        )
    if hasattr(config, "kv_lora_rank") and (kind not in ("default", "yarn") or "attention_factor" in entry):
        raise ValueError(
            f"'{method}' is not expressible for vLLM: on latent attention ({config.model_type}) it reads every "
            "scaling as YaRN and no attention factor. yarn, ntk and abf work."
        )
    if config.model_type == "gpt_oss" and (kind != "yarn" or _TEMPERATURE & entry.keys()):
        raise ValueError(f"'{method}' is not expressible for vLLM: on gpt_oss it always takes plain YaRN. yarn works.")
    if "mrope_section" in entry and kind not in ("default", "yarn"):
        raise ValueError(
            f"'{method}' is not expressible for vLLM: with M-RoPE sections it knows plain frequencies and YaRN. yarn, "
            "ntk and abf work."
        )
    if "mrope_section" in entry and kind == "yarn":
        notes.append(
            "with M-RoPE, vLLM lays YaRN's ramp for four times the original length: pairs in the ramp differ."
        )
    if _TEMPERATURE & entry.keys() and kind == "yarn":
        notes.append(
            "vLLM before pull request 56446 (September 2026) ignores attention_factor, mscale, mscale_all_dim."
        )
    if kind == "longrope" and entry["short_factor"] != entry["long_factor"]:
        notes.append("vLLM takes the long factors for texts of every length.")


def _clear_stale(parameters: dict[str, Any], original: dict[str, Any]) -> None:
    """vLLM lays overrides of a part (``text_config``) over the checkpoint's keys: those that are gone become null."""
    pairs = zip(_entries(parameters), _entries(original), strict=True)
    for entry, old in pairs:
        for key in old.keys() - entry.keys():
            entry[key] = True if key == "truncate" else None


def _to_llama_cpp(model: nn.Module, family: Family, method: Method, folder: Path) -> Export:
    config = _only_config(family, method, "llama.cpp")
    flags = _llama_cpp_flags(_plain(config.rope_parameters), _original(family), config, method)
    flags["--ctx-size"] = str(config.max_position_embeddings)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FLAGS
    line = " ".join(f"{flag} {value}" for flag, value in flags.items())
    path.write_text(line + "\n")
    return Export("llama.cpp", path, flags, f"llama-server -m MODEL.gguf {line}")


def _llama_cpp_flags(
    entry: dict[str, Any], original: dict[str, Any], config: PreTrainedConfig, method: Method
) -> dict[str, str]:
    """Raises:
    ValueError: no flags say the same.
    """
    reason = _unfit_for_flags(entry, original["rope_parameters"], config)
    if reason:
        lost = any((_TEMPERATURE | {"truncate"}) & part.keys() for part in _entries(entry))
        raise ValueError(
            f"'{method}' is not expressible as llama.cpp flags: {reason}. {'' if lost else CONVERT}".strip()
        )
    if entry["rope_type"] == "default":
        return {"--rope-scaling": "none", "--rope-freq-base": f"{entry['rope_theta']:.9g}"}
    flags = {"--rope-scaling": entry["rope_type"], "--rope-scale": f"{entry['factor']:.9g}"}
    if entry["rope_type"] == "linear":
        return flags
    return flags | {
        "--yarn-orig-ctx": str(entry["original_max_position_embeddings"]),
        "--yarn-beta-fast": f"{entry['beta_fast']:g}",
        "--yarn-beta-slow": f"{entry['beta_slow']:g}",
        **_temperature(entry, config, method),
    }


def _temperature(entry: dict[str, Any], config: PreTrainedConfig, method: Method) -> dict[str, str]:
    """llama.cpp turns by ``0.1 ln s + 1`` times the GGUF's ``rope.scaling.attn_factor``; since pull request 17945
    (December 2025) it overwrites ``--yarn-attn-factor``.

    Raises:
        ValueError: another temperature, for an architecture whose GGUF name is not known here.
    """
    own = 0.1 * math.log(entry["factor"]) + 1
    wanted = entry.get("attention_factor", own)
    if abs(wanted - own) < 1e-6:
        return {}
    name = _GGUF_NAMES.get(config.model_type)
    if name is None:
        raise ValueError(
            f"'{method}' is not expressible as llama.cpp flags: llama.cpp always takes 0.1 ln(factor) + 1 as YaRN's "
            f"attention factor. Add --override-kv NAME.rope.scaling.attn_factor=float:{wanted / own:.9g} to the flags "
            "of plain yarn, where NAME is general.architecture of the GGUF."
        )
    return {"--override-kv": f"{name}.rope.scaling.attn_factor=float:{wanted / own:.9g}"}


def _unfit_for_flags(entry: dict[str, Any], original: dict[str, Any], config: PreTrainedConfig) -> str | None:
    """Why flags cannot say ``entry``, if so."""
    if is_nested(entry):
        return "they hold for all layers alike, and this model has frequencies per layer type"
    if entry["rope_type"] not in ("default", "linear", "yarn"):
        return f"there is none for {entry['rope_type']}"
    if original.get("rope_type", "default") not in ("default", "linear", "yarn"):
        return (
            f"a GGUF of this checkpoint already holds the factors of its {original['rope_type']} scaling, pair by pair"
        )
    if entry.get("partial_rotary_factor") != original.get("partial_rotary_factor"):
        return "the number of rotated dimensions is fixed in the GGUF"
    if hasattr(config, "kv_lora_rank"):
        return "the softmax scale of latent attention comes from the GGUF"
    if any("sliding" in kind or "chunked" in kind for kind in vars(config).get("layer_types") or ()):
        return "windowed layers keep the frequencies of the GGUF"
    if entry.get("truncate") is False:
        return "llama.cpp rounds the ends of YaRN's ramp"
    if "mscale" in entry or "mscale_all_dim" in entry:
        return "there is none for mscale"
    return None


def _only_config(family: Family, method: Method, target: str) -> PreTrainedConfig:
    if family.native is not None:
        raise ValueError(
            f"'{method}' is not expressible for {target}: {family.title} has no rotary module. Use "
            "target='transformers'."
        )
    if [id(config) for config in configs(family)] != [id(family.config)]:
        raise ValueError(
            f"'{method}' is not expressible for {target}: {family.title} keeps a configuration per set of "
            "frequencies. Use target='transformers'."
        )
    return family.config


def _entries(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return (
        [value for value in parameters.values() if isinstance(value, dict)] if is_nested(parameters) else [parameters]
    )


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(copy.deepcopy(parameters)))


def _original(family: Family) -> dict[str, Any]:
    entry = recorded(family.root.config)
    assert entry is not None
    return entry["original"]


def _checkpoint(family: Family) -> str:
    return family.root.name_or_path or "MODEL"


_TEMPERATURE = {"attention_factor", "mscale", "mscale_all_dim"}
_GGUF_NAMES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TARGETS: dict[str, Callable[[nn.Module, Family, Method, Path], Export]] = {
    "transformers": _to_transformers, "vllm": _to_vllm, "llama.cpp": _to_llama_cpp,
}  # fmt: skip
