"""Which layers and functions of torch there are, by the headings of torch.nn's documentation.

A member is called by its class in `torch.nn`; what follows are the names of the functions that do
the same. A name stands for the function in `torch.nn.functional` and `torch`, the method of
tensors and the operator, with and without an underscore at its end.
"""

from __future__ import annotations

__all__ = ["ALIASES", "FAMILIES", "GROUPS", "NOT_THE_SAME", "PARTS"]

_PADS = {
    f"{kind}Pad{dims}d": "pad"
    for kind in ("Circular", "Constant", "Reflection", "Replication", "Zero")
    for dims in (1, 2, 3)
}

FAMILIES: dict[str, dict[str, str]] = {
    "Activations": {
        "ELU": "elu",
        "Hardshrink": "hardshrink",
        "Hardsigmoid": "hardsigmoid",
        "Hardtanh": "hardtanh",
        "Hardswish": "hardswish",
        "LeakyReLU": "leaky_relu",
        "LogSigmoid": "logsigmoid log_sigmoid",
        "PReLU": "prelu",
        "ReLU": "relu",
        "ReLU6": "relu6",
        "RReLU": "rrelu",
        "SELU": "selu",
        "CELU": "celu",
        "GELU": "gelu",
        "Sigmoid": "sigmoid expit",
        "SiLU": "silu",
        "Mish": "mish",
        "Softplus": "softplus",
        "Softshrink": "softshrink",
        "Softsign": "softsign",
        "Tanh": "tanh",
        "Tanhshrink": "tanhshrink",
        "Threshold": "threshold",
        "GLU": "glu",
        "Softmin": "softmin",
        "Softmax": "softmax",
        "Softmax2d": "",
        "LogSoftmax": "log_softmax",
        "AdaptiveLogSoftmaxWithLoss": "",
        "GumbelSoftmax": "gumbel_softmax",
    },
    "Convolutions": {
        "Conv1d": "conv1d",
        "Conv2d": "conv2d",
        "Conv3d": "conv3d",
        "ConvTranspose1d": "conv_transpose1d",
        "ConvTranspose2d": "conv_transpose2d",
        "ConvTranspose3d": "conv_transpose3d",
        "Unfold": "unfold im2col",
        "Fold": "fold col2im",
    },
    "Pooling": {
        **{
            f"{kind}Pool{dims}d": f"{name}_pool{dims}d {name}_pool{dims}d_with_indices"
            for kind, name in (("Max", "max"), ("AdaptiveMax", "adaptive_max"))
            for dims in (1, 2, 3)
        },
        **{
            f"{kind}{dims}d": f"{name}{dims}d"
            for kind, name in (
                ("MaxUnpool", "max_unpool"),
                ("AvgPool", "avg_pool"),
                ("LPPool", "lp_pool"),
                ("AdaptiveAvgPool", "adaptive_avg_pool"),
            )
            for dims in (1, 2, 3)
        },
        "FractionalMaxPool2d": "fractional_max_pool2d fractional_max_pool2d_with_indices",
        "FractionalMaxPool3d": "fractional_max_pool3d fractional_max_pool3d_with_indices",
    },
    "Padding": _PADS,
    "Normalization": {
        "BatchNorm1d": "batch_norm native_batch_norm",
        "BatchNorm2d": "batch_norm native_batch_norm",
        "BatchNorm3d": "batch_norm native_batch_norm",
        "SyncBatchNorm": "batch_norm native_batch_norm",
        "GroupNorm": "group_norm native_group_norm",
        "InstanceNorm1d": "instance_norm",
        "InstanceNorm2d": "instance_norm",
        "InstanceNorm3d": "instance_norm",
        "LayerNorm": "layer_norm native_layer_norm",
        "LocalResponseNorm": "local_response_norm",
        "CrossMapLRN2d": "CrossMapLRN2d",
        "RMSNorm": "rms_norm",
        "Normalize": "normalize",
    },
    "Recurrent": {
        "RNNBase": "",
        "RNN": "rnn_tanh rnn_relu",
        "LSTM": "lstm",
        "GRU": "gru",
        "RNNCellBase": "",
        "RNNCell": "rnn_tanh_cell rnn_relu_cell",
        "LSTMCell": "lstm_cell",
        "GRUCell": "gru_cell",
    },
    "Transformer": {
        "Transformer": "",
        "TransformerEncoder": "",
        "TransformerDecoder": "",
        "TransformerEncoderLayer": "_transformer_encoder_layer_fwd",
        "TransformerDecoderLayer": "",
        "MultiheadAttention": "multi_head_attention_forward _native_multi_head_attention",
        "ScaledDotProductAttention": "scaled_dot_product_attention",
    },
    "Linear": {
        "Identity": "",
        "Linear": "linear",
        "Bilinear": "bilinear",
    },
    "Dropout": {
        "Dropout": "dropout native_dropout",
        "Dropout1d": "dropout1d feature_dropout",
        "Dropout2d": "dropout2d feature_dropout",
        "Dropout3d": "dropout3d feature_dropout",
        "AlphaDropout": "alpha_dropout",
        "FeatureAlphaDropout": "feature_alpha_dropout",
    },
    "Sparse": {
        "Embedding": "embedding",
        "EmbeddingBag": "embedding_bag",
    },
    "Distance": {
        "CosineSimilarity": "cosine_similarity",
        "PairwiseDistance": "pairwise_distance",
    },
    "Loss": {
        "L1Loss": "l1_loss",
        "MSELoss": "mse_loss",
        "CrossEntropyLoss": "cross_entropy",
        "LinearCrossEntropyLoss": "linear_cross_entropy",
        "CTCLoss": "ctc_loss",
        "NLLLoss": "nll_loss nll_loss2d nll_loss_nd",
        "PoissonNLLLoss": "poisson_nll_loss",
        "GaussianNLLLoss": "gaussian_nll_loss",
        "KLDivLoss": "kl_div",
        "BCELoss": "binary_cross_entropy",
        "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
        "MarginRankingLoss": "margin_ranking_loss",
        "HingeEmbeddingLoss": "hinge_embedding_loss",
        "MultiLabelMarginLoss": "multilabel_margin_loss",
        "HuberLoss": "huber_loss",
        "SmoothL1Loss": "smooth_l1_loss",
        "SoftMarginLoss": "soft_margin_loss",
        "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
        "CosineEmbeddingLoss": "cosine_embedding_loss",
        "MultiMarginLoss": "multi_margin_loss",
        "TripletMarginLoss": "triplet_margin_loss",
        "TripletMarginWithDistanceLoss": "triplet_margin_with_distance_loss",
    },
    "Vision": {
        "PixelShuffle": "pixel_shuffle",
        "PixelUnshuffle": "pixel_unshuffle",
        "Upsample": "upsample interpolate",
        "UpsamplingNearest2d": "upsample_nearest",
        "UpsamplingBilinear2d": "upsample_bilinear",
        "GridSample": "grid_sample grid_sampler",
        "AffineGrid": "affine_grid affine_grid_generator",
    },
    "Shuffle": {
        "ChannelShuffle": "channel_shuffle native_channel_shuffle",
    },
    "Utility": {
        "Flatten": "flatten",
        "Unflatten": "unflatten",
    },
}

