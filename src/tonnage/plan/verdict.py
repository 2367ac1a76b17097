"""Whether a predicted peak fits a GPU, by what has been measured on GPUs.

A prediction counts tensors. Beside them lie the CUDA context (0.5 to 0.9 GiB), the communicators (about 1.5 GiB on
more than one GPU) and what the caching allocator cannot reuse, which grows with the peak. In 216 published runs on
A100-80GB, each with a prediction of allocated memory, all below 0.83 of the memory that torch sees ran and all above
0.945 died.
Source: IBM fms-acceleration benchmark CSVs (rows fmsacc-* of facts/published.csv); context and communicators:
https://github.com/stas00/ml-engineering, training/performance.
"""

FITS_BELOW = 0.83
DIES_ABOVE = 0.945
CONTEXT_GIB, COMMUNICATORS_GIB = 0.9, 1.5

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


def verdict(peak_bytes: float, visible_gib: float, gpus: int = 1) -> str:
    """`fits`, `tight` or `does not fit`: by the share of the memory, and on small GPUs by what lies beside tensors.

    Args:
        peak_bytes: predicted peak of tensors on one GPU.
        visible_gib: memory of the GPU as torch reports it.
        gpus: more than one need communicators.
    """
    peak_gib = peak_bytes / 2**30
    left_gib = visible_gib - peak_gib - CONTEXT_GIB - (COMMUNICATORS_GIB if gpus > 1 else 0.0)
    if peak_gib > DIES_ABOVE * visible_gib or left_gib < 0:
        return DOES_NOT_FIT
    # what is left has to hold what the allocator cannot reuse: on the A100s of the rule at least 0.055 of the memory
    return FITS if peak_gib <= FITS_BELOW * visible_gib and left_gib >= (1 - DIES_ABOVE) * visible_gib else TIGHT
