"""Whether a predicted peak fits a GPU, by what has been measured on GPUs.

A prediction counts tensors. Beside them lie the CUDA context (0.5 to 0.9 GiB), the communicators (about 1.5 GiB on more
than one GPU) and what the caching allocator cannot reuse, which grows with the peak. In 216 published runs on A100-80GB,
each with a prediction of allocated memory, all below 0.83 of the memory that torch sees ran and all above 0.945 died.
Source: IBM fms-acceleration benchmark CSVs (rows fmsacc-* of facts/published.csv); context and communicators:
https://github.com/stas00/ml-engineering, training/performance.
"""

FITS_BELOW = 0.83
DIES_ABOVE = 0.945

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


def verdict(peak_bytes: float, visible_gib: float) -> str:
    """`fits`, `tight` or `does not fit`.

    Args:
        peak_bytes: predicted peak of tensors on one GPU.
        visible_gib: memory of the GPU as torch reports it.
    """
    share = peak_bytes / 2**30 / visible_gib
    return FITS if share <= FITS_BELOW else TIGHT if share <= DIES_ABOVE else DOES_NOT_FIT
