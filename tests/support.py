"""Walk every text model type of the installed transformers and measure what hf_posenc can do on it.

    python tests/support.py            # writes SUPPORT.md, about ten minutes on one core
    python tests/support.py llama glm  # prints those types only

Frequency methods are judged by a fresh model that transformers builds from a configuration edited by hand here.
Attention methods are judged by the unpatched model within the trained length, and beyond it by reading the same text
in one pass and token by token, with dynamic and static caches and with left padding.
"""

import copy
import inspect
import logging
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import reference
import tiny
import torch
import transformers
from transformers import LlamaModel, StaticCache

import hf_posenc
from hf_posenc.families import is_nested, locate
from hf_posenc.rotary import main_rope, read_ropes
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
FORMULAS = {
    "pi:factor=2": lambda theta, dim: (reference.pi(dim, theta, 2), 1.0),
    "ntk:factor=2": lambda theta, dim: (reference.ntk(dim, theta, 2), 1.0),
    "yarn:factor=4": lambda theta, dim: (
        reference.ntk_by_parts(dim, theta, 4, tiny.LENGTH), reference.attention_factor(4)
    ),
    "llama3:factor=4": lambda theta, dim: (reference.llama3(dim, theta, 4, tiny.LENGTH), 1.0),
}  # fmt: skip
DYNAMIC = "dynamic_ntk:granularity=1"
# All of a short text lies within the first window, half of a long one beyond the second.
# Encodings of another kind, on models that rotate and on those that do not.
OTHERS = ("nope", "alibi", "toeplitz:max_distance=20", "t5_bias", "irope:interval=2", "xpos", "vo_rope", "sinusoidal",
          "learned:max_positions=128")  # fmt: skip
ROTATIONS = ("nope", "alibi", "toeplitz:max_distance=20", "t5_bias", "rope", "rope+yarn:factor=4",
             "self_extend:group_size=3,window=10+rope", "sinusoidal", "learned:max_positions=128")  # fmt: skip
MAPS = ("self_extend:group_size=3,window=44", "self_extend:group_size=3,window=10")
TOLERANCE = 1e-5
# transformers before 5.24 knows the cache by another name.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


@dataclass
class Row:
    model_type: str
    encoding: str = "?"
    frequency: str = "?"
    attention: str = "?"
    maps: str = "?"
    others: str = "?"


def hand_edited(config, text: str, rotated: dict[str | None, int]):
    """The configuration with the spec laid over it as a reader of transformers' documentation would."""
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    parameters = decoder.rope_parameters
    nested = is_nested(parameters)
    for label, entry in parameters.items() if nested else [(None, parameters)]:
        if not isinstance(entry, dict) or "sliding" in str(label) or "chunked" in str(label):
            continue
        spec = dict(SPECS[text])
        if text.startswith("ntk"):
            dim = rotated[label]
            spec["rope_theta"] = entry["rope_theta"] * 2 ** (dim / (dim - 2))
        elif text.startswith("pi") and entry.get("rope_type") == "proportional":
            spec["rope_type"] = "proportional"
        if "original_max_position_embeddings" in spec and "original_max_position_embeddings" in entry:
            del spec["original_max_position_embeddings"]
        entry.update(spec)
    decoder.max_position_embeddings *= 4 if "4" in text else 2
    return config


