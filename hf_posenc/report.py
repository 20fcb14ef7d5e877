"""What ``inspect`` found: wavelengths per pair and layer type, as a table, a dictionary and a plot."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table


@dataclass(frozen=True)
class Waves:
    """One set of frequencies.

    Attributes:
        lengths: tokens per turn of every pair, infinite where a pair never turns
        factor: on cos and sin, so that the logits of the turned dimensions gain its square
    """

    lengths: tuple[float, ...]
    factor: float

    def slow(self, context_length: int) -> list[int]:
        """Pairs that turn, but not once in ``context_length`` tokens."""
        return [pair for pair, length in enumerate(self.lengths) if context_length < length < math.inf]

    def to_dict(self, context_length: int) -> dict[str, Any]:
        return {
            "wavelengths": [None if math.isinf(length) else length for length in self.lengths],
            "attention_factor": self.factor,
            "slow_pairs": self.slow(context_length),
        }


@dataclass(frozen=True)
class LayerType:
    """The layers that share one set of frequencies.

    Attributes:
        label: transformers' name of the layer type, "all" where there is only one
        layers: how many attention layers use it, None where that could not be measured
        window: tokens that all of them look back at most, None where one sees the whole text
        windowed: whether no method touches them, because they have frequencies of their own and never look further
        theta: base of the frequencies, ``rope_theta``
        rope_type: transformers' name of the scaling that the checkpoint carries
        head_dim: width of a head as configured; ``rotated`` dimensions of it turn
        trained_length: tokens the model was trained on before any extension
        sections: pairs per position axis (M-RoPE)
        trained: before any scaling
        in_force: as the model turns now
        proposed: as it would turn with the method asked about; None without one, and where it changes nothing
    """

    label: str
    layers: int | None
    window: int | None
    windowed: bool
    theta: float
    rope_type: str
    head_dim: int
    trained_length: int
    sections: tuple[int, ...] | None
    trained: Waves
    in_force: Waves
    proposed: Waves | None

    @property
    def rotated(self) -> int:
        return 2 * sum(not math.isinf(length) for length in self.trained.lengths)


@dataclass(frozen=True)
class Report:
    """What ``inspect`` returns. ``print(report)`` in rich, ``report.to_dict()``, ``report.plot("waves.png")``.

    Attributes:
        model: its class or type
        context_length: tokens against which pairs are called slow
        configured_length: ``max_position_embeddings`` now
        in_force: the scheme of this package that the model has on, if any
        method: the one asked about, if any
        facts: about layers that a change of frequencies does not reach, and what a method does besides
    """

    model: str
    context_length: int
    configured_length: int
    in_force: str | None
    method: str | None
    layer_types: tuple[LayerType, ...]
    facts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings, fit for JSON."""
        return {
            "model": self.model,
            "context_length": self.context_length,
            "configured_length": self.configured_length,
            "in_force": self.in_force,
            "method": self.method,
            "facts": list(self.facts),
            "layer_types": [self._layer_type(layer_type) for layer_type in self.layer_types],
        }

    def _layer_type(self, found: LayerType) -> dict[str, Any]:
        plain = ("label", "layers", "window", "windowed", "theta", "rope_type", "head_dim", "rotated")
        waves = {"trained": found.trained, "in_force": found.in_force, "proposed": found.proposed}
        return {
            **{name: getattr(found, name) for name in plain},
            "trained_length": found.trained_length,
            "sections": list(found.sections) if found.sections else None,
            **{name: value and value.to_dict(self.context_length) for name, value in waves.items()},
        }

    def table(self) -> RenderableType:
        """For a rich console: a line per layer type, then a line per pair."""
        return Group(self._summary(), *self.facts, *(self._pairs(layer_type) for layer_type in self.layer_types))

    __rich__ = table

    def _summary(self) -> Table:
        title = f"{self.model}: {self.configured_length} tokens configured, inspected at {self.context_length}"
        table = Table(title=title, title_justify="left")
        for column in ("layers", "theta", "checkpoint's scaling", "turning dimensions", "trained tokens", "slow pairs",
                       "slow as in force", *(["slow with " + self.method] if self.method else [])):  # fmt: skip
            table.add_column(column)
        for found in self.layer_types:
            sections = f", sections {list(found.sections)}" if found.sections else ""
            table.add_row(
                _label(found), f"{found.theta:g}", found.rope_type, f"{found.rotated} of {found.head_dim}{sections}",
                str(found.trained_length), self._slow(found.trained), self._slow(found.in_force),
                *([self._slow(found.proposed)] if self.method else []),
            )  # fmt: skip
        return table

    def _slow(self, waves: Waves | None) -> str:
        if waves is None:
            return "as in force"
        return f"{len(waves.slow(self.context_length))} of {sum(not math.isinf(length) for length in waves.lengths)}"

    def _pairs(self, found: LayerType) -> Table:
        columns = {"trained": found.trained, self.in_force or "in force": found.in_force}
        if found.proposed is not None and self.method is not None:
            columns[self.method] = found.proposed
        table = Table(title=f"Tokens per turn, {_label(found)}; * is slower than the context", title_justify="left")
        table.add_column("pair", justify="right")
        for name, waves in columns.items():
            scaled = f", cos and sin x {waves.factor:.4f}" if waves.factor != 1 else ""
            table.add_column(name + scaled, justify="right")
        for pair in range(max(len(waves.lengths) for waves in columns.values())):
            table.add_row(str(pair), *(self._cell(waves, pair) for waves in columns.values()))
        return table

    def _cell(self, waves: Waves, pair: int) -> str:
        if pair >= len(waves.lengths) or math.isinf(waves.lengths[pair]):
            return "does not turn"
        return f"{waves.lengths[pair]:.2f}" + ("*" if waves.lengths[pair] > self.context_length else " ")

    def plot(self, path: str | Path) -> None:
        """Write a PNG: tokens per turn of every pair, one panel per layer type, with both lengths as lines."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5 * len(self.layer_types)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(self.layer_types), squeeze=False)[:, 0]
        for panel, found in zip(panels, self.layer_types, strict=True):
            curves = [("trained", found.trained, "o"), (self.in_force or "in force", found.in_force, "x")]
            if found.proposed is not None and self.method is not None:
                curves.append((self.method, found.proposed, "."))
            for name, waves, marker in curves:
                if name in ("trained", self.method) or waves != found.trained:
                    panel.plot(_finite(waves), marker=marker, markersize=5, linewidth=1, label=name)
            lines = (("trained length", found.trained_length, "-"), ("context", self.context_length, "--"))
            for name, length, style in lines:
                panel.axhline(length, color="black", linestyle=style, linewidth=1, label=f"{name}: {length}")
            panel.set(
                title=f"{self.model}, {_label(found)}", xlabel="pair of dimensions", ylabel="tokens per turn",
                yscale="log",
            )  # fmt: skip
            panel.grid(alpha=0.3)
            panel.legend()
        figure.savefig(path, format="png", dpi=120)


def _finite(waves: Waves) -> list[float]:
    return [length if length < math.inf else math.nan for length in waves.lengths]


def _label(found: LayerType) -> str:
    count = f"{found.layers} layers" if found.layers is not None else "layers"
    name = count if found.label == "all" else f"{found.label} ({count})"
    if found.window is not None:
        name += f", window {found.window}"
    return name + (", untouched by methods" if found.windowed else "")
