"""Tiny random models of many MoE families, built from their own configuration classes without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

NUM_LAYERS = 4
NUM_EXPERTS = 8
TOP_K = 2
HIDDEN = 64
VOCAB = 128

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": TOP_K,
    "num_local_experts": NUM_EXPERTS,
    "num_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}

# What a family needs beside COMMON; the key order is the order of the test ids.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "phimoe": {"hidden_act": "silu"},
    "llama4_text": {"intermediate_size": 32, "intermediate_size_mlp": 96, "num_experts_per_tok": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "qwen3_moe": {},
    "olmoe": {"intermediate_size": 32},
    "deepseek_v2": {**MLA, **GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3": {**MLA, **GROUPS},
    "gpt_oss": {"intermediate_size": 32, "sliding_window": 8},
    "granitemoe": {"intermediate_size": 32},
    "granitemoeshared": {"intermediate_size": 32, "shared_intermediate_size": 32},
    "glm4_moe": {**GROUPS},
    "ernie4_5_moe": {"moe_num_experts": NUM_EXPERTS, "moe_k": TOP_K},
    "minimax_m2": {"intermediate_size": 32},
    "dbrx": {
        "d_model": HIDDEN,
        "n_heads": 4,
        "n_layers": NUM_LAYERS,
        "max_seq_len": 512,
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": NUM_EXPERTS,
            "moe_top_k": TOP_K,
            "hidden_size": HIDDEN,
        },
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "dots1": {**GROUPS},
    "exaone_moe": {**GROUPS, "sliding_window": 8},
    "flex_olmo": {"intermediate_size": 32},
    "hunyuan_v1_moe": {"moe_topk": TOP_K},
    "cohere2_moe": {"intermediate_size": 32},
    "glm4_moe_lite": {**MLA, **GROUPS},
    "solar_open": {**GROUPS},
    "afmoe": {"num_dense_layers": 1, "sliding_window": 8},
    "mellum": {},
    "qwen3_next": {
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "layers_block_type": ["mamba", "attention", "mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "block_size": 16,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": TOP_K,
        "sliding_window": 8,
        "vocab_size_per_layer_input": VOCAB,  # 262,144 by default: a gigabyte
        "hidden_size_per_layer_input": 16,
    },
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The family's own configuration class at toy size."""
    specific = FAMILIES[family]
    if family == "dbrx":
        values: dict[str, Any] = {"vocab_size": VOCAB, **specific}
    else:
        values = {**COMMON, **specific}
    return AutoConfig.for_model(family, **{**values, **overrides})


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model with weights large enough that routing is decided by the input, not by rounding."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1)
        state = model.state_dict()
        for name, buffer in model.named_buffers():
            if "bias" in name and buffer.is_floating_point() and name in state:
                buffer.normal_(0, 0.1)
    return model


def save_tiny_checkpoint(family: str, folder: Path, max_shard_size: str = "100KB", **overrides: Any) -> PreTrainedModel:
    """Save a tiny model as a sharded checkpoint and give it back."""
    model = tiny_model(family, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
