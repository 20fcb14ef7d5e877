"""Absolute positions: vectors that are added to the token embeddings, from a table as in GPT-2, OPT and BERT or by a
method of this package. They are computed once per forward, where the model is told positions.
"""

import copy
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from . import positions, twin
from .families import NATIVES, Family, Native, UnsupportedMethodError, core_of, live_modules
from .journal import Journal
from .methods.embedding import EmbeddingMethod
from .methods.learned import LearnedPositions
from .twin import Plan

_SPARE_ROWS = 8
"""Rows of a table beyond the trained length: OPT counts from 2."""


class Learned(Native):
    """A learned table of positions.

    Attributes:
        parent, name: where the table hangs
        configured: ``max_position_embeddings`` when it was found
    """

    title: ClassVar[str] = "learned positions"

    def __init__(self, owner: PreTrainedModel, parent: nn.Module, name: str):
        self.owners, self.parent, self.name = [owner], parent, name
        self.configured: int = owner.config.max_position_embeddings

    @classmethod
    def find(cls, root: PreTrainedModel) -> "Learned | None":
        length = getattr(root.config, "max_position_embeddings", None)
        if not length or not getattr(root.config, "num_attention_heads", None):
            return None
        tokens = core_of(root.get_input_embeddings())
        for owner in [module for module in root.modules() if isinstance(module, PreTrainedModel)][::-1]:
            for parent in owner.modules():
                for name, child in parent.named_children():
                    core = core_of(child)
                    if isinstance(core, Silent) or (
                        isinstance(core, nn.Embedding)
                        and core is not tokens
                        and length <= core.num_embeddings <= length + _SPARE_ROWS
                    ):
                        if root.config.is_encoder_decoder:
                            raise UnsupportedMethodError(
                                f"{type(root).__name__} ({root.config.model_type}) has a table of positions in its "
                                "encoder and one in its decoder, of which neither can be changed alone."
                            )
                        return cls(owner, parent, name)
        return None

    @property
    def table(self) -> nn.Module:
        """Without the wrappers of PEFT."""
        return core_of(self.parent.get_submodule(self.name))

    @property
    def head(self) -> int:
        """Rows before that of position 0."""
        padding = getattr(self.table, "padding_idx", None)
        spare = self.rows - self.configured
        return spare if spare > 0 else 0 if padding is None else padding + 1

    @property
    def rows(self) -> int:
        return self.table.get_parameter("weight").shape[0]

    @property
    def trained_length(self) -> int:
        return self.rows - self.head

    def plans(self, family: Family) -> list[Plan]:
        return twin.plan_unrotated(family)

    def silence(self, journal: Journal) -> None:
        self.replace(Silent, journal)

    def replace(self, kind: "type[Silent]", journal: Journal) -> None:
        """Put a module of ``kind`` in place of the table, whose length then binds nothing in the model.

        Raises:
            UnsupportedMethodError: the model asks its table for more than vectors to add.
        """
        self.check_use()
        journal.swap(self.parent, self.name, kind(self.table))
        owner = self.owners[0]
        types = [buffer for name, buffer in owner.named_buffers() if name.rpartition(".")[2] == "token_type_ids"]
        if types and not any(buffer.any() for buffer in types if not buffer.is_meta):
            journal.before_forward(owner, say_types)

    def check_use(self) -> None:
        owner = self.owners[0]
        config = copy.copy(owner.config)
        config.max_position_embeddings = self.configured
        model = twin.build(owner, config)
        place = Learned.find(model)
        assert place is not None
        place.parent._modules[place.name] = _Blank(place.table)
        try:
            twin.run(Family(owner, owner, [], self), model, length=2)
        except UnsupportedMethodError as error:
            raise UnsupportedMethodError(
                f"{type(owner).__name__} does more with its table of positions than adding its rows to the token "
                f"embeddings ({error.__cause__}), so nothing can take its place."
            ) from error

    def resize(self, method: LearnedPositions, journal: Journal, length: int | None = None) -> None:
        """Stretch the trained table to ``max_positions`` of the method, or shrink a stretched one back to ``length``.

        Raises:
            UnsupportedMethodError: other weights depend on the length as well.
        """
        owner, head, rows = self.owners[0], self.head, self.rows
        before = copy.deepcopy(owner.config)
        before.max_position_embeddings = self.configured
        changed = set()
        for parent, name, table in list(self._tables()):
            old = table.weight.detach()
            body = method.stretch(old[head:]) if length is None else method.shrink(old[head:], length).to(old.device)
            fresh = copy.deepcopy(table)
            weight = torch.cat((old[:head], body.to(old.dtype)))
            fresh.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
            fresh.num_embeddings = len(weight)
            journal.swap(parent, name, fresh)
            changed.add(fresh)
        grown = self.configured + self.rows - rows
        for module in owner.modules():
            config = vars(module).get("config")
            if getattr(config, "max_position_embeddings", grown) != grown:
                journal.set(config, "max_position_embeddings", grown)
        names = {f"{name}.weight" for name, module in live_modules(owner).items() if core_of(module) in changed}
        family = Family(owner, owner, [], self)
        twin.align_settings(family, before, journal, names)
        _rebuild_buffers(owner, before, journal)

    def _tables(self) -> Iterator[tuple[nn.Module, str, nn.Embedding]]:
        """The table, or all the copies that a wrapper of PEFT keeps of it, and where they hang."""
        child = self.parent.get_submodule(self.name)
        if isinstance(child, nn.Embedding):
            yield self.parent, self.name, child
            return
        for parent in list(child.modules()):
            for name, table in list(parent.named_children()):
                if isinstance(table, nn.Embedding) and table.num_embeddings == self.rows:
                    yield parent, name, table