def frequency_verdict(model_type: str) -> str:
    """ "ok", "ok, not ..." or the reason of the refusal."""
    failures, own, idle, refused = [], [], [], {}
    model = tiny.tiny_model(model_type)
    ids = tiny.tokens(1, 50)
    with torch.no_grad():
        stock = model(ids, use_cache=False).logits
        sites = locate(model).sites
        rotated = {slot.label: 2 * getattr(site.module, slot.buffer).numel() for site in sites for slot in site.slots}
        for text in SPECS:
            try:
                hf_posenc.patch(model, text)
            except ValueError as error:
                refused[text.partition(":")[0]] = str(error)
                continue
            ours = model(ids, use_cache=False).logits
            native = getattr(model.config, "attn_implementation", None) is None
            hf_posenc.unpatch(model)
            if not torch.equal(model(ids, use_cache=False).logits, stock):
                failures.append(f"{text}: unpatch differs")
            if native:
                fresh = type(model)(hand_edited(model.config, text, rotated)).eval()
            else:
                own.append(text.partition(":")[0])
                fresh = hand_filled(type(model)(copy.deepcopy(model.config)).eval(), text)
            fresh.load_state_dict(model.state_dict())
            difference = (fresh(ids, use_cache=False).logits - ours).abs().max().item()
            # Tables in float64 and in float32 differ by rounding.
            if not difference <= (TOLERANCE if native else 20 * TOLERANCE):
                failures.append(f"{text}: differs by {difference:.1e}")
            elif torch.equal(ours, stock) and not scaled(model.config):
                idle.append(text.partition(":")[0])
    if len(refused) == len(SPECS):
        return f"refused: {refused['pi']}"
    if failures:
        return "; ".join(failures)
    if len(idle) == len(SPECS):
        return "not measured: positions have no influence on this tiny model"
    if idle:
        return f"ok ({', '.join(idle)} change nothing at this size)"
    if refused:
        able = ", ".join(text.partition(":")[0] for text in SPECS if text.partition(":")[0] not in refused)
        return f"ok for {able}; " + "; ".join(f"{name} refused: {reason}" for name, reason in refused.items())
    return "ok" + (f" ({', '.join(own)} not in transformers' own keys)" if own else "")


def scaled(config) -> bool:
    """Whether a configuration carries a scaling of its own."""
    parameters = config.get_text_config(decoder=True).rope_parameters
    entries = parameters.values() if is_nested(parameters) else [parameters]
    return any(entry and entry.get("rope_type") not in ("default", "proportional") for entry in entries)


def hand_filled(model, text: str):
    """A model with the formula of the reference written into its rotary modules, where transformers cannot say it."""
    for site in locate(model).sites:
        for slot in site.slots:
            if "sliding" in str(slot.label) or "chunked" in str(slot.label):
                continue
            buffer, theta = getattr(site.module, slot.buffer), site.entry(slot)["rope_theta"]
            frequencies, factor = FORMULAS[text](theta, 2 * buffer.numel())
            # Fastest first, wherever the family keeps its pairs; those that never turn stay so.
            order = buffer.argsort(descending=True)
            filled = buffer.clone()
            filled[order] = torch.tensor(frequencies).to(buffer)
            buffer.copy_(torch.where(buffer == 0, buffer, filled))
            setattr(site.module, slot.scaling, factor)
            if isinstance(site.module.rope_type, str):
                site.module.rope_type = "default"
    return model


