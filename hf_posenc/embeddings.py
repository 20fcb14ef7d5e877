"""Absolute positions: a table whose rows are added to the token embeddings, as in GPT-2, OPT and BERT."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from . import twin
from .families import NATIVES, Family, Native
from .journal import Journal
from .twin import Plan

_SPARE_ROWS = 8
"""Rows of a table beyond the trained length: OPT counts from 2, RoBERTa from its padding index on."""


class Learned(Native):
    """A learned table of positions.

    Attributes:
        parent, name: where the table hangs
    """

    title: ClassVar[str] = "learned positions"

    def __init__(self, owner: PreTrainedModel, parent: nn.Module, name: str):
        self.owners, self.parent, self.name = [owner], parent, name

    @classmethod
    def find(cls, root: PreTrainedModel) -> "Learned | None":
        length = getattr(root.config, "max_position_embeddings", None)
        if not length or root.config.is_encoder_decoder:
            return None
        tokens = root.get_input_embeddings()
        for owner in [module for module in root.modules() if isinstance(module, PreTrainedModel)][::-1]:
            for parent in owner.modules():
                for name, child in parent.named_children():
                    if isinstance(child, Silent):
                        return cls(owner, parent, name)
                    if not isinstance(child, nn.Embedding) or child is tokens:
                        continue
                    if length <= child.num_embeddings <= length + _SPARE_ROWS:
                        return cls(owner, parent, name)
        return None

    @property
    def table(self) -> nn.Module:
        return self.parent.get_submodule(self.name)

    @property
    def trained_length(self) -> int:
        return self.owners[0].config.max_position_embeddings

    def plans(self, family: Family) -> list[Plan]:
        return twin.plan_unrotated(family)

    def silence(self, journal: Journal) -> None:
        journal.swap(self.parent, self.name, Silent(self.table))


class Silent(nn.Module):
    """In place of a table, whose weights it keeps for the state dict: adds nothing."""

    def __init__(self, table: nn.Module):
        super().__init__()
        for name, parameter in table.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self.get_parameter("weight")
        return weight.new_zeros(1, 1, weight.shape[1])


NATIVES.append(Learned)