class Silent(nn.Module):
    """In place of a table, whose weights it keeps for the state dict: adds nothing."""

    def __init__(self, table: nn.Module):
        super().__init__()
        for name, parameter in table.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self.get_parameter("weight")
        return weight.new_zeros(1, 1, weight.shape[1])


class _Blank(Silent):
    """In place of the table of a twin that reads two tokens: vectors of the shape that methods give."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(1, 2, self.get_parameter("weight").shape[1])


class Told(Silent):
    """In place of a table: adds what the method in force makes of the positions of this forward."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        vectors = _now.take()
        if vectors is None:
            raise RuntimeError("Positions did not reach the embeddings: call the model itself, not a part of it.")
        return vectors.to(self.get_parameter("weight").dtype)


class _Now(threading.local):
    """Vectors on their way from the model that is told positions to its embeddings."""

    vectors: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        vectors, self.vectors = self.vectors, None
        return vectors


_now = _Now()


@dataclass
class Embedded:
    """An absolute encoding in force, kept as ``_hf_posenc_embedded`` on the model that is told positions.

    Attributes:
        method: None where the model's own table does the work and is only told positions
        width: of the vectors
        in_table: whether they go where a table was, or are added to the token embeddings
        parameters: names of the positional parameters of the model's forward
        journal: of the patch
    """

    method: EmbeddingMethod | None
    width: int
    in_table: bool
    parameters: list[str]
    journal: Journal


def put(family: Family, method: EmbeddingMethod, journal: Journal) -> bool:
    """Put an absolute encoding on a model whose rotation, if it had one, is already gone.

    Returns:
        Whether plain transformers can build the same.
    """
    native = family.native
    if isinstance(native, Learned) and isinstance(method, LearnedPositions):
        if method.max_positions < native.trained_length:
            raise UnsupportedMethodError(
                f"max_positions={method.max_positions} is below the {native.trained_length} positions of its table."
            )
        if not native.table.get_parameter("weight").requires_grad:
            # Fixed rows may be sines that a model turns by, and not vectors that it adds.
            native.check_use()
        # Where rows before the first position are skipped by the table itself, positions are told from 0 on.
        from_zero = native.head == 0 or type(native.table).forward is not nn.Embedding.forward
        native.resize(method, journal)
        if from_zero and "position_ids" in _parameters(family.owner):
            _tell(family.owner, Embedded(None, 0, True, _parameters(family.owner), journal), journal)
        return True
    if isinstance(native, Learned):
        native.replace(Told, journal)
    elif native is not None:
        native.silence(journal)
    for one in family.each():
        tokens = one.owner.get_input_embeddings()
        weight = native.table.get_parameter("weight") if isinstance(native, Learned) else core_of(tokens).weight
        scheme = Embedded(method, weight.shape[1], isinstance(native, Learned), _parameters(one.owner), journal)
        learned = method.learned(scheme.width)
        if learned is not None:
            journal.add(one.owner, "posenc", learned.to(weight))
        _tell(one.owner, scheme, journal)
    return False