def attention_verdict(model_type: str, near: str = DYNAMIC, far: str = DYNAMIC) -> str:
    """ "ok" with what was measured, or the reason of the refusal.

    Args:
        near: a method that changes nothing in a short text
        far: one to read a long text with
    """
    model = tiny.tiny_model(model_type)
    family = locate(model)
    within = min(40, main_rope(family, read_ropes(family)).length)
    short, long = tiny.tokens(2, within), tiny.tokens(1, 96)
    padded = torch.cat((torch.zeros(1, 8, dtype=torch.long), short[:1, : within - 8]), dim=1)
    both, mask = torch.cat((padded, short[1:])), torch.ones(2, within, dtype=torch.long)
    mask[0, :8] = 0
    with torch.no_grad():
        try:
            stock, stock_padded = model(short).logits, model(both, attention_mask=mask).logits
            noise = (stepwise(model, long, None) - model(long).logits)[:, -60:].abs().max().item()
        except AttributeError as error:
            return f"not measured: the unpatched tiny model fails with a mask or a cache ({error})"
        try:
            hf_posenc.patch(model, near)
        except hf_posenc.UnsupportedMethodError as error:
            return f"refused: {error}"
        ours, ours_padded = model(short).logits, model(both, attention_mask=mask).logits
        measured = {
            "within": (ours - stock).abs().max(),
            "padded": max(
                (ours_padded - stock_padded)[0, 8:].abs().max(), (ours_padded - stock_padded)[1].abs().max()
            ),
        }
        hf_posenc.patch(model, far)
        whole = model(long).logits
        measured["stepwise"] = (stepwise(model, long, None) - whole)[:, -60:].abs().max()
        try:
            static = StaticCache(config=model.config, max_cache_len=96)
            measured["static"] = (stepwise(model, long, static) - whole)[:, -60:].abs().max()
        except (ValueError, NotImplementedError, AttributeError, KeyError):
            pass
        hf_posenc.unpatch(model)
        if (whole - model(long).logits).abs().max() < 1e-3:
            return "not measured: positions have no influence on this tiny model"
    # A checkpoint that is born scaled is read by its trained rotation instead; position maps leave its own.
    # A family that reads stepwise with some error of its own is held to that.
    # Left padding is read at its true positions, which rounds differently.
    steps = max(1e-4, 4 * noise)
    replaced = scaled(model.config) and near == DYNAMIC
    limits = {
        "within": float("inf") if replaced else 1e-5,
        "padded": float("inf") if replaced else steps,
        "stepwise": steps,
        "static": steps,
    }
    wrong = [f"{name} {value.item():.1e}" for name, value in measured.items() if not value <= limits[name]]
    if wrong:
        return "differs: " + ", ".join(wrong) + f" (unpatched stepwise {noise:.1e})"
    return "ok" if noise <= 1e-3 else f"ok, but unpatched it differs stepwise by {noise:.1e}"


def others_verdict(model_type: str, methods=OTHERS) -> str:
    """ "ok" for all, or which, and the reasons of the refusals."""
    able, idle, refused, failed = [], [], {}, {}
    for text in methods:
        name = text if text.count("+") else text.partition(":")[0]
        found = alike_verdict(model_type, text)
        if found == "ok":
            able.append(name)
        elif found == "changes nothing":
            idle.append(name)
        elif found.startswith("not measured"):
            return found
        else:
            (refused if found.startswith("refused") else failed)[name] = found.removeprefix("refused: ")
    if failed:
        return "differs: " + "; ".join(f"{name} {found}" for name, found in failed.items())
    if not able:
        return f"refused: {next(iter(refused.values()))}"
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        # Why, without what it would be "cannot be put on" and what it could take.
        reasons.setdefault(reason.partition(": ")[2].partition(" It can take")[0] or reason, []).append(name)
    rest = f"; {', '.join(idle)} not measured: positions have no influence on this tiny model" if idle else ""
    return f"ok for {', '.join(able)}{rest}" + "".join(
        f"; {', '.join(names)} refused: {reason}" for reason, names in reasons.items()
    )


def alike_verdict(model_type: str, text: str) -> str:
    """ "ok" if a text gives the same in one pass, in pieces and padded, or the reason of the refusal."""
    model = tiny.tiny_model(model_type)
    ids = tiny.tokens(1, 60)
    with torch.no_grad():
        try:
            hf_posenc.patch(model, text)
            hf_posenc.unpatch(model)
        except hf_posenc.UnsupportedMethodError as error:
            return f"refused: {error}"
        try:
            stock, noise = reading(model, ids), alike(model, ids)
        except (AttributeError, ValueError) as error:
            return f"not measured: the unpatched tiny model fails with a mask or a cache ({error})"
        hf_posenc.patch(model, text)
        if torch.equal(reading(model, ids), stock) and text not in ("t5_bias", "alibi"):
            return "changes nothing"
        found = alike(model, ids)
        hf_posenc.unpatch(model)
        if not torch.equal(reading(model, ids), stock):
            return "unpatch differs"
    return "ok" if found <= max(1e-4, 5 * noise) else f"differs by {found:.1e} (unpatched {noise:.1e})"


