"""Names of methods, and the one string syntax for them: ``name:key=value,key=value``, joined with ``+``."""

import ast
import difflib
import re
from typing import Any, TypeVar

from .methods.base import AttentionMethod, FrequencyMethod, Method
from .methods.position_map import Stack

_METHODS: dict[str, type[Method]] = {}
# What transformers and others call them.
_ELSEWHERE = {"linear": "pi", "position_interpolation": "pi", "dynamic": "dynamic_ntk", "su": "longrope"}
MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method: MethodClass) -> MethodClass:
    """Class decorator: make a method known under its ``name``."""
    _METHODS[method.name] = method
    return method


def registered() -> dict[str, type[Method]]:
    """Every method by name, in alphabetical order."""
    return dict(sorted(_METHODS.items()))


def create(method: "str | Method | type[Method]", **parameters: Any) -> Method:
    """A method from a string, a class or an instance; ``parameters`` add to those in the string.

    Raises:
        ValueError: unknown name or unknown or impossible parameter, with what would be right.
        TypeError: something that is no method at all.
    """
    if isinstance(method, Method):
        if parameters:
            raise TypeError(f"{method!r} is already built: give its parameters there, not to patch().")
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return _build(method, parameters)
    if isinstance(method, str):
        return parse(method, **parameters)
    raise TypeError(f"A method is a string such as 'yarn:factor=4' or a hf_posenc class, got {method!r}.")


def parse(text: str, **parameters: Any) -> Method:
    """Read ``"yarn:factor=4,beta_fast=16"``, or a position map over a frequency method, joined by ``+``.

    Args:
        parameters: of the first method

    Raises:
        ValueError: as for ``create``.
    """
    first, *others = (
        _parse_one(text, part, parameters if index == 0 else {})
        for index, part in enumerate(_split(text.strip(), r"\+(?=\s*[a-z_])"))
    )
    return join(first, *others) if others else first


def join(*methods: Method) -> Method:
    """One method out of one inside attention, such as a position map, and a frequency method, in any order, over
    ``rope`` where a model has none.

    Raises:
        ValueError: others, or more of them, that would contend for the same thing.
    """
    from .methods.rope import Grounded, RoPE  # which registers itself here

    grounds = [method for method in methods if isinstance(method, RoPE)]
    maps: list[AttentionMethod] = [method for method in methods if _stands_over(type(method))]  # type: ignore[misc]
    bases = [method for method in methods if isinstance(method, FrequencyMethod)]
    known = len(grounds) + len(maps) + len(bases) == len(methods)
    if known and max(len(grounds), len(maps), len(bases)) == 1 and len(methods) > 1:
        inner: Method = Stack(maps[0], bases[0]) if maps and bases else [*maps, *bases][0]
        return Grounded(grounds[0], inner) if grounds else inner
    raise ValueError(
        f"{' + '.join(method.name for method in methods)} do not combine: give one, or one of "
        f"{', '.join(_maps())} over one frequency method, as in 'rerope:window=2048+yarn:factor=2', over 'rope' "
        "where a model has no rotation."
    )


def _stands_over(method: type[Method]) -> bool:
    """Whether a frequency method can stand under a method."""
    return issubclass(method, AttentionMethod) and method.over_frequencies and method.name != "rope"


def _maps() -> list[str]:
    return [name for name, method in registered().items() if _stands_over(method)]


def _parse_one(text: str, part: str, parameters: dict[str, Any]) -> Method:
    name, _, arguments = part.partition(":")
    name = name.strip()
    if name not in _METHODS:
        raise ValueError(_unknown("method", name, list(registered())))
    given = _arguments(text, arguments)
    twice = sorted(given.keys() & parameters.keys())
    if twice:
        raise ValueError(f"{', '.join(twice)} stands both in {text!r} and as an argument: give it once.")
    return _build(_METHODS[name], {**given, **parameters})


def _arguments(text: str, arguments: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if not arguments.strip():
        return parameters
    for piece in _split(arguments, ","):
        key, equals, value = piece.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"{piece.strip()!r} in {text!r} is not key=value, as in 'yarn:factor=4,beta_fast=32'.")
        if key in parameters:
            raise ValueError(f"{key} stands twice in {text!r}: give it once.")
        parameters[key] = _value(value.strip())
    return parameters


def _split(text: str, separator: str) -> list[str]:
    """The pieces between separators, a pattern, that stand outside of brackets and quotes."""
    pieces, start, depth, quote = [], 0, 0, ""
    for place, letter in enumerate(text):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth = max(depth - 1, 0)
        elif not depth and re.compile(separator).match(text, place):
            pieces.append(text[start:place])
            start = place + 1
    return [*pieces, text[start:]]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _build(method: type[Method], parameters: dict[str, Any]) -> Method:
    known = method.parameter_names()
    for key in parameters:
        if key not in known:
            raise ValueError(_unknown(f"parameter of {method.name!r}", key, known))
    missing = [name for name in method.required_parameters() if name not in parameters]
    if missing:
        raise ValueError(f"{method.name!r} needs {', '.join(missing)}, as in '{method.name}:{missing[0]}=...'.")
    return method(**parameters)


def _unknown(kind: str, name: str, known: list[str]) -> str:
    spelled = name.lower().replace("-", "_")
    close = difflib.get_close_matches(_ELSEWHERE.get(spelled, spelled), known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind}: {name!r}.{hint} Available: {', '.join(known) or 'none'}."
