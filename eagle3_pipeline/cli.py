"""`eagle3`: the command line of the pipelines."""

import json
import math
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from eagle3_pipeline.config import PipelineSpec, find_pipeline, load_enabled, pipeline_files, project_home
from eagle3_pipeline.engine.breaker import forget_distrust, read_failures, reset_failures
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import ConfigError, Eagle3Error, StaleInputError
from eagle3_pipeline.planning import Plan, PlanRow, outlook_text
from eagle3_pipeline.planning import plan as make_plan
from eagle3_pipeline.stages.context import StageContext

_SHORTEST_ID = 4


class _Group(click.Group):
    """Shows our errors as one message without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Eagle3Error as error:
            self._fail(type(error).__name__, str(error))
        except Exception as error:
            if not type(error).__module__.startswith("sqlalchemy"):
                raise
            reason = getattr(error, "orig", error)
            home = project_home() / "dagster_home"
            self._fail("StoreError", f"Dagster cannot use its database under {home}: {reason}")

    @staticmethod
    def _fail(kind: str, message: str) -> None:
        click.secho(f"{kind}: {message}", fg="red", err=True)
        sys.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="eagle3-pipeline")
def main() -> None:
    """Turn conversations and a verifier LLM into an EAGLE-3 draft that vLLM serves.

    Every stage of every data chunk is a cached asset; only what is really missing is computed.

    \b
    A first look:      eagle3 demo
    What is stale:     eagle3 plan smollm2_demo
    New data arrived:  eagle3 sync-chunks PIPELINE, then eagle3 materialize PIPELINE

    Pipelines are YAML files: those of the package and of the folders in EAGLE3_PIPELINES. Everything mutable lies under
    EAGLE3_HOME (default: .eagle3 beside the checkout).
    """  # noqa: D301  # click reads the control character


def _pipeline_argument(function: Callable) -> Callable:
    return click.argument("pipeline", metavar="PIPELINE")(function)


@main.command()
def home() -> None:
    """Print the DAGSTER_HOME that the Dagster UI needs; make it on first use."""
    from eagle3_pipeline.assets.launch import dagster_home

    click.echo(dagster_home())


@main.command()
def pipelines() -> None:
    """List pipelines, and which are loaded into Dagster (EAGLE3_ENABLED)."""
    specs, broken = load_enabled()
    loaded = {spec.name: "yes" for spec in specs} | dict.fromkeys(broken, "no, see below")
    rows = [[name, loaded.get(name, ""), path] for name, path in sorted(pipeline_files().items())]
    click.echo(tabulate(rows, ["pipeline", "loaded", "file"]))
    for name, reason in broken.items():
        click.secho(f"\n{name} cannot be loaded: {reason}", fg="yellow", err=True)


@main.command()
@_pipeline_argument
@click.option("--json", "as_json", is_flag=True, help="Print every line as JSON.")
@click.option("--why", metavar="CHUNK", help="Print the lines of one chunk with their reasons ('all': every line).")
@click.option(
    "--samples", type=click.IntRange(1), multiple=True, help="Print what so many samples cost; may be repeated."
)
@click.option("--tokens-per-sample", type=click.IntRange(1), help="Tokens of a sample for --samples; else its budget.")
def plan(
    pipeline: str, as_json: bool, why: str | None, samples: tuple[int, ...], tokens_per_sample: int | None
) -> None:
    """Show what is fresh, missing, stale or pending, and why. Starts and fetches nothing.

    With --samples, or where the pipeline file has a section `assumptions`: what the pipeline costs at other sizes.
    """
    spec = find_pipeline(pipeline)
    context = StageContext(spec)
    stated = "assumptions" in spec.model_fields_set
    if samples or tokens_per_sample:
        click.echo(outlook_text(context, samples, tokens_per_sample, as_json))
        return
    try:
        context.find_verifier(offline=True)
    except ConfigError:
        if stated and not as_json:
            click.echo(outlook_text(context) + "\n")
        raise
    try:
        context.registry.require_synced(spec)
    except StaleInputError as error:
        click.secho(f"{error}\n", fg="yellow", err=True)
    result = _with_failures(spec, make_plan(context))
    keys = sorted({row.chunk for row in result.rows if row.chunk})
    if why not in (None, "all", *keys):
        raise ConfigError(f"{pipeline} has no chunk {why!r}; {_there_are(pipeline, keys)}")
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    elif why:
        click.echo(_lines([row for row in result.rows if why == "all" or row.chunk in ("", why)]))
    else:
        click.echo(result.table())
        click.echo(f"\n{len(result.todo)} of {len(result.rows)} lines are not fresh")
        if stated:
            click.echo("\n" + outlook_text(context))


def _there_are(pipeline: str, keys: list[str]) -> str:
    return f"the chunks are {keys[0]} to {keys[-1]}" if keys else f"run eagle3 sync-chunks {pipeline}"


def _with_failures(spec: PipelineSpec, found: Plan) -> Plan:
    """The plan with the work that Dagster's runs failed at too often, where there is an instance."""
    if not (project_home() / "dagster_home").exists():
        return found
    from eagle3_pipeline.assets import launch, runs

    with launch.open_instance() as instance:
        return found.with_failures(runs.failed_attempts(instance, spec))


