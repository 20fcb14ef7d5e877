"""Which method fits a target length: ``plan``. ``inspect``, on which to judge it, is in inspection.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .api import methods
from .families import require_rotary
from .inspection import Layers, Source, inspect, look, measure, remarks, require_length, weightless
from .methods import NTK, PI, DynamicNTK, DynamicYaRN, Llama3, LongRoPE, Method, YaRN
from .methods.base import LengthMethod, Rope
from .methods.position_map import PositionMap
from .registry import registered
from .rotary import main_rope, read_ropes

__all__ = ["Suggestion", "inspect", "plan"]

UNTRAINED_YARN = 4
"""Factor up to which YaRN is used without training: Qwen2.5 and Qwen3 are shipped for it."""


@dataclass(frozen=True)
class Suggestion:
    """One way to a target length.

    Attributes:
        method: with its parameters; None if nothing has to be done
        reason: what speaks for it and what against
    """

    method: Method | None
    reason: str

    @property
    def command(self) -> str:
        """The string for ``patch`` and every command line; empty if nothing has to be done."""
        return str(self.method) if self.method else ""

    @property
    def needs_training(self) -> bool:
        return self.method is not None and self.method.traits.needs_training


def plan(model: Source, target_length: int) -> list[Suggestion]:
    """Ways to make a model read ``target_length`` tokens, best first, each with its parameters and its reason.

    Factors count from the length the checkpoint was originally trained on. A scheme that this package has put on the
    model is left out of account: ``patch`` replaces it.

    Args:
        model: loaded or not: a model, a configuration, a folder or hub id of which only the configuration is read

    Returns:
        A single suggestion without a method where nothing has to be done.

    Raises:
        ValueError: an impossible length, or (``UnsupportedMethodError``) a model without rotation.
        TypeError: ``target_length`` is no whole number, or ``model`` is nothing of the above.
        OSError: no such folder or hub id.
    """
    require_length("target_length", target_length)
    family = weightless(*look(model))
    require_rotary(family)
    layers, ropes = measure(family), read_ropes(family)
    notes = " ".join(remarks(layers))
    if not any(ropes.values()) or _all_windowed(layers):
        reason = f"Nothing is needed: no rotation meets a distance it was not trained on. {notes}"
        return [Suggestion(None, reason.strip())]
    rope = main_rope(family, ropes)
    reach = max(rope.length, rope.configured_length)
    if target_length <= reach:
        return [Suggestion(None, f"Nothing is needed: the checkpoint reads {reach} tokens as it is.")]
    able = set(methods(family.root))
    found = [_suggest(method, rope, target_length) for name, method in registered().items() if name in able]
    ranked = sorted((one for one in found if one is not None), key=lambda one: one[0])
    suggestions = [Suggestion(method, reason) for _, method, reason in ranked]
    if notes and suggestions:
        suggestions[0] = replace(suggestions[0], reason=f"{suggestions[0].reason} {notes}")
    return suggestions


def _all_windowed(layers: dict[int | None, Layers]) -> bool:
    turning = [found for source, found in layers.items() if source is not None]
    return bool(turning) and all(found.window is not None for found in turning)


Found = tuple[float, Method, str]
"""Rank from 0 (best) to 100, method, reason."""


def _suggest(method: type[Method], rope: Rope, target_length: int) -> Found | None:
    kind = rope.parameters.get("rope_type", "default")
    if _TUNED.get(kind) is method:
        return _carry_on(method, rope, target_length)
    found = None
    if hasattr(method, "suggest"):  # a method file speaks for itself
        found = method.suggest(rope, target_length)
    elif method in _SUGGESTIONS:
        found = _SUGGESTIONS[method](rope, target_length)
    if found is None or kind not in _TUNED:
        return found
    if issubclass(method, LengthMethod):
        return None  # short texts would be read by frequencies that the checkpoint was tuned away from
    rank, chosen, reason = found
    if issubclass(method, PositionMap):
        return rank, chosen, f"{reason} It keeps the {kind} scaling that the checkpoint was tuned with."
    return rank, chosen, f"{reason} It replaces the {kind} scaling that the checkpoint was tuned with."


def _carry_on(method: type[Method], rope: Rope, target_length: int) -> Found:
    """The scaling that the checkpoint was tuned with, by a larger factor."""
    shape = ("beta_fast", "beta_slow", "truncate", "low_freq_factor", "high_freq_factor")
    known = {key: rope.parameters.get(key) for key in shape if key in method.parameter_names()}
    known = {key: value for key, value in known.items() if value is not None}
    factor = target_length / rope.length
    chosen = LongRoPE(factor=factor) if method is LongRoPE else _extend(method, rope, target_length, **known)
    reason = (
        f"The kind of scaling that the checkpoint was tuned with, now {factor:g} times its original {rope.length} "
        "tokens. Expect losses beyond the length it was tuned for."
    )
    if method is PI and "original_max_position_embeddings" not in rope.parameters:
        reason += (
            f" Caution: max_position_embeddings={rope.configured_length} is read as the length after its own factor "
            f"{rope.parameters['factor']:g}; some old checkpoints mean the length before."
        )
    return 0, chosen, reason


def _extend(method: Callable[..., Method], rope: Rope, target_length: int, **parameters: Any) -> Method:
    factor = target_length / rope.length
    if factor.is_integer():
        return method(factor=int(factor), **parameters)
    return method(target_length=target_length, **parameters)


def _yarn(rope: Rope, target_length: int) -> Found:
    factor = target_length / rope.length
    moderate = factor <= UNTRAINED_YARN
    cost = "Works without training." if moderate else f"Beyond {UNTRAINED_YARN} times tune it, or expect losses."
    return (
        10 if moderate else 30,
        _extend(YaRN, rope, target_length),
        f"Fast pairs stay, slow ones are interpolated {factor:g} times, attention is tempered. {cost} Stock kernels, "
        "and most serving engines know it. It changes short texts too.",
    )


def _dynamic_yarn(rope: Rope, target_length: int) -> Found:
    return (
        20,
        DynamicYaRN(),
        f"YaRN by what each text needs, without training: up to {rope.length} tokens nothing changes. Beyond, the "
        "cached keys are turned again at every step, and only this package can load it.",
    )


def _dynamic_ntk(rope: Rope, target_length: int) -> Found:
    return (
        25,
        DynamicNTK(),
        f"A base that grows with each text, without training: up to {rope.length} tokens nothing changes. Costs as "
        "dynamic_yarn does, without its temperature.",
    )


def _ntk(rope: Rope, target_length: int) -> Found:
    return (
        40,
        _extend(NTK, rope, target_length),
        "One larger base, without training, which any engine reads as plain rope_theta. Pairs in the middle still "
        "meet new angles near the target: try a larger factor.",
    )


def _pi(rope: Rope, target_length: int) -> Found:
    return (
        60,
        _extend(PI, rope, target_length),
        "Needs fine-tuning: all positions move closer, neighbours too. The paper tunes for about 1000 steps.",
    )


def _llama3(rope: Rope, target_length: int) -> Found:
    return (
        70,
        _extend(Llama3, rope, target_length),
        "Needs fine-tuning: a ramp as in YaRN without its temperature, made for long-context training (Llama 3.1).",
    )


_TUNED: dict[str, type[Method]] = {"yarn": YaRN, "llama3": Llama3, "linear": PI, "longrope": LongRoPE}
_SUGGESTIONS: dict[type[Method], Callable[[Rope, int], Found]] = {
    YaRN: _yarn, DynamicYaRN: _dynamic_yarn, DynamicNTK: _dynamic_ntk, NTK: _ntk, PI: _pi, Llama3: _llama3,
}  # fmt: skip
