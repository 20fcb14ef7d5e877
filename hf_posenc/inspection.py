"""What positions a model can tell apart. Weights are never read: a model is looked at through its configuration, its
rotary modules and what a twin does with positions."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from . import twin
from .api import current
from .families import (
    Family,
    Slot,
    UnsupportedMethodError,
    is_global,
    live_modules,
    locate,
    read_rope,
    require_rotary,
    text_config_of,
)
from .methods.base import AttentionMethod, FrequencyMethod, LengthMethod, Method, Rope
from .methods.position_map import PositionMap, Stack
from .persistence import ADAPTER, model_class, recorded, without_scheme
from .registry import create
from .report import LayerType, Report, Waves
from .rotary import main_rope, read_ropes

Source: TypeAlias = nn.Module | PreTrainedConfig | str | Path


@dataclass
class Layers:
    """How the attention modules that use one set of frequencies use it."""

    count: int
    windows: set[int | None]

    @property
    def window(self) -> int | None:
        """Tokens that none of them looks back beyond, None if one sees everything."""
        return None if None in self.windows or not self.windows else max(w for w in self.windows if w is not None)


def inspect(
    model: Source, context_length: int | None = None, method: str | Method | type[Method] | None = None
) -> Report:
    """Read how far every rotated pair reaches: its tokens per turn, and whether it turns once within a context.

    Args:
        model: loaded or not: a model (patched or not), a configuration, a folder or hub id of which only the
            configuration is read
        context_length: tokens, by default what the configuration says
        method: also show where this one would put every pair; length-dependent ones for a text of ``context_length``

    Raises:
        ValueError: an impossible length or method, or (``UnsupportedMethodError``) a model without rotation.
        TypeError: ``context_length`` is no whole number, or ``model`` is nothing of the above.
        OSError: no such folder or hub id.
    """
    if context_length is not None:
        require_length("context_length", context_length)
    asked = create(method) if method is not None else None
    config, live = look(model)
    entry = recorded(config)
    own = current(live.root) if live is not None else create(entry["method"]) if entry else None
    family = weightless(config, live)
    require_rotary(family)
    ropes = read_ropes(family)  # refuses a configuration without a trained length
    moved = [_effect(one, main_rope(family, ropes)) for one in (own, asked) if one and any(ropes.values())]
    configured = int(text_config_of(config).max_position_embeddings)
    context = context_length or configured
    found = [
        _layer_type(family, index, slot, None if own else live, own, asked, context)
        for index, site in enumerate(family.sites)
        for slot in site.slots
    ]
    layers = measure(family)
    return Report(
        model=(live.title if live is not None else f"{type(config).__name__} ({config.model_type})"),
        context_length=context,
        configured_length=configured,
        in_force=str(own) if own else None,
        method=str(asked) if asked else None,
        layer_types=tuple(_withmeasure(layer_type, layers.get(source)) for source, layer_type in enumerate(found)),
        facts=(*remarks(layers), *dict.fromkeys(sentence for sentence in moved if sentence)),
    )


def weightless(config: PreTrainedConfig, live: Family | None = None) -> Family:
    """The text decoder of a configuration as the checkpoint was before any scheme of this package, on the meta device
    with real rotary modules.

    Args:
        live: the loaded model that the configuration belongs to, if any

    Raises:
        UnsupportedMethodError: it has no rotary module.
    """
    text = text_config_of(without_scheme(config))
    if live is not None:
        return _with_real_rotation(twin.build(live.owner, text))
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(text)
    except ValueError:  # a part that no automatic class builds alone
        return weightless_whole(config)
    return _with_real_rotation(model)


def weightless_whole(config: PreTrainedConfig) -> Family:
    """The same for the whole model, as it would be loaded."""
    config = without_scheme(config)
    builder = model_class(config)
    with torch.device("meta"):
        if builder is not AutoModelForCausalLM:
            return _with_real_rotation(builder(config))
        try:
            return _with_real_rotation(AutoModelForCausalLM.from_config(config))
        except ValueError:
            return _with_real_rotation(AutoModelForImageTextToText.from_config(config))


def _with_real_rotation(model: nn.Module) -> Family:
    with torch.device("cpu"):
        for site in locate(model).sites:
            site.parent._modules[site.name] = type(site.module)(config=site.config)
    return locate(model)


def require_length(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number of tokens, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} is at least 1 token, got {value}.")


def look(model: Source) -> tuple[PreTrainedConfig, Family | None]:
    """The configuration, and the family of a loaded model."""
    if isinstance(model, nn.Module):
        family = locate(model)
        return family.root.config, family
    if isinstance(model, str | Path):
        path = Path(model).expanduser()
        if (str(model).startswith((".", "/", "~")) or len(path.parts) > 2) and not path.exists():
            raise FileNotFoundError(f"There is no folder {model}.")
        if Path(path, ADAPTER).exists() and not Path(path, "config.json").exists():
            raise ValueError(
                f"{model} is a PEFT adapter, not a model: give its base model, or a folder in which "
                f"hf_posenc.from_pretrained({str(model)!r}).merge_and_unload() was saved."
            )
        return AutoConfig.from_pretrained(model), None
    if isinstance(model, PreTrainedConfig):
        return model, None
    raise TypeError(f"Give a model, a configuration, a folder or a hub id, got {type(model).__name__}.")


def _layer_type(
    family: Family, index: int, slot: Slot, live: Family | None, own: Method | None, asked: Method | None, context: int
) -> LayerType:
    """Args: ``live`` is the loaded model if its own buffers count; ``own`` the scheme of this package that is on."""
    site = family.sites[index]
    rope = read_rope(site, slot, site.plain())
    module = _counterpart(family, live, index) if live is not None else site.module
    in_force = Waves(_lengths(getattr(module, slot.buffer)), float(getattr(module, slot.scaling, 1.0)))
    kept = in_force if isinstance(asked, PositionMap) else None
    if own is not None and is_global(slot):
        in_force = _place(own, rope, context) or in_force
    sections = rope.parameters.get("mrope_section")
    return LayerType(
        label=slot.label or "all",
        layers=None,
        window=None,
        windowed=not is_global(slot),
        theta=rope.theta,
        rope_type=rope.parameters.get("rope_type", "default"),
        head_dim=rope.head_dim,
        trained_length=rope.length,
        sections=tuple(sections) if sections else None,
        trained=Waves(_lengths(rope.frequencies), 1.0),
        in_force=in_force,
        proposed=(kept or _place(asked, rope, context)) if asked is not None and is_global(slot) else None,
    )


def _withmeasure(found: LayerType, layers: Layers | None) -> LayerType:
    return replace(found, layers=layers.count, window=layers.window) if layers else found


def _counterpart(family: Family, live: Family, index: int) -> nn.Module:
    """The rotary module of the loaded model that stands where that of ``family`` does."""
    names = {id(module): name for name, module in family.owner.named_modules()}
    return live_modules(live.owner)[names[id(family.sites[index].module)]]


def _lengths(frequencies: torch.Tensor) -> tuple[float, ...]:
    """Tokens per turn of (pairs,) radians per token."""
    speeds = frequencies.detach().to("cpu", torch.float64).tolist()
    return tuple(2 * math.pi / speed if speed else math.inf for speed in speeds)


def _place(method: Method, rope: Rope, length: int) -> Waves | None:
    """Where a method puts every pair for the last token of ``length``; None if it leaves all as they are."""
    method = method.fill(rope)
    if isinstance(method, Stack):
        method = method.base
    if isinstance(method, FrequencyMethod) and not method.acts_in_attention:
        frequencies, factor = method.frequencies(rope)
        return Waves(_lengths(frequencies), factor)
    if not isinstance(method, LengthMethod):
        return None
    frequencies, factor = method.trained(rope)
    grouped = method.group(torch.tensor([length]), rope)
    if int(grouped) > rope.length:
        turn, gain = method.turn(rope, grouped)
        frequencies = frequencies.clone()
        frequencies[: turn.shape[-1]] += turn[0]
        factor *= float(gain)
    return Waves(_lengths(frequencies), factor)


def _effect(method: Method, rope: Rope) -> str | None:
    """What a method does that no table of frequencies shows.

    Raises:
        ValueError: this model was not trained for it.
    """
    method = method.fill(rope)
    top = method.top if isinstance(method, Stack) else method
    if not isinstance(method, AttentionMethod) or not isinstance(top, PositionMap):
        return None
    method.check(rope)
    length = method.capacity(rope)
    frequencies = f"those of {method.base}" if isinstance(method, Stack) else "the checkpoint's own"
    limit = "" if length is None else f", within distances that were trained up to {length} tokens"
    return f"{top} {top.effect}{limit}; frequencies are {frequencies}."


def measure(family: Family) -> dict[int | None, Layers]:
    """What was measured of the attention modules, by the index of their frequencies (None: no rotation); empty where
    the model does not let itself be measured."""
    try:
        measured = twin.plan(family)
    except (UnsupportedMethodError, RuntimeError):
        return {}
    layers: dict[int | None, Layers] = {}
    for found in measured:
        entry = layers.setdefault(found.source, Layers(0, set()))
        entry.count += 1
        entry.windows.add(found.sliding_window)
    return layers


def remarks(layers: dict[int | None, Layers]) -> list[str]:
    """Sentences about layers that a change of frequencies does not reach."""
    total = sum(found.count for found in layers.values())
    sentences = []
    if None in layers:
        sentences.append(f"{layers[None].count} of {total} layers carry no rotation: no frequency changes them.")
    windows = {found.window: found.count for source, found in layers.items() if source is not None and found.window}
    for window, count in windows.items():
        sentences.append(f"{count} of {total} layers look back at most {window} tokens: they meet no new distance.")
    return sentences