def _lines(rows: list[PlanRow]) -> str:
    unlinked = "made already, only to be pointed to"
    table = [[r.stage, r.chunk, r.status, r.reason or ("" if r.linked else unlinked)] for r in rows]
    return tabulate(table, ["stage", "chunk", "status", "why"])


@main.command("sync-chunks")
@_pipeline_argument
def sync_chunks(pipeline: str) -> None:
    """Look at the source: append new chunks, mark changed ones as unsynced."""
    from eagle3_pipeline.assets import launch

    with launch.open_instance() as instance:
        launch.sync_chunks(find_pipeline(pipeline), instance, click.echo)


@main.command()
@_pipeline_argument
@click.option("--stale", is_flag=True, help="Only what is not fresh. This is always so; the flag is for readers.")
@click.option("--stage", "stages", multiple=True, metavar="STAGE", help="Only this stage; may be repeated.")
@click.option("--chunks", default="*", metavar="GLOB", help="Only chunks such as '00001*', and no unpartitioned stage.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and why; start nothing.")
@click.option("--in-process", is_flag=True, help="Run here, one after the other, although a Dagster daemon runs.")
def materialize(
    pipeline: str, stale: bool, stages: tuple[str, ...], chunks: str, dry_run: bool, in_process: bool
) -> None:
    """Materialise what is not fresh, and wait for it.

    The runs are those that the web UI would launch. While `make dev` runs, its daemon executes them, several at once;
    otherwise this process does, and `make dev` shows them later.
    """
    from eagle3_pipeline.assets import launch
    from eagle3_pipeline.definitions import build_definitions

    spec = find_pipeline(pipeline)
    selection = launch.Selection(_known_stages(stages), chunks)
    keys = [chunk.key for chunk in StageContext(spec).registry.chunks()]
    if chunks != "*" and not any(fnmatch(key, chunks) for key in keys):
        raise ConfigError(f"{pipeline}: no chunk matches --chunks {chunks!r}; {_there_are(pipeline, keys)}")
    if dry_run:
        rows = selection.plan(make_plan(StageContext(spec))).to_run
        click.echo(_lines(rows))
        click.echo(f"\n{len(rows)} lines are to be run; nothing was started")
        return
    with launch.open_instance() as instance:
        runner = launch.choose_runner(spec, build_definitions([spec]), instance, click.echo, in_process)
        launched = launch.materialise_stale(spec, runner, click.echo, selection)
    click.echo(f"{pipeline}: {launched.num_runs} runs, {launched.num_engine_starts} engine starts")
    left = selection.plan(make_plan(StageContext(spec))).todo
    for row in left[:20]:
        click.echo(f"not fresh: {row.stage} {row.chunk} {row.status}: {row.reason}")
    sys.exit(1 if left else 0)