def reading(model, ids, **more):
    """Logits of a text; a model with an encoder reads it there too."""
    if model.config.is_encoder_decoder:
        more = {"encoder_outputs": more.pop("encoder_outputs", None) or model.get_encoder()(ids), **more}
        return model(decoder_input_ids=ids, **more).logits
    return model(ids, **more).logits


def alike(model, ids) -> float:
    """By how much a text differs in pieces with a cache and behind padding from one pass."""
    whole, found = reading(model, ids, use_cache=False), 0.0
    changed = ids.clone()
    changed[:, -1] += 1
    if torch.equal(reading(model, changed, use_cache=False)[:, :-1], whole[:, :-1]):  # causal
        more, cache, pieces = {}, None, []
        if model.config.is_encoder_decoder:
            more["encoder_outputs"] = model.get_encoder()(ids)
        for start, stop in ((0, 40), (40, 57), (57, 58), (58, 59), (59, 60)):
            name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
            given = {} if cache is None else {CACHE: cache}
            out = model(**{name: ids[:, start:stop]}, use_cache=True, **given, **more)
            cache = out.get("cache", out.get("past_key_values"))
            pieces.append(out.logits)
        found = (torch.cat(pieces, dim=1) - whole).abs().max().item()
    padded = torch.cat((torch.zeros(1, 8, dtype=torch.long), ids[:, :52]), dim=1)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :8] = 0
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    more = {"encoder_outputs": model.get_encoder()(ids.expand(2, -1))} if model.config.is_encoder_decoder else {}
    together = reading(model, torch.cat((padded, ids)), **{name: mask}, **more)
    alone = {"encoder_outputs": model.get_encoder()(ids)} if model.config.is_encoder_decoder else {}
    short = reading(model, ids[:, :52], **alone)
    return max(found, (together[0, 8:] - short[0]).abs().max().item(), (together[1] - whole[0]).abs().max().item())


def stepwise(model, ids, cache):
    """Logits of a text read 40 tokens at first, then one by one: (1, length, vocab)."""
    out = model(ids[:, :40], **({CACHE: cache} if cache is not None else {"use_cache": True}))
    pieces = [out.logits]
    cache = out.get("cache", out.get("past_key_values"))
    for index in range(40, ids.shape[1]):
        pieces.append(model(ids[:, index : index + 1], **{CACHE: cache}).logits)
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
    shapes = {
        f"{layer.pairing} {layer.start}:{layer.stop}" + (" reversed" if layer.sign < 0 else "") for layer in turning
    }
    nope = len(plans) - len(turning)
    return f"{', '.join(sorted(shapes))}, {theta}{sections}" + (
        f", {nope} of {len(plans)} layers NoPE" if nope else ""
    )


def measure(model_type: str) -> Row:
    row = Row(model_type)
    judges = {
        "encoding": encoding,
        "frequency": frequency_verdict,
        "attention": attention_verdict,
        "maps": lambda model_type: attention_verdict(model_type, *MAPS),
        "others": others_verdict,
    }
    for column, judge in judges.items():
        try:
            setattr(row, column, judge(model_type))
        except hf_posenc.UnsupportedMethodError as error:
            setattr(row, column, f"refused: {error}")
        except Exception as error:
            setattr(row, column, f"FAILED {type(error).__name__}: {str(error)[:200]}")
    return row


def measure_unrotated(model_type: str) -> tuple[str, str, str]:
    """(type, what it has instead of a rotation, verdict) of a model without one."""
    try:
        native = locate(tiny.tiny_model(model_type)).native
        assert native is not None
        return model_type, native.title, others_verdict(model_type, ROTATIONS)
    except hf_posenc.UnsupportedMethodError as error:
        return model_type, "?", f"refused: {error}"
    except Exception as error:
        return model_type, "?", f"FAILED {type(error).__name__}: {str(error)[:200]}"