# Other classes of torch.nn that become, or are, one of these.
ALIASES: dict[str, str] = {
    **{
        f"Lazy{name}": name
        for name in (
            *(f"Conv{kind}{dims}d" for kind in ("", "Transpose") for dims in (1, 2, 3)),
            *(f"{kind}Norm{dims}d" for kind in ("Batch", "Instance") for dims in (1, 2, 3)),
            "Linear",
        )
    },
    "NLLLoss2d": "NLLLoss",
}

# What TorchWatcher calls them, beyond `is_` and the name of the function. A family is in its own
# group.
GROUPS: dict[str, dict[str, str]] = {
    "Activations": {
        "is_softmax2d": "Softmax2d",
        "is_adaptive_log_softmax_with_loss": "AdaptiveLogSoftmaxWithLoss",
        "is_activation": "",
    },
    "Convolutions": {"is_convolution": ""},
    "Pooling": {"is_pooling": ""},
    "Padding": {"is_padding": ""},
    "Normalization": {"is_normalization": ""},
    "Recurrent": {
        "is_rnn": "RNN",
        "is_rnn_cell": "RNNCell",
        "is_recurrent": "",
    },
    "Transformer": {
        "is__transformer_": "Transformer",
        "is_transformer_encoder": "TransformerEncoder TransformerEncoderLayer",
        "is_transformer_decoder": "TransformerDecoder TransformerDecoderLayer",
        "is_transformer": "",
    },
    "Linear": {
        "is_identity": "Identity",
        "is_linear_not_bilinear": "Linear",
        "is_linear": "",
    },
    "Dropout": {
        "is__dropout_": "Dropout",
        "is_alphadropout": "AlphaDropout",
        "is_featurealphadropout": "FeatureAlphaDropout",
        "is_dropout": "",
    },
    "Sparse": {"is_sparse": ""},
    "Distance": {"is_distance": ""},
    "Loss": {"is_loss": ""},
    "Vision": {
        "is_upsampling_nearest": "UpsamplingNearest2d",
        "is_upsampling_bilinear": "UpsamplingBilinear2d",
        "is_vision": "",
    },
    "Shuffle": {"is_shuffle": ""},
    "Utility": {"is_utility": ""},
}

# Methods and operators that share the name of a function and do something else.
NOT_THE_SAME = frozenset({"Tensor.unfold", "aten::unfold"})

# Functions that layers consist of, besides those that do the same as the layer.
PARTS: dict[str, str] = {
    "Softmax2d": "softmax",
    "AdaptiveLogSoftmaxWithLoss": "log_softmax",
    **{f"Conv{dims}d": "pad" for dims in (1, 2, 3)},
}