def _known_stages(stages: tuple[str, ...]) -> tuple[str, ...]:
    from eagle3_pipeline.stages.identity import FORMAT_VERSIONS

    if unknown := [stage for stage in stages if stage not in FORMAT_VERSIONS]:
        raise ConfigError(f"no stage is named {unknown[0]!r}; there are: {', '.join(FORMAT_VERSIONS)}")
    return stages


@main.command()
def demo() -> None:
    """Train, serve and measure a draft of SmolLM2-135M on this machine's CPU."""
    from eagle3_pipeline.demo import run_demo

    run_demo(click.echo)


@main.command()
@_pipeline_argument
@click.option(
    "--to", "draft_id", metavar="ID", help="Make this draft the champion and pin it: nothing replaces it by itself."
)
@click.option("--unpin", is_flag=True, help="Let the next evaluation replace the champion again.")
def promote(pipeline: str, draft_id: str | None, unpin: bool) -> None:
    """Show the champions of a pipeline; go back to one of them, or to the current draft.

    Without options: every promotion, the newest last. The champion's folder, with its model card, is what users serve.
    """
    from eagle3_pipeline.stages import published_draft
    from eagle3_pipeline.stages.champion import read_champion, read_history

    context = StageContext(find_pipeline(pipeline), log=click.echo)
    if draft_id is not None and len(draft_id) < _SHORTEST_ID:
        raise ConfigError(
            f"--to takes at least {_SHORTEST_ID} characters of a draft's id; eagle3 promote {pipeline} lists them"
        )
    if draft_id and unpin:
        raise ConfigError("--to pins and --unpin unpins: give one of them")
    if draft_id:
        published_draft.pin_draft(context, draft_id)
    elif unpin:
        published_draft.unpin_draft(context)
    champion = read_champion(context.references.folder)
    rows = [
        [one.draft.draft_id, one.promoted_at, f"{one.draft.acceptance_length:.3f}", one.reason]
        for one in read_history(context.references.folder)
    ]
    click.echo(tabulate(rows, ["draft", "promoted", "acceptance length", "why"], disable_numparse=True))
    if champion:
        pinned = ", pinned" if champion.pinned else ""
        click.echo(f"\nchampion: {champion.draft.draft_id}{pinned}: {champion.reason}")
        click.echo(f"folder: {context.references.folder / published_draft.LINK}")
    else:
        click.echo("\nno champion yet")


@main.command()
@click.option("--yes", is_flag=True, help="Delete; without it, nothing is.")
@click.option(
    "--grace-hours",
    type=click.FloatRange(0, 1e6),
    default=24.0,
    show_default=True,
    help="Keep what was written to more recently.",
)
def gc(yes: bool, grace_hours: float) -> None:
    """List, and with --yes delete, what no pipeline refers to or asks for: in bytes.

    Counted as used: what the plan of any known pipeline names, every pipeline's references, its champions, past ones
    too, and what was begun of work that a plan still asks for.
    """
    from eagle3_pipeline.planning import retained
    from eagle3_pipeline.stages.context import SCRATCH
    from eagle3_pipeline.store.retention import find_garbage

    if not math.isfinite(grace_hours):
        raise ConfigError(f"--grace-hours {grace_hours} is no number of hours")
    home = project_home()
    kept = retained(home)
    for note in kept.notes:
        click.secho(note, fg="yellow", err=True)
    found = list(find_garbage(home / "store", home / SCRATCH, kept.used))
    old = [one for one in found if one.age_s >= grace_hours * 3600]
    rows = [[g.kind, g.path.relative_to(home), f"{g.num_bytes:,}", "" if g in old else "younger, kept"] for g in found]
    click.echo(tabulate(rows, ["kind", "folder", "bytes", ""], colalign=("left", "left", "right", "left")))
    total = f"{sum(one.num_bytes for one in old):,} bytes"
    click.echo(f"\n{len(found)} folders are not used; {len(old)} of them, {total}, are older than {grace_hours:g} h")
    if not yes:
        click.echo("Nothing was deleted; --yes deletes them.")
        return
    removed = [one for one in old if one.remove()]
    click.echo(f"{len(removed)} folders deleted, {sum(one.num_bytes for one in removed):,} bytes")


