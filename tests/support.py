"""Walk every text model type of the installed transformers and measure what hf_posenc can do on it.

    python tests/support.py            # writes SUPPORT.md, about ten minutes on one core
    python tests/support.py llama glm  # prints those types only

Frequency methods are judged by a fresh model that transformers builds from a configuration edited here by hand.
Attention methods are judged by the unpatched model within the trained length, and beyond it by reading the same text in
one pass and token by token, with dynamic and static caches and with left padding.
"""

import copy
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tiny
import torch
import transformers
from transformers import StaticCache

import hf_posenc
from hf_posenc.families import is_nested, locate
from hf_posenc.twin import plan

SPECS = {
    "pi:factor=2": {"rope_type": "linear", "factor": 2.0},
    "ntk:factor=2": {},
    "yarn:factor=4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": tiny.LENGTH},
    "llama3:factor=4": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": tiny.LENGTH,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip
TOLERANCE = 1e-5
WINDOWED = {"sliding_attention", "chunked_attention"}


@dataclass
class Row:
    model_type: str
    encoding: str = "?"
    frequency: str = "?"
    attention: str = "?"


def hand_edited(config, text: str, rotated: dict[str | None, int]):
    """The configuration with the spec laid over it as a reader of transformers' documentation would."""
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    parameters = decoder.rope_parameters
    nested = is_nested(parameters)
    for label, entry in parameters.items() if nested else [(None, parameters)]:
        if not isinstance(entry, dict) or label in WINDOWED:
            continue
        spec = dict(SPECS[text])
        if text.startswith("ntk"):
            dim = rotated[label]
            spec["rope_theta"] = entry["rope_theta"] * 2 ** (dim / (dim - 2))
        elif text.startswith("pi") and entry.get("rope_type") == "proportional":
            spec["rope_type"] = "proportional"
        entry.update(spec)
    decoder.max_position_embeddings *= 4 if "4" in text else 2
    return config


def frequency_verdict(model_type: str) -> str:
    """"ok", "ok, not ..." or the reason of the refusal."""
    failures = []
    model = tiny.tiny_model(model_type)
    ids = tiny.tokens(1, 50)
    with torch.no_grad():
        stock = model(ids).logits
        sites = locate(model).sites
        rotated = {slot.label: 2 * getattr(site.module, slot.buffer).numel() for site in sites for slot in site.slots}
        for text in SPECS:
            try:
                hf_posenc.patch(model, text)
            except hf_posenc.UnsupportedMethodError as error:
                return f"refused: {error}"
            ours = model(ids).logits
            native = getattr(model.config, "attn_implementation", None) is None
            hf_posenc.unpatch(model)
            if not torch.equal(model(ids).logits, stock):
                failures.append(f"{text}: unpatch differs")
            if not native:
                failures.append(f"{text}: by our own tables")
                continue
            fresh = type(model)(hand_edited(model.config, text, rotated)).eval()
            fresh.load_state_dict(model.state_dict())
            difference = (fresh(ids).logits - ours).abs().max().item()
            if not difference <= TOLERANCE:
                failures.append(f"{text}: differs by {difference:.1e}")
            elif torch.equal(ours, stock):
                failures.append(f"{text}: changes nothing")
    return "ok" if not failures else "; ".join(failures)


def attention_verdict(model_type: str) -> str:
    """"ok" with what was measured, or the reason of the refusal."""
    model = tiny.tiny_model(model_type)
    short, long = tiny.tokens(2, 40), tiny.tokens(1, 96)
    padded = torch.cat((torch.zeros(1, 8, dtype=torch.long), short[:1, :32]), dim=1)
    both, mask = torch.cat((padded, short[1:])), torch.ones(2, 40, dtype=torch.long)
    mask[0, :8] = 0
    with torch.no_grad():
        stock, stock_padded = model(short).logits, model(both, attention_mask=mask).logits
        try:
            hf_posenc.patch(model, "dynamic_ntk:granularity=1")
        except hf_posenc.UnsupportedMethodError as error:
            return f"refused: {error}"
        ours, ours_padded = model(short).logits, model(both, attention_mask=mask).logits
        measured = {
            "within": (ours - stock).abs().max(),
            "padded": max((ours_padded - stock_padded)[0, 8:].abs().max(), (ours_padded - stock_padded)[1].abs().max()),
        }
        whole = model(long).logits
        measured["stepwise"] = (stepwise(model, long, None) - whole)[:, -60:].abs().max()
        try:
            static = StaticCache(config=model.config, max_cache_len=96)
            measured["static"] = (stepwise(model, long, static) - whole)[:, -60:].abs().max()
        except (ValueError, NotImplementedError, AttributeError):
            pass
        hf_posenc.unpatch(model)
        if (whole - model(long).logits).abs().max() < 1e-3:
            return "changes nothing"
    wrong = [f"{name} {value.item():.1e}" for name, value in measured.items() if not value <= 1e-4]
    return "ok" if not wrong else "differs: " + ", ".join(wrong)


def stepwise(model, ids, cache):
    """Logits of a text read 40 tokens at first, then one by one: (1, length, vocab)."""
    out = model(ids[:, :40], **({"cache": cache} if cache is not None else {"use_cache": True}))
    pieces = [out.logits]
    cache = out.get("cache", out.get("past_key_values"))
    for index in range(40, ids.shape[1]):
        pieces.append(model(ids[:, index : index + 1], cache=cache).logits)
    return torch.cat(pieces, dim=1)


def encoding(model_type: str) -> str:
    """The native encoding as probed: rotated fraction, pairing, theta, NoPE layers, sections."""
    family = locate(tiny.tiny_model(model_type))
    entry = next(iter(family.sites)).entry(next(iter(family.sites)).slots[0])
    theta = f"theta {float(entry['rope_theta']):g}" if "rope_theta" in entry else "theta ?"
    sections = f", sections {entry['mrope_section']}" if "mrope_section" in entry else ""
    try:
        plans = plan(family)
    except hf_posenc.UnsupportedMethodError:
        return theta + sections
    turning = [layer for layer in plans if layer.source is not None]
    shapes = {f"{layer.pairing} {layer.start}:{layer.stop}" + (" reversed" if layer.sign < 0 else "") for layer in turning}
    nope = len(plans) - len(turning)
    return f"{', '.join(sorted(shapes))}, {theta}{sections}" + (f", {nope} of {len(plans)} layers NoPE" if nope else "")


def measure(model_type: str) -> Row:
    row = Row(model_type)
    for column, judge in (("encoding", encoding), ("frequency", frequency_verdict), ("attention", attention_verdict)):
        try:
            setattr(row, column, judge(model_type))
        except Exception as error:
            setattr(row, column, f"FAILED {type(error).__name__}: {str(error)[:200]}")
    return row


def main(types: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = types or [*tiny.rotary_types(), *tiny.multimodal_types()]
    rows = []
    for model_type in chosen:
        row = measure(model_type)
        rows.append(row)
        print(f"{row.model_type:24} | {row.encoding} | {row.frequency} | {row.attention}", flush=True)
    print(Counter(row.frequency.split(":")[0] for row in rows), Counter(row.attention.split(":")[0] for row in rows))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1:])
