"""The cost models by which a search alone finds the best plan."""

from pipedream.optimizer.cost.models import COST_MODELS

FORMULAS = sorted(name for name, make in COST_MODELS.items() if not make(None).prices_plans)
"""Their names; a plan costs as much as its costliest stage by the formula."""