@main.command()
@_pipeline_argument
@click.option("--deep", is_flag=True, help="Read contents too: rows against their identity, states against tokens.")
def verify(pipeline: str, deep: bool) -> None:
    """Compare every file that the pipeline uses with its checksum; damaged artifacts go to quarantine."""
    from eagle3_pipeline.stages import verification

    context = StageContext(find_pipeline(pipeline))
    sound, problems = verification.verify(context)
    if deep:
        wrong = verification.deep_verify(context)
        sound, problems = sound - len(wrong), problems + wrong
    for problem in problems:
        click.secho(problem, fg="red")
    click.echo(f"{sound} artifacts are sound, {len(problems)} are not")
    sys.exit(1 if problems else 0)


@main.command()
@_pipeline_argument
@click.option("--dummy-load", is_flag=True, help="Start the engine with random weights, too: minutes, not a full load.")
def preflight(pipeline: str, dummy_load: bool) -> None:
    """Check model, template, GPUs, memory and disk before anything is loaded; exits 1 if a line fails."""
    from eagle3_pipeline.stages.preflight import preflight as run_checks

    context = StageContext(find_pipeline(pipeline), log=lambda line: click.echo(line, err=True))
    checks = run_checks(context, offline=True, dummy_load=dummy_load)
    for check in checks:
        click.secho(check.line(), fg=None if check.passed else "red")
    sys.exit(0 if all(check.passed for check in checks) else 1)


@main.group()
def engine() -> None:
    """See and stop resident engines."""


def _engine_rows(folder: Path) -> list[list[Any]]:
    rows = []
    for path in sorted(folder.glob("*/spec.json")):
        state = EngineState(path.parent)
        seen = state.read()
        phase = seen.get("phase", "unknown") if state.is_alive() else "not running"
        failures = read_failures(path.parent)
        if failures.tripped:
            what = "kept dying" if failures.count > 1 else "its last start failed"
            phase = f"{what}; eagle3 engine reset tries it again"
        elif failures.count and not state.is_alive() and "load_s" not in seen:
            phase = "not running; its last start failed"
        rows.append([path.parent.name, phase, seen.get("pid"), seen.get("jobs", 0), state.describe()])
    return rows


@engine.command("list")
def engine_list() -> None:
    """List engines: phase, process, jobs answered, what they load."""
    rows = _engine_rows(project_home() / "engines")
    click.echo(tabulate(rows, ["engine", "phase", "pid", "jobs", "loads"]) if rows else "no engine ever ran here")


@engine.command("stop")
def engine_stop() -> None:
    """Stop all engines, busy ones too."""
    from eagle3_pipeline.engine.manager import EngineManager

    EngineManager(project_home(), 0).stop_all(click.echo)


@engine.command("reset")
def engine_reset() -> None:
    """Forget failed starts, so that engines that kept dying are tried again, and answers that were found wrong."""
    folders = list((project_home() / "engines").glob("*/"))
    click.echo(f"{sum(map(reset_failures, folders))} engines may be started again")
    if distrusted := sum(map(forget_distrust, folders)):
        click.echo(f"{distrusted} engines may capture while they decode again")


@main.command()
def status() -> None:
    """Show who holds which device, all engines, and Dagster's queued and running runs."""
    from eagle3_pipeline.engine.devices import count_gpus
    from eagle3_pipeline.engine.lease import GpuPool

    holders = GpuPool(project_home() / "devices", count_gpus()).holders()
    rows = [
        [slot, held["holder"] if held else "free", held.get("pid") if held else ""] for slot, held in holders.items()
    ]
    click.echo(tabulate(rows, ["device", "held by", "pid"]))
    click.echo()
    rows = _engine_rows(project_home() / "engines")
    click.echo(tabulate(rows, ["engine", "phase", "pid", "jobs", "loads"]) if rows else "no engine ever ran here")
    if (project_home() / "dagster_home").exists():
        from eagle3_pipeline.assets import launch, runs

        with launch.open_instance() as instance:
            counts = runs.count_unfinished(instance)
        click.echo(
            "\nruns: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none queued or running")
        )


if __name__ == "__main__":
    main()