def main(types: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    logging.getLogger("hf_posenc").setLevel(logging.ERROR)
    rotary = [*tiny.rotary_types(), *tiny.multimodal_types()]
    unrotated = [*tiny.other_types(), *tiny.sequence_types()]
    rows, others = [], []
    for model_type in types or [*rotary, *unrotated]:
        if model_type in unrotated:
            others.append(measure_unrotated(model_type))
            print(" | ".join(others[-1]), flush=True)
            continue
        row = measure(model_type)
        rows.append(row)
        cells = (row.encoding, row.frequency, row.attention, row.maps, row.others)
        print(f"{row.model_type:24} | " + " | ".join(cells), flush=True)
    if not types:
        Path(__file__).parents[1].joinpath("SUPPORT.md").write_text(page(rows, others))
    print(*verdicts(rows).values(), sep="\n")


def verdicts(rows: list[Row]) -> dict[str, Counter]:
    """How often each kind of verdict was given, per column."""
    return {
        column: Counter(getattr(row, column).split(":")[0].split(" ")[0].rstrip(",") for row in rows)
        for column in ("frequency", "attention", "maps", "others")
    }


def page(rows: list[Row], others: list[tuple[str, str, str]]) -> str:
    """SUPPORT.md."""
    counts = verdicts(rows)
    head = f"""# What works on which model

Measured by `python tests/support.py` with transformers {transformers.__version__} and torch {torch.__version__} on
tiny random models (4 layers, float32, CPU) of every type that has a rotary module in its text decoder. Do not edit:
run the script again.

- **encoding**: as probed. Which dimensions of a head turn, how they are paired, theta, layers without a rotation.
- **frequency methods** (pi, ntk, abf, ntk_by_parts, yarn, llama3, longrope): "ok" means that for pi, ntk, yarn and
  llama3 the logits equal those of a model that transformers builds from a configuration edited by hand (1e-5) or,
  where transformers has no key for it, of one with the published formula written into its rotary module (2e-4, tables
  in float64 against float32); and that unpatch is bit-exact.
- **dynamic methods** (dynamic_ntk, dynamic_yarn, causal longrope): "ok" means that under dynamic_ntk the logits are
  the unpatched ones within the trained length (1e-5), that left padding has no influence, and that one pass, token by
  token with a growing cache and with a static one agree to half beyond the trained length (1e-4, or four times what
  the unpatched model itself differs by).
- **position maps** (self_extend, rerope, leaky_rerope, dca, string, logn): the same, under self_extend, with a short
  text all of which is near and a long one most of which is far.

- **other encodings** ({", ".join(OTHERS)}):
  "ok" means that the logits change, that one pass, pieces with a cache and a left-padded row agree (1e-4, or five
  times what the unpatched model differs by), and that unpatch is bit-exact.

{len(rows)} types: frequency methods {counts["frequency"]["ok"]} ok, {counts["frequency"]["refused"]} refused; \
dynamic methods {counts["attention"]["ok"]} ok, {counts["attention"]["refused"]} refused; \
position maps {counts["maps"]["ok"]} ok, {counts["maps"]["refused"]} refused; \
some or all other encodings {counts["others"]["ok"]} ok, {counts["others"]["refused"]} refused.

| type | encoding | frequency methods | dynamic methods | position maps | other encodings |
|---|---|---|---|---|---|
"""
    lines = [line(row.model_type, row.encoding, row.frequency, row.attention, row.maps, row.others) for row in rows]
    tail = f"""
## Models without a rotation

The same for {", ".join(ROTATIONS)}
on the types that have a causal language model, or encoder and decoder, and no rotary module in it.

- **type** | **has** | **other encodings**
"""
    return (
        head + "\n".join(lines) + "\n" + tail + "\n".join("- " + line(*cells).strip("| ") for cells in others) + "\n"
    )


def line(*cells: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1:])
