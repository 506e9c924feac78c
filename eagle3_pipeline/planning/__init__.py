"""What is fresh, missing, stale, pending, corrupt or failing, why, and what the rest will cost.

A pure function of pipeline files, registry and store.
"""

from eagle3_pipeline.planning.new_data import new_data_fraction
from eagle3_pipeline.planning.outlook import outlook_text
from eagle3_pipeline.planning.plan import MAX_ATTEMPTS, Estimate, Plan, PlanRow, Status
from eagle3_pipeline.planning.planner import plan
from eagle3_pipeline.planning.retained import retained

__all__ = [
    "MAX_ATTEMPTS",
    "Estimate",
    "Plan",
    "PlanRow",
    "Status",
    "new_data_fraction",
    "outlook_text",
    "plan",
    "retained",
]
