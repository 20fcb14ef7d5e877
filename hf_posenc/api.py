"""Patch, unpatch and load: the public calls."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import (  # some register kinds of models
    adapters,
    attention,
    bloom,  # noqa: F401
    embeddings,
    layerwise,
    persistence,
    positions,
    stacked,
    t5,  # noqa: F401
    twin,
)
from .families import (
    Family,
    UnsupportedMethodError,
    is_nested,
    live_modules,
    locate,
    require_rotation,
    rotary_sites,
    text_config_of,
)
from .journal import Journal
from .methods.base import AttentionMethod, FrequencyMethod, LengthMethod, Method, Rope
from .methods.bias import BiasMethod
from .methods.embedding import EmbeddingMethod
from .methods.layerwise import Layerwise
from .methods.nope import NoPE
from .methods.on_top import OnTop
from .methods.position_map import PositionMap, Stack
from .methods.rope import Grounded, RoPE, inside
from .registry import create, registered
from .rotary import (
    LENGTH_DEPENDENT,
    Ropes,
    configs,
    is_told_positions,
    main_rope,
    prepare,
    read_ropes,
    write_frequencies,
)
from .turning import Source

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Patch:
    """What is in force on a model: kept as ``_hf_posenc_patch`` on the module that owns the rotation."""

    method: Method
    journal: Journal
    root: PreTrainedModel

    def revert(self, owner: PreTrainedModel) -> None:
        """Undo it, but leave an attention implementation that was chosen meanwhile."""
        owners = [one.owner for one in locate(self.root).each()]
        live = [one.config._attn_implementation for one in owners]
        chosen = [next((stock for stock, name in attention.NAMES.items() if name == one), one) for one in live]
        self.journal.revert()
        for one, implementation in zip(owners, chosen, strict=True):
            one.config._attn_implementation_internal = implementation

    def replay(self, owner: PreTrainedModel) -> None:
        """Make it again, on the attention implementation that is in force now."""
        owners = [one.owner for one in locate(self.root).each()]
        chosen = [one.config._attn_implementation for one in owners]
        self.journal.replay()
        for one, implementation in zip(owners, chosen, strict=True):
            one.config._attn_implementation_internal = implementation
            if "_hf_posenc" in vars(one) and implementation in attention.NAMES:
                attention.keep_implementation(one)


def patch(model: Model, method: str | Method | type[Method], *, tokenizer: Any = None, **parameters: Any) -> Model:
    """Give a loaded model another positional encoding, in place.

    A scheme already in force is replaced: factors always count from the model as it was trained. If anything is
    refused, the model stays exactly as it was.

    Args:
        model: a transformers model, or a wrapper such as PEFT's around one. The whole model: a configuration outside
            of what is given is not reached, and could not be saved.
        method: ``"yarn"``, ``"yarn:factor=4"``, ``hf_posenc.YaRN(factor=4)``, ``"rerope:window=2048+yarn:factor=2"``
        tokenizer: its ``model_max_length`` becomes the new length, so that it does not cut at the old one; a method
            without a length of its own (``abf``, ``dynamic_yarn``, ``dynamic_ntk`` unless given a factor, ``rerope``)
            leaves it
        parameters: of the method, such as ``factor=4``

    Returns:
        The same object.

    Raises:
        ValueError: unknown method or parameter, a value out of range, or (``UnsupportedMethodError``) a method that
            this model cannot take; the text says what to do.
        TypeError: no transformers model, or a parameter of the wrong type.
    """
    chosen = create(method, **parameters)
    _put(model, chosen, tokenizer)
    native = locate(model).native
    if chosen.is_foreign and not (native is not None and isinstance(chosen, native.own)):
        logger.warning("%s: a model that was trained with other positions has to be fine-tuned with these.", chosen)
    return model


def _put(model: nn.Module, chosen: Method, tokenizer: Any = None) -> None:
    root, owner = _root_and_owner(model, chosen)
    previous = _patch_of(owner)
    if previous is not None:
        if previous.root is not root:
            raise ValueError(
                f"{previous.method} was put on the inner {type(previous.root).__name__} of this "
                f"{type(root).__name__}, or the other way round: unpatch that one first, then patch the whole model."
            )
        previous.revert(owner)
    detached = _detach_configs(model) if previous is None else []
    base, journal = Journal(), Journal()
    try:
        # A scheme that only the configuration knows, after a plain load, counts as one in force.
        _forget_record(locate(model), base)
        applied = _apply(model, chosen, tokenizer, journal)
        adapters.freeze_learned(model, applied)
        journal.set(owner, "_hf_posenc_patch", Patch(applied, journal, root))
    except BaseException as error:
        journal.revert()
        base.revert()
        for module, name, config in detached:
            setattr(module, name, config)
        if previous is not None:
            previous.replay(owner)
        if isinstance(error, UnsupportedMethodError):
            raise _refusal(model, chosen, error) from error
        raise


def unpatch(model: Model) -> Model:
    """Take the scheme off again: logits, configuration and state dict are those from before ``patch``.

    Raises:
        ValueError: no scheme is in force.
    """
    owner = locate(model).owner
    patch_in_force = _patch_of(owner)
    if patch_in_force is None:
        raise ValueError(
            "No scheme is in force on this model. If it was saved with one, load it with hf_posenc.from_pretrained "
            "or call hf_posenc.restore(model) first."
        )
    patch_in_force.revert(owner)
    return model


@contextmanager
def patched(model: Model, method: str | Method | type[Method], **parameters: Any) -> Iterator[Model]:
    """``patch`` for the length of a ``with`` block; the scheme from before, if any, comes back."""
    owner = locate(model).owner
    previous = _patch_of(owner)
    patch(model, method, **parameters)
    try:
        yield model
    finally:
        if _patch_of(owner) is not None:
            unpatch(model)
        if previous is not None:
            previous.replay(owner)


def current(model: nn.Module) -> Method | None:
    """The method in force on a model, or None: also where no method can be."""
    try:
        patch_in_force = _patch_of(locate(model).owner)
    except UnsupportedMethodError:
        return None
    return patch_in_force.method if patch_in_force else None


def methods(model: nn.Module | None = None) -> list[str]:
    """Names of all methods; with a model, of those that it can take.

    A checkpoint whose own scaling changes with each call takes a position map only over a frequency method, so those
    are left out there.
    """
    if model is None:
        return list(registered())
    try:
        family = locate(model)
        ropes = read_ropes(family)
        main_rope(family, ropes)
    except UnsupportedMethodError:
        return []
    able: list[type[Method]] = [EmbeddingMethod, NoPE if family.native else FrequencyMethod]
    if family.native is not None:
        try:
            family.native.check_use()
        except UnsupportedMethodError:
            return ["learned"] if embeddings.learned_table(family).requires_grad else []
    try:
        plans = [plan for one in family.each() for plan in (one.native.plans(one) if one.native else twin.plan(one))]
        for module in model.modules():
            adapters.refuse_prefixes(module, "a method inside attention")
        able.append(BiasMethod)
        able += [RoPE] if family.native else [LengthMethod]
        able += [PositionMap] if _takes_position_maps(family, ropes) else []
        able += _beside_rotation(family, plans)
    except UnsupportedMethodError:
        pass
    fit = {name: method for name, method in registered().items() if issubclass(method, tuple(able))}
    return [name for name, method in fit.items() if family.native is not None or method is not RoPE]


def _beside_rotation(family: Family, plans: list[twin.Plan]) -> list[type[Method]]:
    """The methods on top of a rotation, or by layer, that fit."""
    if family.native is not None:
        return []
    turning, live = [plan for plan in plans if plan.source is not None], live_modules(family.owner)
    fit: list[type[Method]] = [Layerwise] if all(plan.given for plan in turning) else []
    on_top = [method for method in registered().values() if issubclass(method, OnTop)]
    return fit + [one for one in on_top if all(stacked.fits(one, plan, live[plan.name]) for plan in turning)]


def _takes_position_maps(family: Family, ropes: Ropes) -> bool:
    """Whether position maps fit with the scaling that the checkpoint came with."""
    if family.native is not None:
        return False
    entry = persistence.recorded(family.root.config)
    parameters = entry["original"]["rope_parameters"] if entry else family.config.rope_parameters
    entries = [one for one in parameters.values() if isinstance(one, dict)] if is_nested(parameters) else [parameters]
    return not any(one.get("rope_type") in LENGTH_DEPENDENT for one in entries) and all(
        is_told_positions(site) for index, site in enumerate(family.sites) if ropes[index]
    )


def restore(model: Model) -> Model:
    """Put in force the scheme that ``model.config`` records, on a model that plain transformers loaded.

    Raises:
        ValueError: the configuration records none, or one that learned something, which a plain load has dropped.
    """
    family = locate(model)
    if _patch_of(family.owner) is not None:
        return model
    entry = persistence.recorded(family.root.config)
    if entry is None:
        raise ValueError("config.hf_posenc is not there: this model was not saved with a scheme.")
    _put_back(model, entry["method"], copy.deepcopy(family.root.config))
    if any(persistence.LEARNED in name.split(".") for name in model.state_dict()):
        unpatch(model)
        raise ValueError(
            f"{entry['method']!r} learned something that a plain load has dropped: load the model with "
            "hf_posenc.from_pretrained."
        )
    return model


def from_pretrained(path: str | Path, **kwargs: Any) -> Any:
    """Load a model folder, hub id or PEFT adapter folder, with the scheme it was saved with in force.

    Args:
        path: of the model or adapter
        kwargs: for transformers' ``from_pretrained``; GGUF files (``gguf_file=...``) come as a plain float model

    Raises:
        ValueError: an adapter's scheme does not fit its base model.
    """
    if Path(path, persistence.ADAPTER).exists():
        return _load_adapter(path, **kwargs)
    model, saved = persistence.load_base(path, **kwargs)
    entry = persistence.recorded(saved)
    if entry is None:
        return model
    _put_back(model, entry["method"], saved)
    persistence.load_learned(model, path, **kwargs)
    return model


def _put_back(model: nn.Module, method: str, saved: PreTrainedConfig) -> None:
    """Patch with the method that the configuration ``saved`` records."""
    entry = persistence.recorded(saved)
    stretched = entry is not None and entry.get("in_weights") and entry["method"] == method
    kept = embeddings.learned_table(locate(model)) if stretched else None
    _put(model, create(method))
    if kept is not None:
        embeddings.learned_table(locate(model)).data.copy_(kept)
    persistence.warn_of_edits(saved, locate(model).root.config)


def _load_adapter(path: str | Path, **kwargs: Any) -> Any:
    from peft import PeftConfig, PeftModel

    entry = persistence.read_sidecar(path)
    settings = PeftConfig.from_json_file(str(Path(path, persistence.ADAPTER)))
    settings.pop(persistence.WARNING, None)
    config = PeftConfig.from_peft_type(**settings)
    base_path = config.base_model_name_or_path
    if not base_path:
        raise ValueError(
            f"{path} does not say which base model it belongs to: load that one, call hf_posenc.patch(model, "
            f"{entry['method'] if entry else None!r}), then PeftModel.from_pretrained(model, {str(path)!r})."
        )
    settings = {key: kwargs.pop(key) for key in ("adapter_name", "is_trainable") if key in kwargs}
    if entry is None:
        base = from_pretrained(base_path, **kwargs)
    else:
        base, saved = persistence.load_base(base_path, **kwargs)
        persistence.check_base(entry, persistence.without_scheme(base.config), path)
        _put_back(base, entry["method"], copy.deepcopy(base.config))
        of_base = persistence.recorded(saved)
        if of_base is not None and of_base["method"] == entry["method"]:
            persistence.load_learned(base, base_path, **kwargs)
    return PeftModel.from_pretrained(base, path, config=config, **settings)


def _apply(model: nn.Module, method: Method, tokenizer: Any, journal: Journal) -> Method:
    """Make all changes; returns the method with what it took from the checkpoint."""
    family = locate(model)
    ropes = read_ropes(family)
    rope = main_rope(family, ropes)
    if family.native is not None and isinstance(method, RoPE | Grounded):
        rope = (method.ground if isinstance(method, Grounded) else method).rotation(rope)
    method = method.fill(rope)
    before = copy.deepcopy(family.config)
    original = persistence.original_of(family.config, rope.length)
    if family.native is not None:
        original |= family.native.settings(method)
    length = method.extended_length(rope)
    if length is not None and length < rope.configured_length:
        logger.warning(
            "%s: %s reads %d tokens, but the checkpoint's own scaling, which it replaces, reads %d.",
            family.title, method, length, rope.configured_length,
        )  # fmt: skip
    if length is not None and tokenizer is not None:
        journal.set(tokenizer, "model_max_length", length)
    # transformers warns of a factor that is not the ratio of the lengths, which in a stack is that of the base alone.
    _set_length(family, method.base.extended_length(rope) if isinstance(method, Stack) else length, journal)
    if family.native is None:
        native = _change_rotation(model, family, method, ropes, journal)
        _set_length(family, length, journal)
        twin.align_settings(locate(model), before, journal)
    else:
        native = _replace_native(model, family, method, rope, journal)
    if not native and text_config_of(family.root.config) is not family.root.config:
        journal.set(family.root, "_hf_posenc_one_axis", "mrope_section" not in str(rope.parameters))
        journal.before_forward(family.root, positions.note_mask)
        journal.after_forward(family.root, positions.forget_mask, always=True)
    persistence.record(model, family, method, original, native, journal)
    logger.info(
        "%s: %s in place of %s%s, context %s -> %s tokens.", family.title, method,
        family.native.title if family.native else f"the rotation of {len(family.sites)} module(s)",
        "" if native else ", which plain transformers cannot express", rope.length, length or "open",
    )  # fmt: skip
    return method


def _own_configs(family: Family) -> list[PreTrainedConfig]:
    """Those of the whole model and of every model in it that is told positions."""
    found = (family.root.config, *(one.config for one in family.each()))
    return list({id(config): config for config in found}.values())


def _set_length(family: Family, length: int | None, journal: Journal) -> None:
    if length is not None:
        for config in _own_configs(family) if family.native else [family.config, *configs(family)]:
            journal.set(config, "max_position_embeddings", length)


def _change_rotation(model: nn.Module, family: Family, method: Method, ropes: Ropes, journal: Journal) -> bool:
    """Returns whether plain transformers can build the same."""
    if isinstance(method, RoPE | Grounded):
        raise UnsupportedMethodError(
            f"{family.title} has a rotation of its own: leave 'rope' out, or take 'abf' for another base."
        )
    if isinstance(method, EmbeddingMethod):
        write_frequencies(family, NoPE(), ropes, journal)
        return embeddings.put(locate(model), method, journal)
    if isinstance(method, FrequencyMethod) and not method.acts_in_attention:
        mark = len(journal.entries)
        try:
            native = write_frequencies(family, method, ropes, journal)
            _check_width(locate(model), method, ropes)
            return native
        except UnsupportedMethodError:
            if not isinstance(method, LengthMethod):
                raise
            journal.rollback(mark)
    assert isinstance(method, AttentionMethod)
    plans, rope = twin.plan(family), main_rope(family, ropes)
    method.check(rope)
    top = method.top if isinstance(method, Stack) else method
    if isinstance(top, Layerwise):
        layerwise.change(model, family, method, ropes, journal)
        return False
    prepare(family, method, ropes, journal)
    capacity = None if isinstance(method, LengthMethod | BiasMethod) else method.capacity(rope)
    changed = locate(model)
    attention.install(changed, method, top, attention.rotations(changed, ropes), plans, model, journal, capacity)
    return False


def _replace_native(model: nn.Module, family: Family, method: Method, rope: Rope, journal: Journal) -> bool:
    """Give a model without a rotation something else; returns whether plain transformers can build the same."""
    assert family.native is not None
    if isinstance(method, NoPE):
        family.native.silence(journal)
        return False
    if isinstance(method, EmbeddingMethod):
        return embeddings.put(family, method, journal)
    if family.native.knows(method):
        return family.native.adopt(method, journal)
    top: AttentionMethod
    frequencies, capacity = rope.frequencies, None
    if isinstance(method, RoPE | Grounded):
        method.check(rope)
        top, frequencies = inside(method, rope)
        capacity = method.capacity(rope)
    elif isinstance(method, BiasMethod):
        if method.keep_rope:
            raise UnsupportedMethodError(f"{family.title} has no rotation to keep: leave out keep_rope.")
        top = method
    else:
        asked = method.top if isinstance(method, Stack) else method
        require_rotation(family, str(method), isinstance(asked, FrequencyMethod | PositionMap))
    plans = [(one, family.native.plans(one)) for one in family.each()]
    family.native.silence(journal)
    for one, mine in plans:
        sources = {0: Source(rope, frequencies)}
        attention.install(one, method, top, sources, mine, model, journal, capacity)
    return False


def _check_width(family: Family, method: FrequencyMethod, ropes: Ropes) -> None:
    """Where a method changes how many dimensions turn, see on a twin that the model really does it."""
    width = {2 * len(method.frequencies(rope)[0]) for slots in ropes.values() for _, rope in slots}
    if width == {rope.dim for slots in ropes.values() for _, rope in slots}:
        return
    found = {plan.stop - plan.start for plan in twin.plan(family) if plan.source is not None}
    if found != width:
        raise UnsupportedMethodError(f"{family.title} turns {found} dimensions whatever its configuration says.")


def _forget_record(family: Family, journal: Journal) -> None:
    """Bring a model that was loaded with a scheme in its configuration back to what it was before the scheme."""
    entry = persistence.recorded(family.root.config)
    if entry is None:
        return
    if entry.get("in_weights"):
        embeddings.forget(family, create(entry["method"]), entry["original"]["length"], journal)
    before, plain = copy.deepcopy(family.config), text_config_of(persistence.without_scheme(family.root.config))
    own = _own_configs(family)
    # A family may keep rotary configurations of its own, derived from the model's when it is built.
    fresh = [(config, plain) for config in own] if family.native else [(family.config, plain)]
    fresh += [
        (site.config, built.config)
        for site, built in zip(family.sites, rotary_sites(twin.build(family.owner, plain)), strict=True)
    ]
    for config, original in fresh:
        for name in persistence.settings_of(entry):
            if hasattr(original, name):
                journal.set(config, name, copy.deepcopy(getattr(original, name)))
            elif name in vars(config):
                journal.forget(config, name)
    for config in own:
        journal.forget(config, "hf_posenc")
        journal.forget(config, "attn_implementation")
        if str(config._attn_implementation).startswith("hf_posenc"):
            stock = family.root.get_correct_attn_implementation(None)
            journal.set(config, "_attn_implementation_internal", stock)
    for site in family.sites:
        journal.swap(site.parent, site.name, site.rebuild(site.config))
    if family.native is None:
        twin.align_settings(locate(family.root), before, journal)
    else:
        family.native.align(journal)


def _root_and_owner(model: nn.Module, method: Method) -> tuple[PreTrainedModel, PreTrainedModel]:
    try:
        family = locate(model)
        return family.root, family.owner
    except UnsupportedMethodError as error:
        raise _refusal(model, method, error) from error


def _refusal(model: nn.Module, method: Method, reason: UnsupportedMethodError) -> UnsupportedMethodError:
    able = methods(model)
    offer = f"It can take: {', '.join(able)}." if able else "None of the methods of this version fits it."
    return UnsupportedMethodError(f"{method.name!r} cannot be put on {type(model).__name__}: {reason} {offer}")


def _patch_of(owner: PreTrainedModel) -> Patch | None:
    return vars(owner).get("_hf_posenc_patch")


def _detach_configs(model: nn.Module) -> list[tuple[nn.Module, str, PreTrainedConfig]]:
    """Give the model configurations of its own, so that models built from the same objects do not follow.

    Returns:
        What was replaced, (module, attribute, configuration).
    """
    replaced: list[tuple[nn.Module, str, PreTrainedConfig]] = []
    copies: dict[int, Any] = {}
    family = locate(model)
    text = text_config_of(family.root.config)
    if family.config is not text and family.config.to_dict() == text.to_dict():
        # Parted by a patch of the inner model that was taken off again.
        copies[id(family.config)] = copy.deepcopy(text, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                replaced.append((module, name, value))
                setattr(module, name, copy.deepcopy(value, copies))
    return replaced
