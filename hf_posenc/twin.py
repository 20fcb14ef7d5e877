"""A twin: the model as its class builds it from a configuration, without weights. It shows what a model does with
positions while no weight of the real one is read."""

import copy
import inspect
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .families import Family, UnsupportedMethodError, Wrapper, live_modules, rotary_sites
from .functional import Pairing
from .journal import Journal
from .weightless import Weightless

# A prime that is no width of any model: a dimension of this size holds the rows of the probe.
_ROWS = 37
_NO_INTERFACE = "The attention of {} does not pass through transformers' attention interface; {} not."
_OTHERS = "frequency methods (pi, ntk, abf, yarn, llama3 ...) work on it, methods inside attention do"


def _no_interface(family: Family) -> str:
    others = _OTHERS if family.native is None else "methods outside of it work on it, those inside do"
    return _NO_INTERFACE.format(family.title, others)


def build(owner: PreTrainedModel, config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """A model of the class of ``owner`` on the meta device: shapes, modules and settings, no weights."""
    config = copy.deepcopy(config)
    if attention is not None:
        config._attn_implementation = attention
        config._experts_implementation = "eager"  # grouped kernels want a dtype and a device
    with torch.device("meta"):
        return type(owner)(config).eval()


def describes(family: Family) -> bool:
    """Whether a fresh model of the configuration in force has rotary modules with the live ones' parameters; not so
    where a family derives those of one layer from another's."""
    fresh = rotary_sites(build(family.owner, family.config))
    return [site.config.rope_parameters for site in fresh] == [site.config.rope_parameters for site in family.sites]


def align_settings(family: Family, before: PreTrainedConfig, journal: Journal, resized: Collection[str] = ()) -> None:
    """Bring numbers that modules derive from their configuration to what the edited one gives, but in layers that turn
    by a rotation of their own.

    Args:
        resized: names of the weights that were given another shape

    Raises:
        UnsupportedMethodError: the edited configuration asks for weights of another shape.
    """
    live = live_modules(family.owner)
    rotary = {id(site.module) for site in family.sites}
    for name, key, value in derived(family, before, family.config, resized):
        module = live.get(name)
        own = module is None or id(module) in rotary or "_hf_posenc_aside" in vars(module)
        if not own and key in vars(module):
            journal.set(module, key, value)


def derived(
    family: Family, before: PreTrainedConfig, after: PreTrainedConfig, resized: Collection[str] = ()
) -> Iterator[tuple[str, str, Any]]:
    """Numbers, as (module, name, value), that modules derive otherwise from another configuration.

    The softmax scale of latent attention under YaRN is one: it is computed when the module is built.

    Args:
        resized: names of weights that may take another shape

    Raises:
        UnsupportedMethodError: others would.
    """
    old, new = build(family.owner, before), build(family.owner, after)
    if {name: weight.shape for name, weight in old.named_parameters() if name not in resized} != {
        name: weight.shape for name, weight in new.named_parameters() if name not in resized
    }:
        raise UnsupportedMethodError(
            f"This change gives {family.title} weights of another shape, so it cannot be made."
        )
    counterparts = dict(old.named_modules())
    for name, module in new.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, int | float) and value != vars(counterparts[name]).get(key):
                yield name, key, value


@dataclass
class Plan:
    """How one attention module uses the rotation.

    Attributes:
        name: of the attention module inside the owner
        source: index of the rotary (site, slot) pair that it uses; None if it carries no rotation
        start, stop: the dimensions of a head that turn
        pairing, sign: which dimensions form a pair, and in which sense they turn
        keywords: names of the keyword arguments that reach the attention function
        heads: query heads
        width: dimensions of a head
        value_width: dimensions of a value
        given: whether the module is handed the rotation as an argument
        donor: the attention module whose keys and values it takes, where it makes none itself
        ignored: keyword arguments by which the model adds positions of its own, which were taken away
    """

    name: str
    source: int | None
    start: int = 0
    stop: int = 0
    pairing: Pairing = "half"
    sign: int = 1
    keywords: frozenset[str] = frozenset()
    sliding_window: int | None = None
    heads: int = 0
    width: int = 0
    value_width: int = 0
    given: bool = False
    donor: str | None = None
    ignored: frozenset[str] = frozenset()


