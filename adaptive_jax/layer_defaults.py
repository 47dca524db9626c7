"""The arguments of every layer with their defaults: what config groups with a key `name` hold
beside it.
"""

FILTERS = (
    (1, 128),
    (2, 256),
    (3, 384),
    (4, 512),
    (5, 512),
    (6, 512),
    (7, 512),
)  # (characters spanned, features)
CHAR_CNN = {"width": 128, "filters": FILTERS, "highway_layers": 1, "length": 50}
CHAR_CNN |= {"strides": (), "activation": "relu", "letters": "bytes"}
GROC = {
    "width": 16,
    "filters": ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512)),
    "highway_layers": 1,
    "length": 20,
    "strides": (1, 1, 2, 3, 4, 5),
    "activation": "selu",
    "letters": "elmo",
    "lexicon": "",
    "relations": 3,
    "definition": 10,
    "form": "paper",
    "share": 1.0,
    "combine": "concat",
    "mean": "present",
    "init_range": 0.05,
}
TRANSFORMER = {
    "layers": 6,
    "features": 256,
    "heads": 8,
    "feed_forward": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "final_norm": True,
    "positions": "sinusoidal",
    "max_positions": 1_024,
    "attention": "auto",
    "remat": "auto",
    "unroll": "auto",
}
LSTM = {"features": 256, "widths": (512, 256), "dropout": 0.1, "biases": 1, "path": "auto"}
AWD_LSTM = {  # as the authors' code, on their sizes
    "features": 400,
    "widths": (1150, 1150, 400),
    "input_dropout": 0.65,
    "hidden_dropout": 0.3,
    "dropout": 0.4,
    "weight_drop": 0.5,
    "ar": 2.0,
    "tar": 1.0,
    "biases": 2,
    "path": "auto",
}
TABLES = {
    "own": {
        "cutoffs": (),
        "factor": 4,
        "width": 0,
        "bias": False,
        "weight_norm": False,
        "projected": True,
    },
    "tied": {
        "share_projections": True,
        "share_head_projection": False,
        "cutoffs": (),
        "bias": False,
        "own_head": False,
    },
    "mapped": {
        "cutoffs": (),
        "form": "residual",
        "depth": 1,
        "activation": "selu",
        "dropout": 0.0,
        "layer_dropout": 0.0,
        "bias": "none",
    },
    "composed": CHAR_CNN | {"correction": 128, "bias": "none"},
    "assembled": {"scaled": True, "dropout": 0.0, "bias": "none"},
}
OUTPUT = {
    "clusters": "",
    "table": {"name": "own"} | TABLES["own"],
    "tail_dropout": 0.0,
    "input_dropout": 0.0,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "tails": "auto",
}
SAMPLED = {
    "clusters": "",
    "table": OUTPUT["table"],
    "samples": 1024,
    "proposal": "log_uniform",
    "input_dropout": 0.0,
}
GATED_CONV = {
    "features": 256,
    "blocks": ((8, 4, 256),),
    "form": "paper",
    "activation": "glu",
    "weight_norm": True,
    "dropout": 0.0,
    "output_width": 0,
}
LAYERS = {
    "input": {
        "lookup": {"width": 0, "word_dropout": 0.0, "init_range": 0.0, "init_deviation": 0.0},
        "adaptive": {"cutoffs": (), "factor": 4, "width": 0, "word_dropout": 0.0, "scaled": False},
        "char_cnn": CHAR_CNN,
        "groc": GROC,
    },
    "body": {
        "transformer": TRANSFORMER,
        "transformer_post_norm": TRANSFORMER,
        "gated_conv": GATED_CONV,
        "lstm": LSTM,
        "awd_lstm": AWD_LSTM,
    },
    "output": {
        "softmax": OUTPUT,
        "adaptive": OUTPUT,
        "hierarchical": OUTPUT | {"classes": 0},
        "sampled": SAMPLED,
        "nce": SAMPLED,
        "differentiated": {
            "clusters": "",
            "table": OUTPUT["table"],
            "form": "projections",
            "input_dropout": 0.0,
        },
    },
    "output.table": TABLES,
}
