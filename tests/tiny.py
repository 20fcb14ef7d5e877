"""Tiny random models of every family, built from their configs: no hub, float32, seeded, eval.

A family is described by the attributes that its config class accepts: `SIZES` gives a small value for every attribute
name that matters, `EXCEPTIONS` what a type needs beyond that. Every model has 4 layers, hidden size 64, 4 heads, 2 key
value heads, head size 16, 128 tokens, 64 positions and weights of deviation 0.2, so that logits depend on positions.

Two choices keep the tests simple. Scaled rotaries (`llama3` in Apertus and CWM, `yarn` in GPT-OSS and Ministral 3) are
reset to the unscaled encoding of the family, so that identity parameters leave every model unchanged; pass
`rope_parameters` to get a scaled one. There is no end-of-sequence token, so `generate` never stops early.
"""

import copy
import functools
import inspect
import re

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM
from transformers.models.auto import modeling_auto

CAUSAL_LM = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGE_TEXT = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
# Classes that the two mappings above leave out, or list under a composite config.
EXTRA_CLASSES = {
    "emu3_text_model": "Emu3ForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
# Encoder and decoder.
SEQUENCE_CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
}
# Rotary text towers without causal text-only forward: images required, bidirectional prefix, diffusion.
NOT_TEXT = {"paligemma", "instructblip", "instructblipvideo", "diffusion_gemma", "pp_formulanet"}
PARAMETER_LIMIT = 10_000_000


def words(names: str) -> list[str]:
    return names.split()


def each(names: str, value) -> dict:
    """`{name: value}` for every name of a space separated list."""
    return dict.fromkeys(words(names), value)


