"""What the scripts that plan have in common: the shape of a model, and the refusal of what cannot fit."""

from collections.abc import Callable

from tonnage.config.schema import Config
from tonnage.errors import DoesNotFit, UnknownFamily
from tonnage.facts.architectures import Architecture
from tonnage.plan import text
from tonnage.plan.planner import Plan, architecture_of
from tonnage.plan.search import remedies
from tonnage.plan.verdict import DOES_NOT_FIT


def shape_of(config: Config, folder: str | None = None, say: Callable[[str], None] = lambda text: None) -> Architecture:
    """The shape of the config's model, counted by hand or, for another family, measured by transformers.

    Args:
        say: told that the latter takes a while.

    Raises:
        NotFetched: neither `folder` nor model.path holds a config.json.
        UnknownFamily: of another build than any that is known.
        ConfigError: a config.json that cannot be used.
    """
    try:
        return architecture_of(config, folder)
    except UnknownFamily:
        say("the family is not counted by hand: asking transformers, which takes a few seconds")
        from tonnage.models.shape import measured_architecture

        return measured_architecture(folder or config.model.path)


def require_fit(config: Config, plan: Plan, otherwise: str) -> None:
    """Go on unless the plan says that the run cannot fit and plan.refuse is on.

    Args:
        otherwise: the first line of the refusal.

    Raises:
        DoesNotFit: with the nearest overrides that do fit; a CPU has none.
    """
    if plan.verdict != DOES_NOT_FIT or not config.plan.refuse:
        return
    advice = text.advice_lines(remedies(config, plan)) if plan.layout.device == "cuda" else []
    raise DoesNotFit("\n".join([otherwise, *text.host_lines(plan), *advice]))
