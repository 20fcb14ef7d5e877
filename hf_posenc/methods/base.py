"""What a method is: a frozen dataclass of its parameters and the one function that its kind asks for."""

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Rope:
    """The rotation that a model was trained with, before any scaling, as one method sees it.

    Attributes:
        frequencies: (dim / 2,) float64, radians per token of every rotated pair; zero where a pair never turns
        theta: base of the frequencies
        length: trained context in tokens, ``original_max_position_embeddings``
        configured_length: ``max_position_embeddings`` of the checkpoint, longer than ``length`` if it was extended
        head_dim: width of a query or key head, of which ``dim`` dimensions rotate
        rope_type: transformers' name of the unscaled type, "default" for nearly all
        parameters: the entry of ``config.rope_parameters`` that the checkpoint came with
    """

    frequencies: torch.Tensor
    theta: float
    length: int
    configured_length: int
    head_dim: int
    rope_type: str
    parameters: dict[str, Any]

    @property
    def dim(self) -> int:
        """Number of rotated dimensions."""
        return 2 * self.frequencies.shape[-1]

    @property
    def pairs(self) -> torch.Tensor:
        """Index k of every pair in ``theta ** (-2k / dim)``: (dim / 2,). Some models keep their pairs in another
        order; pairs that never turn count by their place."""
        places = torch.arange(self.dim // 2).to(self.frequencies)
        turning = self.frequencies > 0
        exponents = torch.where(turning, self.frequencies, 1.0).log() / -math.log(self.theta)
        indices = exponents * self.dim / 2
        whole = indices.round()
        return torch.where(turning, torch.where((indices - whole).abs() < 1e-2, whole, indices), places)

    def moved(self, device: torch.device, dtype: torch.dtype) -> "Rope":
        """The same with its frequencies on ``device``."""
        return replace(self, frequencies=self.frequencies.to(device, dtype))


@dataclass(frozen=True)
class Traits:
    """Where a method stands among positional encodings (arXiv 2102.11090); shown by ``hf-posenc methods``."""

    acts_on: str
    keeps_stock_kernels: bool
    needs_training: bool
    reads_past_trained_length: bool
    relative: bool = True
    learned: bool = False
    symmetric: bool = False
    monotone: bool = False
    translation_invariant: bool = True


@dataclass(frozen=True)
class Method(ABC):
    """Base of every positional encoding. Parameters are the fields; ``str()`` is the string that rebuilds it."""

    name: ClassVar[str]
    traits: ClassVar[Traits]

    @classmethod
    def parameter_names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    @classmethod
    def required_parameters(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]

    def __str__(self) -> str:
        given = [
            f"{field.name}={_spell(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (":" + ",".join(given) if given else "")

    def extended_length(self, rope: Rope) -> int | None:
        """Context in tokens that the model is meant for afterwards; None where the method does not say."""
        return None

    @property
    def acts_in_attention(self) -> bool:
        """Whether the attention function takes part; otherwise the rotary module alone is changed."""
        return False

    @property
    def is_foreign(self) -> bool:
        """Whether it is another kind of encoding, which means nothing to a model that was trained without it."""
        return False

    def fill(self, rope: Rope) -> "Method":
        """The method with what it leaves open taken from the checkpoint."""
        return self


class FrequencyMethod(Method):
    """A method that changes the frequencies once, for all tokens: stock kernels stay."""

    @abstractmethod
    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        """The keys by which transformers itself knows this method, to lay over the unscaled ones."""

    @abstractmethod
    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        """The formula: (dim / 2,) float64 radians per token, and the factor on cos and sin."""

    @property
    def is_fixed(self) -> bool:
        """Whether the frequencies are those whatever the length of a text."""
        return True


class AttentionMethod(Method):
    """A method that the attention function carries out, on top of what the rotary modules do.

    Attributes:
        over_frequencies: whether it leaves the frequencies alone, so that a frequency method can stand under it
    """

    over_frequencies: ClassVar[bool] = False

    @property
    def acts_in_attention(self) -> bool:
        return True

    def capacity(self, rope: Rope) -> int | None:
        """Tokens beyond which distances appear that were never trained; None where that never happens by its doing."""
        return self.extended_length(rope)

    def check(self, rope: Rope) -> None:
        """Refuse, or warn of, what this model was not trained for.

        Raises:
            ValueError: a distance beyond the trained length.
        """


class LengthMethod(AttentionMethod):
    """A method whose frequencies depend on how long the text before a query is; the attention function turns
    queries and keys. The rule is causal, query i uses length i + 1, so that a text read in one pass, in chunks or
    token by token gives the same states."""

    @abstractmethod
    def group(self, lengths: torch.Tensor, rope: Rope) -> torch.Tensor:
        """The length whose frequencies serve a text of ``lengths`` tokens, any shape, int64. ``rope.length`` or less
        means: those that the cache holds."""

    @abstractmethod
    def turn(self, rope: Rope, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is left to turn at grouped ``lengths``, beyond ``trained``: frequencies (*lengths.shape, pairs) of the
        first pairs that turn, and the factor (*lengths.shape) on the turned dimensions of query and key alike."""

    def trained(self, rope: Rope) -> tuple[torch.Tensor, float]:
        """Frequencies (dim / 2,) and factor on cos and sin that the rotary module applies and the cache so holds."""
        return rope.frequencies, 1.0


@dataclass(frozen=True)
class Extension(FrequencyMethod):
    """A frequency method given by ``factor``, new length / original length, or by ``target_length`` in tokens."""

    factor: float | None = None
    target_length: int | None = None

    def __post_init__(self) -> None:
        if (self.factor is None) == (self.target_length is None):
            raise ValueError(f"Give {self.name!r} either factor (1 or more) or target_length (tokens).")
        if self.factor is not None:
            require_number(self, "factor", at_least=1)
        if self.target_length is not None:
            require_integer(self, "target_length", at_least=1)

    def scale(self, rope: Rope) -> float:
        """The extension factor on this model, 1 or more.

        Raises:
            ValueError: ``target_length`` is shorter than the model already reads.
        """
        if self.factor is not None:
            return float(self.factor)
        assert self.target_length is not None
        if self.target_length < rope.length:
            raise ValueError(
                f"target_length={self.target_length} is below the {rope.length} tokens the model was trained on: "
                "give a longer one, or unpatch the model."
            )
        return self.target_length / rope.length

    def extended_length(self, rope: Rope) -> int:
        scale = self.scale(rope)
        return self.target_length or int(rope.length * scale)


def require_number(
    method: Method, name: str, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> None:
    """Check a real parameter.

    Raises:
        TypeError: not a number.
        ValueError: not finite or out of range.
    """
    value = getattr(method, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} of {method.name!r} is a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} of {method.name!r} is a finite number, got {value!r}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} of {method.name!r} is at least {at_least}, got {value!r}.")
    if above is not None and value <= above:
        raise ValueError(f"{name} of {method.name!r} is above {above}, got {value!r}.")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name} of {method.name!r} is at most {at_most}, got {value!r}.")


def require_integer(method: Method, name: str, at_least: int) -> None:
    """Check a whole-number parameter; errors as for ``require_number``."""
    if isinstance(getattr(method, name), bool) or not isinstance(getattr(method, name), int):
        raise TypeError(f"{name} of {method.name!r} is a whole number, got {getattr(method, name)!r}.")
    require_number(method, name, at_least=at_least, at_most=1 << 40)


def require_flag(method: Method, name: str) -> None:
    """Check a parameter that is true or false; raises TypeError."""
    if not isinstance(getattr(method, name), bool):
        raise TypeError(f"{name} of {method.name!r} is true or false, got {getattr(method, name)!r}.")


def _spell(value: Any) -> str:
    if isinstance(value, Method):
        return repr(str(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{_spell(key)}:{_spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list | tuple):
        return "[" + ",".join(_spell(item) for item in value) + "]"
    return str(value)
