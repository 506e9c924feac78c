"""A retrain: what `nightly_retrain` begins and `retrain_when_ready` carries on, until the draft is published.

Every step follows from the plan and from Dagster's runs, so that a lost tick or a restarted daemon changes nothing; all
that is kept is that a retrain was begun.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import dagster as dg
from dagster import DagsterRunStatus

from eagle3_pipeline.assets.runs import STAGES_TAG, WORK_TAG, failed_attempts, in_flight, run_tags, runs_of_retrain
from eagle3_pipeline.assets.work import Work, next_work, passes
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.planning import Plan, Status, new_data_fraction, plan
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.manifest import utc_now

_NAME = "retrain.json"


@dataclass(frozen=True)
class Retrain:
    """What is kept of a retrain.

    Attributes:
        retrain_id: tags its runs.
        begun_at: when.
        why: the plan's summary then.
        outcome: how it ended; empty while it goes on.
    """

    retrain_id: str
    begun_at: str
    why: str
    outcome: str = ""


@dataclass(frozen=True)
class Step:
    """What to do now: runs to request, or why there is none."""

    requests: list[dg.RunRequest]
    message: str


def read_retrain(folder: Path) -> Retrain | None:
    """The latest retrain of a pipeline's folder."""
    try:
        return Retrain(**json.loads((folder / _NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def begin(spec: PipelineSpec, instance: dg.DagsterInstance, log: Callable[[str], None]) -> Step:
    """Decides whether there is anything to retrain; if so, requests the first runs."""
    context = StageContext(spec, log)
    found = _plan(context, instance)
    if isinstance(found, str):
        return Step([], found)
    if not found.to_run:
        return Step([], f"nothing changed: {found.summary()}")
    if not next_work(found, passes(context)):
        return Step([], f"nothing can be run: {found.summary()}{_failures(found)}")
    fraction = new_data_fraction(context, found)
    if fraction is not None and fraction < spec.schedule.min_new_fraction:
        wanted = spec.schedule.min_new_fraction
        return Step([], f"new data is {fraction:.1%} of all rows, schedule.min_new_fraction is {wanted:.1%}")
    active = read_retrain(context.references.folder)
    if active is None or active.outcome:
        active = Retrain(uuid.uuid4().hex[:12], utc_now(), found.summary())
        _write(context, active)
    return _requests(context, instance, found, active)


def carry_on(spec: PipelineSpec, instance: dg.DagsterInstance, log: Callable[[str], None]) -> Step:
    """Requests what the retrain that was begun needs next, or ends it."""
    context = StageContext(spec, log)
    active = read_retrain(context.references.folder)
    if active is None or active.outcome:
        return Step([], "no retrain is under way" + (f"; the last one: {active.outcome}" if active else ""))
    if any(run.status is DagsterRunStatus.CANCELED for run in runs_of_retrain(instance, active.retrain_id)):
        return _end(context, active, "ended, because one of its runs was cancelled")
    found = _plan(context, instance)
    if isinstance(found, str):
        return Step([], found)
    return _requests(context, instance, found, active)


def _plan(context: StageContext, instance: dg.DagsterInstance) -> Plan | str:
    """The plan with what failed too often, or why there is none."""
    try:
        context.find_verifier(offline=True)
        return plan(context).with_failures(failed_attempts(instance, context.spec))
    except Eagle3Error as error:
        return f"cannot plan: {error}"


def _requests(context: StageContext, instance: dg.DagsterInstance, found: Plan, active: Retrain) -> Step:
    spec = context.spec
    busy = in_flight(instance, spec)
    work = next_work(found, passes(context))
    if not work and not busy:
        left = _failures(found)
        done = "published" if not found.to_run else f"ended with {found.summary()}"
        return _end(context, active, f"{done}{left}")
    ran = [
        (run.tags.get(WORK_TAG, ""), run.tags.get(STAGES_TAG, ""), run.status)
        for run in runs_of_retrain(instance, active.retrain_id)
    ]
    requests = []
    for item in work:
        if item.chunk in busy:
            continue
        mine = [(stages, status) for work_id, stages, status in ran if work_id == item.work_id]
        if (",".join(item.stages), DagsterRunStatus.SUCCESS) in mine:
            return _end(context, active, f"ended: {item.text} is not fresh although its run succeeded")
        requests.append(_request(spec, item, active, len(mine) + 1))
    if requests:
        return Step(requests, f"{len(requests)} runs requested, first: {work[0].text}")
    return Step([], f"waiting for {len(busy)} runs; {found.summary()}")


def _request(spec: PipelineSpec, work: Work, active: Retrain, attempt: int) -> dg.RunRequest:
    # A run key that was used is never launched again, so the attempt counts.
    return dg.RunRequest(
        run_key=f"{active.retrain_id}:{work.work_id}:{attempt}",
        partition_key=work.chunk or None,
        asset_selection=[dg.AssetKey([spec.name, stage]) for stage in work.stages],
        tags=run_tags(spec, work, active.retrain_id),
    )


def _failures(found: Plan) -> str:
    failed = [f"{row.stage} {row.chunk}".strip() for row in found.rows if row.status is Status.FAILED]
    more = f" and {len(failed) - 10} more" if failed[10:] else ""
    return f"; left out, failed too often: {', '.join(failed[:10])}{more}" if failed else ""


def _end(context: StageContext, active: Retrain, outcome: str) -> Step:
    _write(context, replace(active, outcome=outcome))
    context.log(f"{context.spec.name}: retrain {active.retrain_id} {outcome}")
    return Step([], f"retrain {active.retrain_id}: {outcome}")


def _write(context: StageContext, retrain: Retrain) -> None:
    atomic.write_json(context.references.folder / _NAME, asdict(retrain))
