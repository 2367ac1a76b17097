"""docs/models.md, written from the table of models: `python -m tonnage.facts.docs > docs/models.md`."""

from tonnage.facts.architectures import Architecture
from tonnage.facts.models import MODELS, ModelFacts

_HEAD = """# The models that Tonnage knows by name

Written from `src/tonnage/facts/models.py` by `python -m tonnage.facts.docs > docs/models.md`; edit there.

Any other model of a known architecture runs with `model=custom model.path=<folder or hub id>`. Counts are exact, worked
out from the model's config and equal to the modules of transformers tensor by tensor. *Active* is all parameters but
the routed experts that a token does not visit, input embedding and head included. Gated: accept the licence on the
hub and set `HF_TOKEN`, or point `model.path` at a folder.
"""

_PUBLISHED = """
## Beside the published counts

Publishers round, and differ on what is active: `with` and `without` say whether the published figure counts the input
embedding, and the column before it is counted the same way. Llama-2-7B is published with 2,048 rotary frequencies
that its files store; DeepSeek-V3 is the main model, without the module for multi-token prediction.
"""


def models_markdown() -> str:
    """The text of docs/models.md: a table of the models, and one of their counts beside the published ones."""
    models = list(MODELS.values())
    overview = _table(
        ("name", "title", "hub id", "total", "active", "layers", "hidden", "heads / kv heads", "experts")
        + ("context, tokens", "vocab", "licence", "source"),
        [_overview_row(facts) for facts in models],
    )
    published = _table(
        ("name", "total", "published", "difference", "active", "published", "embedding"),
        [_published_row(facts) for facts in models],
    )
    return f"{_HEAD}\n{overview}{_PUBLISHED}\n{published}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _overview_row(facts: ModelFacts) -> tuple[str, ...]:
    arch = facts.architecture
    return (
        facts.name,
        facts.title,
        f"`{facts.hub_id}`",
        f"{arch.num_parameters:,}",
        f"{arch.num_active_parameters:,}",
        str(arch.num_layers),
        str(arch.hidden),
        # MLA caches one latent for all heads, so its number of kv heads says nothing.
        f"{arch.num_heads} / {'MLA' if arch.is_mla else arch.num_kv_heads}",
        _experts(arch),
        f"{arch.max_positions_tokens:,}",
        f"{arch.vocab:,}",
        facts.license + (", gated" if facts.gated else ""),
        facts.source,
    )


def _experts(arch: Architecture) -> str:
    if not arch.num_experts:
        return "dense"
    shared = f" + {arch.num_shared_experts} shared" if arch.num_shared_experts else ""
    return f"{arch.experts_per_token} of {arch.num_experts}{shared}"


def _published_row(facts: ModelFacts) -> tuple[str, ...]:
    arch = facts.architecture
    difference = arch.num_parameters - facts.published_parameters
    total = (facts.name, f"{arch.num_parameters:,}", f"{facts.published_parameters:,}", f"{difference:,}")
    if facts.published_active_parameters is None:
        return (*total, "", "", "")
    counts_embedding = facts.published_active_counts_embedding
    active = arch.num_active_parameters - (0 if counts_embedding else arch.embedding_parameters)
    published = f"{facts.published_active_parameters / 1e9:g}B"
    return (*total, f"{active:,}", published, "with" if counts_embedding else "without")


if __name__ == "__main__":
    print(models_markdown(), end="")
