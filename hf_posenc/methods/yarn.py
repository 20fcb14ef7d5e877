"""YaRN: fast pairs kept, slow pairs interpolated, a ramp between, and a temperature (Peng et al., arXiv 2309.00071).

    m_k = 1 - clamp((k - low) / (high - low), 0, 1)
    frequency_k * m_k + frequency_k / s * (1 - m_k),    cos and sin times 0.1 ln s + 1

``low`` and ``high`` are the pairs that turn ``beta_fast`` and ``beta_slow`` times within the trained context. The
ramp is linear in frequency, as in the authors' code; a variant linear in wavelength circulates and differs much.
Costs nothing at run time. Verified against tests/reference.py and transformers' own ``yarn``.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..functional import yarn_attention_factor, yarn_keep, yarn_range
from ..registry import register
from .base import Extension, Rope, Traits, require_number


@register
@dataclass(frozen=True)
class YaRN(Extension):
    """YaRN by ``factor``, or up to ``target_length`` tokens.

    ``attention_factor`` replaces the temperature. ``mscale`` and ``mscale_all_dim`` count as a ratio, and only when
    both are known, from here or from a YaRN checkpoint; on models with latent attention (DeepSeek) the second also
    scales the whole softmax, so that ``mscale=1,mscale_all_dim=1`` tempers unrotated dimensions too.
    """

    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    name = "yarn"
    traits = Traits("query and key", keeps_stock_kernels=True, needs_training=False, reads_past_trained_length=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ramp(self)
        if not isinstance(self.truncate, bool):
            raise TypeError(f"truncate of {self.name!r} is true or false, got {self.truncate!r}.")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                require_number(self, name, above=0)

    def rope_parameters(self, rope: Rope) -> dict[str, Any]:
        optional = {
            "attention_factor": None if self.attention_factor is None else float(self.attention_factor),
            "mscale": self._known(rope, "mscale"),
            "mscale_all_dim": self._known(rope, "mscale_all_dim"),
            "truncate": None if self.truncate else False,
        }
        return {
            "rope_type": "yarn",
            "factor": self.scale(rope),
            "original_max_position_embeddings": rope.length,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            **{key: value for key, value in optional.items() if value is not None},
        }

    def frequencies(self, rope: Rope) -> tuple[torch.Tensor, float]:
        keep = yarn_keep(
            rope.pairs, *yarn_range(rope.theta, rope.dim, rope.length, self.beta_fast, self.beta_slow, self.truncate)
        )
        factor = self.scale(rope)
        return rope.frequencies * keep + rope.frequencies / factor * (1 - keep), self._temperature(rope, factor)

    def _temperature(self, rope: Rope, factor: float) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        mscale, mscale_all_dim = self._known(rope, "mscale"), self._known(rope, "mscale_all_dim")
        if mscale and mscale_all_dim:
            return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
        return float(yarn_attention_factor(torch.tensor(factor, dtype=torch.float64)))

    def _known(self, rope: Rope, name: str) -> float | None:
        if getattr(self, name) is not None:
            return float(getattr(self, name))
        return rope.parameters.get(name) if rope.parameters.get("rope_type") == "yarn" else None


def require_ramp(method: Any) -> None:
    """Check ``beta_fast`` and ``beta_slow``; errors as for ``require_number``."""
    require_number(method, "beta_slow", above=0)
    require_number(method, "beta_fast", above=0)
    if method.beta_fast < method.beta_slow:
        raise ValueError(f"beta_fast={method.beta_fast} of {method.name!r} is below beta_slow={method.beta_slow}.")
