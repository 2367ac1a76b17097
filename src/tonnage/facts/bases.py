"""What a frozen weight takes where it is kept in fewer than 16 bits, for model and planner. No torch here."""

from math import ceil, prod

NF4_BLOCK, NF4_GROUP = 64, 256  # weights of a row that share a scale; scales that share one of their own
FP8_BLOCK = 128  # rows and columns that share a scale, as in DeepSeek-V3's files
BASES = ("nf4", "int8", "fp8")


def fields(base: str, shape: tuple[int, ...], parts: int = 1) -> dict[str, tuple[tuple[int, ...], int]]:
    """(shape, bytes a number) of each parameter that keeps a weight [..., rows, columns] in format `base`.

    Args:
        parts: matrices that lie below each other in the rows, such as gate and up.
    """
    *lead, rows, columns = shape
    if base == "nf4":
        blocks = ceil(columns / NF4_BLOCK)
        return {"codes": ((*lead, rows, blocks * NF4_BLOCK // 2), 1), "absmax": ((*lead, rows, blocks), 1),
                "scales": ((*lead, rows, ceil(blocks / NF4_GROUP)), 4)}
    if base == "int8":
        return {"codes": (tuple(shape), 1), "scales": ((*lead, rows, 1), 4)}
    return {"codes": (tuple(shape), 1),
            "scales": ((*lead, parts * ceil(rows / parts / FP8_BLOCK), ceil(columns / FP8_BLOCK)), 4)}


def expert_parts(leaf: str) -> int:
    """Matrices that lie below each other in a parameter of stacked experts, by the end of its name."""
    return 2 if leaf.endswith("gate_up_proj") else 1


def kept_bytes(base: str, shape: tuple[int, ...], parts: int = 1) -> int:
    """Bytes of all of them together."""
    return sum(prod(size) * each for size, each in fields(base, shape, parts).values())
