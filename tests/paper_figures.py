"""Figures that the paper states (arXiv 2607.23264), for comparison with what the equations give."""

SEQ_LEN = (8192, 16384, 32768, 49152, 65536)

# Table 2: prediction of the stall under (wave, interleaved), us; the spans and mainloop times are package data.
TABLE2_STALLS = {
    "dit-moe-swapped": (4.63, 0.0),
    "qwen3.5": (4.94, 0.0),
    "hy3": (3.60, 0.0),
    "mimo-v2.5": (1.45, 0.0),
    "glm-5.2": (1.54, 0.0),
    "dsv4-flash": (1.47, 0.0),
    "dsv4-pro": (0.0, 0.0),
}

# Table 3: times in us, what the paper prints for hiding (percent) and speedup.
TABLE3 = {
    "fa3": {
        "attention": (195.2, 785.5, 3236.7, 7275.6, 13249.4),
        "serial": (295.6, 968.3, 3579.6, 7767.9, 13936.6),
        "fused": (207.0, 795.5, 3241.5, 7285.7, 13218.3),
        "speedup": (1.428, 1.217, 1.104, 1.066, 1.054),
        "hiding_percent": (88, 95, 99, 98, 100),
    },
    "fa4": {
        "attention": (85.4, 346.5, 1439.4, 3281.4, 5340.7),
        "serial": (140.9, 462.4, 1660.9, 3661.7, 5813.0),
        "fused": (99.4, 356.6, 1429.2, 3282.1, 5348.9),
        "speedup": (1.417, 1.297, 1.162, 1.116, 1.087),
        "hiding_percent": (75, 91, 100, 100, 98),
    },
}