@dataclass
class Probe:
    """Collects what arrives at the attention function while a twin runs."""

    records: list[tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]] = field(
        default_factory=list
    )

    def attend(self, module, query, key, value, attention_mask, **kwargs):
        self.records.append((module, query.detach(), key.detach(), value.detach(), kwargs))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


class _Active(threading.local):
    """The probe of the thread that runs one: models in other threads go on undisturbed."""

    probe: Probe | None = None


active = _Active()


def plan(family: Family, attention: str = "hf_posenc") -> list[Plan]:
    """Read from one forward of a twin which dimensions every attention module turns, how, and by which frequencies.

    One token goes through in several rows at once. The rotary modules answer (cos, sin) = (1, 0) in row 0, (0, 0) in
    row 1, and in every further row (0, 1) for one set of frequencies and (1, 0) for the others; differences between
    the rows of what arrives at the attention function, registered as ``attention``, tell the rest.

    Raises:
        UnsupportedMethodError: attention that does not pass through transformers' attention interface, or that
            does more to queries and keys after the rotation than a rotation can be taken out of.
    """
    try:
        twin = build(family.owner, family.config, attention=attention)
    except (KeyError, ValueError):
        raise UnsupportedMethodError(_no_interface(family)) from None
    sources = [(index, slot) for index, site in enumerate(family.sites) for slot in site.slots]
    rows = max(_ROWS, 2 + len(sources))
    sites = rotary_sites(twin)
    if len(sites) != len(family.sites):
        raise UnsupportedMethodError(
            f"{family.title} has {len(family.sites)} rotary modules, a fresh one of its configuration {len(sites)}: "
            "bring the configuration in line with the model first."
        )
    for index, site in enumerate(sites):
        real = type(site.module)(config=site.config)
        site.parent._modules[site.name] = _Stub(
            real, rows, {slot.label: sources.index((index, slot)) for slot in site.slots}
        )
    given_to = _Receivers(twin)
    probe = run(family, twin, rows)
    if not probe.records:
        raise UnsupportedMethodError(_no_interface(family))
    names = {id(module): name for name, module in twin.named_modules()}
    plans: dict[str, Plan] = {}
    donors: dict[str, torch.Tensor] = {}
    for module, query, key, value, kwargs in probe.records:
        name = names[id(module)]
        if not torch.equal(value[0], value[1]):
            raise UnsupportedMethodError(
                f"{name} of {family.title} turns values along with keys; frequency methods work on it, methods inside "
                "attention do not."
            )
        donor = next((other for other, made in donors.items() if other != name and torch.equal(made, value)), None)
        donors.setdefault(name, value)
        found = replace(
            _read(family, name, query, key, kwargs, len(sources)),
            value_width=value.shape[-1],
            given=module in given_to.modules,
            donor=donor,
        )
        if plans.setdefault(found.name, found) != found:
            raise UnsupportedMethodError(f"{found.name} of {family.title} uses two different rotations.")
    return list(plans.values())


def run(family: Family, twin: PreTrainedModel, rows: int = _ROWS, length: int = 1) -> Probe:
    """One forward of a twin with ``length`` tokens; returns what arrived at the attention function.

    Raises:
        UnsupportedMethodError: it does not go through without weights.
    """
    probe = Probe()
    with _probing(probe), torch.no_grad(), Weightless(rows):
        tokens = torch.arange(length).expand(rows, length).clone()
        accepted = inspect.signature(twin.forward).parameters
        optional = {"position_ids": tokens.clone(), "use_cache": False}
        given = {name: value for name, value in optional.items() if name in accepted}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            given["hf_posenc"] = probe
        try:
            twin(input_ids=tokens, **given)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise UnsupportedMethodError(
                f"What {family.title} does with positions cannot be read without its weights ({type(error).__name__}: "
                f"{error}); frequency methods may work on it, methods inside attention do not."
            ) from error
    return probe


def plan_unrotated(family: Family) -> list[Plan]:
    """Plans for a model without a rotation: all of every head is free to turn, by one set of frequencies."""
    return [replace(layer, source=0, start=0, stop=layer.width) for layer in plan(family)]


