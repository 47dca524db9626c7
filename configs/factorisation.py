"""The input and output layers compared by Baevski & Auli 2019, at any size: not a config, but what the configs here share."""

FILTERS = ((1, 128), (2, 256), (3, 384), (4, 512), (5, 512), (6, 512), (7, 512))  # characters spanned, features given


def factorisation(row, *, cutoffs, width, narrow, characters=128, filters=FILTERS, highway_layers=1, tail_dropout=0.0):
    """The groups `input` and `output` of a config, for a row of Table 3, Table 4 or Table 7.

    cutoffs: of every adaptive layer, whose bands narrow from the body's width by a factor of 4.
    width: of the words of a full softmax and of its input; they are projected to the body's width.
    narrow: of the words of the fixed-size input before an adaptive softmax.
    characters, filters, highway_layers: of the character CNN.
    """
    own_band = {"name": "own", "cutoffs": (), "factor": 4, "width": width}
    own_bands = {"name": "own", "cutoffs": cutoffs, "factor": 4, "width": 0}
    tied = {"name": "tied", "share_projections": True, "share_head_projection": False, "cutoffs": ()}
    adaptive_input = {"name": "adaptive", "cutoffs": cutoffs, "factor": 4, "width": 0}
    char_cnn = {"name": "char_cnn", "width": characters, "filters": filters, "highway_layers": highway_layers, "length": 50}
    rows = {
        "sm": (_lookup(width), _softmax(own_band)),
        "sm_t": (_lookup(width), _softmax(tied)),
        "bpe": (_lookup(0), _softmax(own_band | {"width": 0})),
        "bpe_t": (_lookup(0), _softmax(tied)),
        "asm": (_lookup(narrow), _adaptive(own_bands, tail_dropout)),
        "asm_t": (_lookup(width), _adaptive(tied | {"cutoffs": cutoffs}, tail_dropout)),  # no dimension reduction
        "cnn": (char_cnn, _adaptive(own_bands, tail_dropout)),
        "adp": (adaptive_input, _adaptive(own_bands, tail_dropout)),
        "adp_t": (adaptive_input, _adaptive(tied, tail_dropout)),
    }
    source, output = rows[row]
    return {"input": source, "output": output}


def _lookup(width):
    return {"name": "lookup", "width": width}


def _softmax(table):
    return {"name": "softmax", "table": table, "input_dropout": 0.0, "label_smoothing": 0.0, "z_loss": 0.0}


def _adaptive(table, tail_dropout):
    return _softmax(table) | {"name": "adaptive", "tail_dropout": tail_dropout}