NAMED = words(
    "llama qwen2 qwen3 mistral gemma2 gemma3_text phi gpt_neox glm cohere2 smollm3 llama4_text gpt_oss deepseek_v3 "
    "deepseek_v2 phi3 qwen2_vl stablelm nemotron moshi granite_swa recurrent_gemma"
)
ALIASES = {"neox": "gpt_neox", "deepseek": "deepseek_v3", "griffin": "recurrent_gemma"}
MROPE = words(
    "qwen2_vl qwen2_5_vl qwen2_5_omni_thinker qwen3_vl qwen3_vl_moe qwen3_omni_moe_thinker qwen3_5 qwen3_5_moe glm4v "
    "glm4v_moe glm46v glmga glm_ocr ernie4_5_vl_moe hunyuan_vl hy_v4_vl paddleocr_vl cosmos3_edge cohere_compass "
    "qwen4_exp"
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LENGTH, LAYERS, WINDOW = 64, 4, 2, 16, 128, 64, 4, 24

SIZES = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    **each("max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings", LENGTH),
    **each("initializer_range init_std embedding_initializer_range", 0.2),
    **each("num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers", LAYERS),
    **each("num_decoder_layers num_encoder_layers num_blocks", LAYERS),
    **each("hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim input_embedding_size", HIDDEN),
    **each("output_embedding_size lru_width", HIDDEN),
    **each("num_attention_heads num_heads n_head n_heads decoder_attention_heads encoder_attention_heads", HEADS),
    **each("swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads attention_heads", HEADS),
    **each("num_key_value_heads num_kv_heads swa_num_key_value_heads", KV_HEADS),
    **each("head_dim attention_head_dim kv_channels swa_head_dim query_pre_attn_scalar dim_head", HEAD_DIM),
    "rotary_dim": HEAD_DIM // 2,
    **each("intermediate_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size", 96),
    **each("ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim feed_forward_size d_inner dff dim_ff", 96),
    **each("moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size router_hidden_size", 32),
    **each("shared_expert_intermediate_size shared_experts_intermediate_size", 32),
    **each("moe_shared_expert_intermediate_size", 32),
    **each("n_routed_experts num_experts num_local_experts moe_num_experts zero_expert_num", 4),
    **each("num_experts_per_tok moe_k moe_topk top_k_experts", 2),
    **each("n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group", 1),
    **each("first_k_dense_replace num_dense_layers n_input_layers n_output_layers", 1),
    **each("num_mtp_layers num_nextn_predict_layers", 0),
    **each("q_lora_rank o_lora_rank", 24),
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    **each("qk_nope_head_dim v_head_dim", 16),
    **each("index_head_dim index_topk indexer_head_dim indexer_budget hc_lowrank", 16),
    **each("index_n_heads index_block_size indexer_n_heads indexer_compress_ratio", 4),
    **each("index_topk_blocks o_groups", 2),
    **each("hidden_size_per_layer_input laurel_rank loop_gate_rank gated_norm_rank adapter_rank", 8),
    **each("linear_key_head_dim linear_value_head_dim linear_head_dim", 16),
    **each("linear_num_key_heads linear_num_value_heads linear_num_heads", 4),
    **each("mamba_d_state mamba_d_head mamba_chunk_size mamba_head_dim ssm_state_size chunk_size", 16),
    **each("mamba_n_heads mamba_num_heads n_mamba_heads", 8),
    **each("block_multiple_of dim_model_base", 16),
    **each("n_groups mamba_ngroups", 1),
    "mamba_d_ssm": 128,
    "attention_chunk_size": 32,
    **each("attention_window_size local_attention sliding_window_size", WINDOW),
    "keep_window_size": LENGTH,
    "w_init_variance_scale": 2.0,
    "logit_scale": 1.0,
    "pad_token_id": 0,
    **each("bos_token_id cls_token_id decoder_start_token_id", 1),
    "sep_token_id": 2,
    "eos_token_id": None,
}
VISION_SIZES = {
    **each("hidden_size embed_dim d_model encoder_hidden_size", 32),
    **each("depth num_hidden_layers encoder_layers num_layers n_layers", 1),
    **each("num_heads num_attention_heads num_key_value_heads encoder_attention_heads attention_heads", 2),
    **each("intermediate_size encoder_ffn_dim ffn_dim", 48),
    **each("out_hidden_size output_dim text_hidden_size projection_dim adapter_out_dim", HIDDEN),
    "image_size": 32,
    "patch_size": 4,
    "initializer_range": 0.2,
    **each("head_dim global_head_dim", 16),
    **each("fullatt_block_indexes deepstack_visual_indexes", [0]),
    "num_position_embeddings": 64,
    "window_size": 16,
}
SLIDING_FULL = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR_FULL = ["linear_attention", "full_attention"] * (LAYERS // 2)
CONV_FULL = ["conv", "full_attention"] * (LAYERS // 2)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
BLT_TOWER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 96,
    "max_position_embeddings": LENGTH,
    "hidden_size_global": HIDDEN,
    "initializer_range": 0.2,
}

EXCEPTIONS = {
    "bailing_hybrid": {"layer_types": LINEAR_FULL},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "vocab_size": VOCAB,
        "encoder_hash_byte_group_vocab": 64,
        "local_attention_window_len": WINDOW,
        "use_cache": False,
        **each("patcher_config encoder_config decoder_config global_config", BLT_TOWER),
    },
    "codegen": {"n_inner": 96, "n_head": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"sliding_attention": PLAIN | {"mrope_section": [3, 3, 2]}, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dory": {"ngpt_alpha_init": 0.5},
    "dots3_note_text": {
        "sliding_window": WINDOW,
        "layer_types": ["indexed_attention", "sliding_attention"] * (LAYERS // 2),
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_v_head_dim": 16,
        "head_dim": 24,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": WINDOW},
    "gemma3_text": {"layer_types": SLIDING_FULL},
    "gemma3n_text": {"layer_types": SLIDING_FULL, "num_kv_shared_layers": 2},
    "gemma4_text": {"layer_types": SLIDING_FULL, "global_head_dim": 32},
    "gemma4_unified_text": {"layer_types": SLIDING_FULL, "global_head_dim": 32},
    "granite_swa": {"layer_rope_theta": [10000.0, 0.0, 10000.0, 50000.0]},
    "granitemoe_swa": {"layer_rope_theta": [10000.0, 0.0, 10000.0, 50000.0]},
    "granitemoehybrid": {"layer_types": LINEAR_FULL, "position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": LINEAR_FULL},
    "kolibri1": {"layer_types": SLIDING_FULL},
    "laguna": {"layer_types": SLIDING_FULL},
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    "lfm2": {"layer_types": CONV_FULL},
    "lfm2_moe": {"layer_types": CONV_FULL},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    "longcat_flash": {"num_layers": LAYERS // 2, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING_FULL},
    # Its rotary knows the size of the rotary part only under a scaling, so this one stays YaRN.
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": LENGTH // 4,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "phi4_multimodal": {
        "vision_config": {
            **each("hidden_size intermediate_size", 32),
            **each("num_hidden_layers num_attention_heads", 2),
            **each("image_size crop_size", 32),
            "patch_size": 4,
        },
        "audio_config": {
            **each("hidden_size intermediate_size ext_pw_out_channel nemo_conv_channels", 32),
            **each("depthwise_separable_out_channel", 32),
            **each("num_blocks num_attention_heads", 2),
        },
    },
    "mimo_v2_flash": {
        "rope_parameters": {
            "full_attention": PLAIN | {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": PLAIN | {"partial_rotary_factor": 0.5},
        }
    },
    "ministral": {"layer_types": SLIDING_FULL},
    "mistral": {"sliding_window": None},
    "olmo_hybrid": {"layer_types": LINEAR_FULL},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p5": {"sliding_window": WINDOW},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2), "use_mem_rope": True},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"] * (LAYERS // 2),
        "sliding_window": WINDOW,
    },
    **{
        name: {"layer_types": LINEAR_FULL}
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax", "minimax_m1")
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * (LAYERS // 2),
        "indexer_kv_heads": 1,
        "hc_count": 2,
    },
}
# Text towers with M-RoPE: the sections (pairs per axis) that fit 8 rotary pairs, or 4 where half the head is rotated.
SECTIONS = {
    **each("qwen3 qwen4 ernie cosmos3", {"mrope_section": [3, 3, 2]}),
    **each("qwen3_5 minicpm", {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}),
    "glm": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "hunyuan": {"mrope_section": [2, 2, 2, 2]},
    "hy_v4": {"mrope_section": [2, 1, 1]},
}


def parameters(config_class) -> dict:
    """Name -> default of everything that the constructor of a config class takes."""
    signature = inspect.signature(config_class.__init__).parameters
    return {name: parameter.default for name, parameter in signature.items() if name not in ("self", "kwargs")}


def small_values(model_type: str, config_class) -> dict:
    """Constructor arguments of a tiny text config: `SIZES` where the class takes the name, then `EXCEPTIONS`."""
    known = parameters(config_class)
    values = {name: value for name, value in SIZES.items() if name in known}
    values |= {name: 0.0 for name in known if re.search(r"dropout(_prob|_p)?$|pdrop$|layerdrop$", name)}
    if "kv_lora_rank" in known:
        values["num_key_value_heads"] = HEADS
    if known.get("sliding_window"):
        values["sliding_window"] = WINDOW
    return copy.deepcopy(values | EXCEPTIONS.get(model_type, {}))


def unscaled(rope_parameters):
    """The same rope parameters without a scaling; nested ones (a dict per layer type) likewise."""
    if not isinstance(rope_parameters, dict):
        return rope_parameters
    if any(isinstance(value, dict) for value in rope_parameters.values()):
        return {name: unscaled(value) for name, value in rope_parameters.items()}
    if rope_parameters.get("rope_type", "default") in ("default", "proportional"):
        return rope_parameters
    kept = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta"}
    if "llama_4_scaling_beta" in rope_parameters:
        kept |= {"original_max_position_embeddings"}
    plain = {name: value for name, value in rope_parameters.items() if name in kept} | {"rope_type": "default"}
    if "original_max_position_embeddings" in plain:
        plain["original_max_position_embeddings"] = LENGTH // 4
    return plain


def text_config(model_type: str, config_class, overrides: dict):
    values = small_values(model_type, config_class) | overrides
    config = config_class(**copy.deepcopy(values))
    stock = getattr(config, "rope_parameters", None)
    plain = unscaled(stock)
    if "rope_parameters" in values or plain == stock:
        return config
    return config_class(**copy.deepcopy(values | {"rope_parameters": plain}))


def vision_values(config_class) -> dict:
    known = parameters(config_class)
    return {name: copy.deepcopy(value) for name, value in VISION_SIZES.items() if name in known}


def composite_config(model_type: str, config_class, overrides: dict):
    """A text tower of the usual sizes with one-layer image and audio towers; `overrides` go to the text."""
    stock = config_class()
    values = {}
    for name in parameters(config_class):
        part = getattr(stock, name, None)
        if not isinstance(part, transformers.PretrainedConfig):
            continue
        if name in ("text_config", "llm_config"):
            more = dict(overrides)
            starts = [start for start in SECTIONS if model_type.startswith(start)]
            sections = SECTIONS[max(starts, key=len)] if starts else {"mrope_section": [2, 3, 3]}
            rope = getattr(part, "rope_parameters", None)
            nested = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
            if model_type in MROPE and not nested and "rope_parameters" not in EXCEPTIONS.get(part.model_type, {}):
                more = {"rope_parameters": PLAIN | sections} | more
            values[name] = text_config(part.model_type, type(part), more)
        else:
            values[name] = type(part)(**vision_values(type(part)))
    return config_class(**values, initializer_range=0.2)


def resolve(model_type: str) -> str:
    return ALIASES.get(model_type, model_type)


def tiny_config(model_type: str, **overrides):
    """The config of a tiny `model_type`; `overrides` replace attributes (those of the text tower, if there is one)."""
    model_type = resolve(model_type)
    config_class = CONFIG_MAPPING[model_type]
    if "text_config" in parameters(config_class):
        return composite_config(model_type, config_class, overrides)
    return text_config(model_type, config_class, overrides)


def model_class(model_type: str):
    extra = EXTRA_CLASSES | SEQUENCE_CLASSES
    name = extra.get(model_type) or CAUSAL_LM.get(model_type) or IMAGE_TEXT[model_type]
    composite = "text_config" in parameters(CONFIG_MAPPING[model_type])
    return getattr(transformers, IMAGE_TEXT.get(model_type, name) if composite else name)


def skeleton(model_type: str, **overrides):
    """The model without weights (meta device): a few milliseconds, for questions about modules and sizes."""
    model_type = resolve(model_type)
    with torch.device("meta"):
        return model_class(model_type)(tiny_config(model_type, **overrides))


def tiny_model(model_type: str, seed: int = 0, **overrides):
    """A tiny `model_type` with seeded random weights, float32, eval; its config is shared with no other model."""
    model_type = resolve(model_type)
    count = sum(parameter.numel() for parameter in skeleton(model_type, **overrides).parameters())
    if count > PARAMETER_LIMIT:
        raise ValueError(f"{model_type}: {count} parameters are not tiny, extend EXCEPTIONS in tests/tiny.py")
    torch.manual_seed(seed)
    return model_class(model_type)(tiny_config(model_type, **overrides)).float().eval()


def TL(**overrides) -> LlamaForCausalLM:
    """The tiny Llama of shared/pitfalls.md."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes | overrides)).float().eval()


def tokens(batch: int = 2, length: int = 20, seed: int = 1) -> torch.Tensor:
    """Random token ids (batch, length) without the special ones."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> rotary module of the text tower."""
    other = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|image\w*|encoder_vision)(\.|$)")
    return {
        name: module
        for name, module in model.named_modules()
        if "Rotary" in type(module).__name__ and not other.search(name)
    }


@functools.cache
def survey() -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """(causal LM types with a rotary module, those without one, reason for each that has no tiny model)."""
    rotary, other, failed = [], [], {}
    for model_type in [*CAUSAL_LM, *EXTRA_CLASSES]:
        try:
            if "text_config" in parameters(CONFIG_MAPPING[model_type]):
                failed[model_type] = "composite: see multimodal_types() and its text type"
                continue
            model = skeleton(model_type)
        except Exception as error:  # whatever it is, it is the reason to report
            failed[model_type] = f"{type(error).__name__}: {error}"
            continue
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > PARAMETER_LIMIT:
            failed[model_type] = f"{count} parameters"
        else:
            (rotary if rotary_modules(model) else other).append(model_type)
    return tuple(rotary), tuple(other), failed


def rotary_types() -> list[str]:
    """Causal LM types whose tiny model owns a rotary module."""
    return list(survey()[0])


def other_types() -> list[str]:
    """Causal LM types that build but own no rotary module (learned tables, biases, recurrences)."""
    return list(survey()[1])


def sequence_types() -> list[str]:
    """Types with an encoder and a decoder that share one kind of position."""
    return list(SEQUENCE_CLASSES)


def unbuildable() -> dict[str, str]:
    """Type -> why it has no tiny model here."""
    return dict(survey()[2])


@functools.cache
def composites() -> tuple[tuple[str, ...], dict[str, str]]:
    built, failed = [], {}
    for model_type in IMAGE_TEXT:
        try:
            if model_type in NOT_TEXT or "text_config" not in parameters(CONFIG_MAPPING[model_type]):
                continue
            model = skeleton(model_type)
            count = sum(parameter.numel() for parameter in model.parameters())
            if count > PARAMETER_LIMIT:
                failed[model_type] = f"{count} parameters"
            elif rotary_modules(model):
                built.append(model_type)
        except Exception as error:  # whatever it is, it is the reason to report
            failed[model_type] = f"{type(error).__name__}: {error}"
    return tuple(built), failed


def multimodal_types() -> list[str]:
    """Image-and-text types with a rotary text tower, M-RoPE or not; their tiny models take text alone."""
    return list(composites()[0])