def _read(family: Family, name: str, query, key, kwargs: dict[str, Any], sources: int) -> Plan:
    keywords = frozenset(kwargs)
    if any("indices" in keyword for keyword in keywords):
        raise UnsupportedMethodError(
            f"{name} of {family.title} selects keys by an indexer with rotated keys of its own; frequency methods "
            "work on it, methods inside attention do not."
        )
    heads, width = query.shape[1], query.shape[3]
    # (rows, heads, 1, dim) -> (rows, heads, dim)
    query, key = query[:, :, 0].float(), key[:, :, 0].float()
    using = [source for source in range(sources) if not torch.equal(query[0], query[2 + source])]
    window = kwargs.get("sliding_window")
    if not using:
        return Plan(name, None, keywords=keywords, sliding_window=window, heads=heads, width=width)
    if len(using) > 1:
        raise UnsupportedMethodError(f"{name} of {family.title} turns by several sets of frequencies at once.")
    moved = (query[0] != query[1]).any(0).nonzero().flatten().tolist()
    start, stop = moved[0], moved[-1] + 1
    for pairing in ("half", "interleaved"):
        for sign in (1, -1):
            if all(_turns(states, using[0], start, stop, pairing, sign) for states in (query, key)):
                return Plan(name, using[0], start, stop, pairing, sign, keywords, window, heads, width)
    raise UnsupportedMethodError(
        f"{name} of {family.title} changes queries and keys after the rotation (a weighted norm, say), so no other "
        "rotation can be put on top; frequency methods work on it, methods inside attention do not."
    )


def _turns(states: torch.Tensor, source: int, start: int, stop: int, pairing: str, sign: int) -> bool:
    """Whether row ``2 + source`` is row 0 turned by a right angle on dimensions start to stop."""
    upright, turned = states[0] - states[1], states[2 + source] - states[1]
    width = upright.shape[-1]
    outside = [index for index in range(width) if not start <= index < stop]
    if (stop - start) % 2 or upright[:, outside].any() or turned[:, outside].any():
        return False
    span = upright[:, start:stop]
    if pairing == "half":
        first, second = span.chunk(2, dim=-1)
        expected = torch.cat((-second, first), dim=-1)
    else:
        expected = torch.stack((-span[:, 1::2], span[:, 0::2]), dim=-1).flatten(-2)
    return torch.allclose(turned[:, start:stop], sign * expected, rtol=1e-3, atol=1e-5)


@contextmanager
def _probing(probe: Probe):
    active.probe = probe
    try:
        yield
    finally:
        active.probe = None


class _Receivers:
    """Collects the modules of a twin that are handed the answer of a stub as an argument."""

    def __init__(self, twin: nn.Module):
        self.modules: set[nn.Module] = set()
        for module in twin.modules():
            module.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            part = value[0] if isinstance(value, tuple | list) and value else value
            if getattr(part, "_hf_posenc_stub", False):
                self.modules.add(module)


class _Stub(Wrapper):
    """Answers as a rotary module does, with the same angle for every dimension, by row."""

    def __init__(self, real: nn.Module, rows: int, sources: dict[str | None, int]):
        super().__init__(real)
        self.rows, self.sources = rows, sources

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        label = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        source = self.sources[label if label in self.sources else None]
        cos, sin = torch.ones(self.rows), torch.zeros(self.rows)
        cos[1] = cos[2 + source] = 0
        sin[2 + source] = 1
        if isinstance(out, torch.Tensor):
            return self._fill(out, torch.complex(cos, sin))
        # gptj-like modules return (sin, cos): at position 0 the sine vanishes.
        return tuple(self._fill(part, sin if not part.any() else cos) for part in out)

    def _fill(self, like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Answer in the shape ``(..., batch, length, dim)`` of ``like``."""
        shape = (*like.shape[:-3], self.rows, *like.shape[-2:])
        answer = values.view(-1, 1, 1).expand(shape).to(like.dtype).clone()
        answer._hf_posenc_stub = True  # type: ignore[attr-defined]
        return answer