def _parameters(owner: nn.Module) -> list[str]:
    return list(inspect.signature(owner.forward).parameters)


def _tell(owner: nn.Module, scheme: Embedded, journal: Journal) -> None:
    journal.set(owner, "_hf_posenc_embedded", scheme)
    journal.before_forward(owner, before_forward)
    journal.after_forward(owner, forget_vectors, always=True)


def before_forward(owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of a model that is told positions: what is added at those of this forward."""
    scheme: Embedded = vars(owner)["_hf_posenc_embedded"]
    named = {**dict(zip(scheme.parameters, args, strict=False)), **kwargs}
    found = positions.read(named)
    if found is None or scheme.method is None:
        return (), named
    vectors = scheme.method.vectors(found.queries.amax(0), scheme.width, getattr(owner, "posenc", None))
    given = named.get("inputs_embeds")
    if given is None or scheme.in_table:
        if not scheme.in_table:
            _attach(owner, scheme)
        _now.vectors = vectors
    else:
        named["inputs_embeds"] = given + vectors.to(given.dtype)
    return (), named


def _attach(owner: PreTrainedModel, scheme: Embedded) -> None:
    """Let the token embeddings add vectors: those of now, since resizing puts others in their place."""
    tokens = owner.get_input_embeddings()
    if add_vectors not in tokens._forward_hooks.values():
        scheme.journal.after_forward(tokens, add_vectors)


def forget_vectors(owner: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Hook: nothing is left for a later call."""
    _now.take()


def add_vectors(tokens: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """Hook of the token embeddings."""
    vectors = _now.take()
    return output if vectors is None else output + vectors.to(output.dtype)


def say_types(owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of a model that would look the types of its tokens up by their positions, no farther than its table
    reached: they are all of type 0, as it would find."""
    named = {**dict(zip(_parameters(owner), args, strict=False)), **kwargs}
    tokens = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
    if tokens is not None and named.get("token_type_ids") is None:
        named["token_type_ids"] = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return (), named


def _rebuild_buffers(owner: PreTrainedModel, before: Any, journal: Journal) -> None:
    """Buffers whose size follows the length, such as position ids, as the class fills them for the new one."""
    old, new = (dict(twin.build(owner, config).named_modules()) for config in (before, owner.config))
    live = live_modules(owner)
    for name, module in new.items():
        sizes = {leaf: buffer.shape for leaf, buffer in old[name].named_buffers(recurse=False)}
        grown = [leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.shape != sizes[leaf]]
        for leaf in grown:
            buffer = module._buffers[leaf]
            assert buffer is not None
            module._buffers[leaf] = torch.zeros_like(buffer, device="cpu")
        if grown:
            owner._init_weights(module)
        for leaf in grown:
            journal.buffer(live[name], leaf, module.get_buffer(leaf).to(live[name].get_buffer(leaf).device))


def learned_table(family: Family) -> torch.Tensor:
    """The weights of the table that a model with learned positions has now."""
    assert isinstance(family.native, Learned)
    return family.native.table.get_parameter("weight")


def forget(family: Family, method: Any, length: int, journal: Journal) -> None:
    """Bring a table that was saved stretched back to the ``length`` positions it was trained on."""
    if isinstance(family.native, Learned) and isinstance(method, LearnedPositions):
        family.native.resize(method, journal, length)


NATIVES.append(Learned)
