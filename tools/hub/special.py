"""What the rules of `shrinking` cannot know about some types of models."""

from __future__ import annotations

from typing import Any


class Nested(dict[str, Any]):
    """Values to put into a nested configuration, besides what the rules give."""


_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
_FORECAST = {"prediction_length": 4, "context_length": 8, "embedding_dimension": [0]}
_CODEC = {"upsample_groups": 32, "hidden_size": 32, "num_filters": 8, "codebook_dim": 32,
          "vector_quantization_hidden_dimension": 32, "num_quantizers": 4}  # fmt: skip
_NGRAMS = {
    "index_topk": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 16, "indexer_compress_ratio": 2, "ngram_vocab_size_base": 50,
    "output_gate_type": "sigmoid",
}  # fmt: skip
_HIFIGAN = {"upsample_initial_channel": 32}
_HIERA = {"embed_dim_per_stage": [8, 16, 32, 64], "hidden_size": 8,
          "blocks_per_stage": [1, 1, 2, 1],
          "num_attention_heads_per_stage": [1, 2, 4, 8], "global_attention_blocks": [3],
          "image_size": [64, 64], "window_positional_embedding_background_size": [4, 4],
          "window_size_per_stage": [4, 2, 4, 2]}  # fmt: skip
_VQ = {"base_channels": 32, "embed_dim": 16, "latent_channels": 16, "num_embeddings": 32,
       "channel_multiplier": [1, 2], "num_res_blocks": 1, "resolution": 32}  # fmt: skip
_LEVELS = {"out_features": ["stage2", "stage3", "stage4"]}
_TINY_RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "layer_type": "basic",
}  # fmt: skip
# The default backbone of these is a model of timm, which wants torchvision; others are allowed.
_DETECTION = {"backbone_config": _TINY_RESNET, "use_timm_backbone": False, "backbone": None}
_WINDOWS = {"sliding_windows": [[4, 1], [4, 0]]}

_SWIN = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
         "hidden_size": 32, "num_layers": 2, "image_size": 32}  # fmt: skip
_HGNET = {
    "embedding_size": 8, "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 32, 32],
    "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [16, 32, 32, 32],
    "hidden_sizes": [16, 32, 32, 32], "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1], "depths": [1, 1, 1, 1],
}  # fmt: skip
_EFFICIENT = {
    "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3], "strides": [1, 2],
    "num_block_repeats": [1, 1], "expand_ratios": [1, 6], "depthwise_padding": [],
    "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "hidden_act": "swish",
    "image_size": 32,
}  # fmt: skip


def _axes(*sections: int) -> dict[str, Any]:
    """Rotary positions along several axes: how many frequencies each of them has."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": rope}


CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": _FORECAST,
    "informer": _FORECAST,
    "time_series_transformer": _FORECAST,
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "ssm_state_size": 16,
    },
    "blt": {"encoder_hash_byte_group_vocab": 101, "cross_attn_k": 1},
    "bridgetower": {"num_hidden_layers": 2},
    "bridgetower_vision_model": {"hidden_size": 64},
    "chameleon": {"vq_config": _VQ, "vocabulary_map": {"<image>": 8, "IMGIMGA": 9}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "mimi": _CODEC,
    "mimi_decoder": _CODEC,
    "pocket_tts_audio_tokenizer": _CODEC,
    "pocket_tts_audio_tokenizer_decoder": _CODEC,
    "cvt": {"num_heads": [1, 3, 6], "embed_dim": [8, 24, 48], "depth": [1, 1, 2]},
    "dab-detr": _DETECTION | {"query_dim": 4},
    "conditional_detr": _DETECTION,
    "deformable_detr": _DETECTION,
    "detr": _DETECTION,
    "table-transformer": _DETECTION,
    "omdet-turbo": _DETECTION,
    "tvp": {
        "backbone_config": _TINY_RESNET | {"out_features": ["stage4"]},
        "max_img_size": 64,
        "visual_prompt_size": 8,
        "num_frames": 2,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3_vqgan": {
        "base_channels": 32,
        "hidden_size": 32,
        "codebook_size": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [1],
    },
    "emu3": {
        "vocabulary_map": {"<|visual token 000001|>": 5, "<image>": 9, "<|extra_200|>": 6},
        "image_token_id": 9,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], "moe_k": 2, "moe_num_experts": 4},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "attention_layers": ["global", "local"],
    },
    "glm5_next_text": _NGRAMS,
    "qwen4_exp_text": _NGRAMS,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "janus_vqgan": _VQ | {"projection_dim": 32, "image_token_embed_dim": 32},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4, "head_dim": 8},
    "moonshine_streaming_encoder": _WINDOWS,
    "neomme": {"head_dim": 16},
    "perceiver": {"num_self_attends_per_block": 2, "d_latents": 32, "d_model": 32},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": {
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "fastspeech2_conformer": {"encoder_linear_units": 64, "decoder_linear_units": 64},
    "hifigan": _HIFIGAN,
    "seamless_m4t": _HIFIGAN,
    "seamless_m4t_v2": _HIFIGAN,
    "univnet": {
        "model_in_channels": 8,
        "kernel_predictor_hidden_channels": 8,
        "model_hidden_channels": 8,
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "depths": [1] * 7},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4, "depths": [1] * 7},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4, "depths": [1] * 7},
    "vjepa2": {
        "pred_hidden_size": 32,
        "pred_num_attention_heads": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "frames_per_clip": 4,
        "pred_num_hidden_layers": 2,
    },
    "xlnet": {"d_head": 8, "n_head": 4},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "granite_speech5_encoder": {"context_size": 16},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0], "out_hidden_size": 32},
    "efficientloftr": {
        "out_features": [8, 8, 16, 32],
        "stage_in_channels": [1, 8, 8, 16],
        "stage_num_blocks": [1, 1, 1, 1],
        "hidden_size": 32,
    },
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "swin2sr": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "hgnet_v2": _HGNET | _LEVELS,
    "rt_detr_resnet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "layer_type": "basic",
        "depths": [1, 1, 1, 1],
    }
    | _LEVELS,
    "rt_detr": {"encoder_in_channels": [16, 32, 32]},
    "rt_detr_v2": {"encoder_in_channels": [16, 32, 32]},
    "d_fine": {"encoder_in_channels": [32, 32, 32]},
    "deimv2": {"encoder_in_channels": [32, 32, 32]},
    "pp_doclayout_v2": {"encoder_in_channels": [32, 32, 32]},
    "pp_doclayout_v3": {"encoder_in_channels": [32, 32, 32]},
    "pp_doclayout_v4": {"encoder_in_channels": [32, 32, 32]},
    "xmod": {"default_language": "en_XX"},
    "sam_hq_mask_decoder": {"vit_dim": 32},
    "sam_hq_mask_decoder_config": {"vit_dim": 32},
    "mask2former": {"backbone_config": _TINY_RESNET},
    "maskformer": {"backbone_config": _TINY_RESNET},
    "align": {"projection_dim": 1280},
    "efficientnet": _EFFICIENT,
    "align_vision_model": _EFFICIENT,
    "qwen2_vl_text": _axes(2, 1, 1),
    "qwen2_5_vl_text": _axes(2, 1, 1),
    "glm4v_text": _axes(2, 1, 1),
    "glm4v_moe_text": _axes(1, 1, 0),
    "glm_image_text": _axes(2, 1, 1),
    "glm_ocr_text": _axes(2, 1, 1),
    "qwen2_5_vl_vision": {"window_size": 64},
    "exaone4_5_vision": {"window_size": 64},
    "qwen2_5_omni_vision_encoder": {"window_size": 64},
    "bros": {
        "dim_bbox_sinusoid_emb_2d": 32,
        "dim_bbox_sinusoid_emb_1d": 4,
        "dim_bbox_projection": 8,
    },
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2},
    "clap_audio_model": {
        "depths": [2, 1],
        "num_attention_heads": [2, 4],
        "window_size": 4,
        "patch_embeds_hidden_size": 16,
        "hidden_size": 32,
        "spec_size": 64,
        "num_mel_bins": 16,
        "num_hidden_layers": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_ocr2_sam_vision_model": {"global_attn_indexes": [1]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8},
    "mobilebert": {
        "hidden_size": 64,
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "true_hidden_size": 32,
        "intermediate_size": 64,
    },
    "patchtst": {"context_length": 8, "patch_length": 2, "patch_stride": 2, "prediction_length": 4},
    "patchtsmixer": {
        "context_length": 8,
        "patch_length": 2,
        "patch_stride": 2,
        "prediction_length": 4,
    },
    "sam_vision_model": {"output_channels": 32, "global_attn_indexes": [1], "num_pos_feats": 16},
    "sam_hq_vision_model": {"output_channels": 32, "global_attn_indexes": [1], "num_pos_feats": 16},
    "sam_prompt_encoder": {
        "hidden_size": 32,
        "image_embedding_size": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "sam_hq_prompt_encoder": {
        "hidden_size": 32,
        "image_embedding_size": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "vits": _HIFIGAN
    | {"depth_separable_channels": 2, "flow_size": 32, "spectrogram_bins": 33, "hidden_size": 32},
    "xlstm": {"num_heads": 2, "hidden_size": 64, "embedding_dim": 64},
    "zamba2": {
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "kv_channels": 8,
        "hybrid_layer_ids": [1],
    },
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "pvt": {"image_size": 224, "patch_sizes": [4, 2, 2, 2]},
    "moshi": {"num_codebooks": 4},
    "gemma4_text": {"vocab_size_per_layer_input": 99},
    "gemma4_audio": {"subsampling_conv_channels": [8, 8]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 99},
    "dots3_note_text": {"kv_lora_rank": 16, "q_lora_rank": 16},
    "granite_speech5_ctc": {"context_size": 16, "num_mel_bins": 80},
}
