"""An A/A/B replay: OLD twice and NEW once over the same traffic on the same schedule.

The order is old_a, new, old_b: a drift of the machine over the run then shows as noise between
the OLD passes and cancels out of their mean, to which NEW is compared. Each pass gets a freshly
started build (commands; endpoints are used as they are), so that all start equally cold.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from replay.builds import BuildSpec, RunningBuild
from replay.database import now
from replay.diff import Comparison, compare
from replay.errors import ReplayError, RunError
from replay.models import Build, Diff, ReplayedRequest, Run
from replay.passes import Pass, Progress, run_pass, storable
from replay.source import Traffic, read_traffic
from replay.summary import latency_changes, latency_summary, pair_summary, pass_summary

SHOWN_BROKEN_LINES = 20
LONG_PASS_S = 3600.0
"""Traffic of many hours is replayed in as many: said at the start, for the bar shows requests."""

Rows = Mapping[str, Mapping[str, ReplayedRequest]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a pass may do before its run is called invalid."""

    lateness_p99_ms: float = 250.0
    failure_share: float = 0.05


def replay(
    session_factory: sessionmaker[Session],
    *,
    old: BuildSpec,
    new: BuildSpec,
    traffic: Path,
    out_dir: Path,
    speed: float = 1.0,
    limit: int | None = None,
    bounds: Bounds | None = None,
    progress: Progress | None = None,
) -> Run:
    """Replay `traffic` and return the finished run, `valid` or `invalid` (see `reason`).

    Rows are committed as they come. `out_dir` gets a directory per run with the builds' logs and
    summary.json. Raises TrafficError, BuildError or RunError; a run that had begun is `aborted`
    then, as it is by Ctrl-C. NEW is started once before anything else, so that a build that does
    not work is found before OLD's pass was waited for.
    """
    if not speed > 0:  # NaN too
        raise RunError(f"speed {speed:g} is not above 0: 2 replays twice as fast as recorded")
    recorded = read_traffic(traffic, limit=limit)
    plan = _Plan(
        sessions=session_factory,
        old=old,
        new=new,
        traffic_path=traffic,
        traffic=recorded,
        directory=_make_directory(out_dir),
        speed=speed,
        bounds=bounds or Bounds(),
        progress=progress or (lambda what, done, total: None),
    )
    pass_s = recorded.records[-1].offset_s / speed
    if pass_s > LONG_PASS_S:
        plan.progress(f"each pass takes {pass_s / 3600:.1f} h at speed {speed:g}", 0, 0)
    run_id = asyncio.run(_run(plan))
    with session_factory() as session:
        run = session.get_one(Run, run_id)
        _ = run.old_build, run.new_build
    return run


def state(run: Run) -> str:
    """A run's status for people; a `running` one whose process is gone was killed."""
    process = run.summary.get("process") or {}
    if run.status != "running" or process.get("host") != socket.gethostname():
        return run.status
    alive = process.get("started") == _process_start(process["pid"])
    return "running" if alive else "killed while running"


@dataclass(frozen=True)
class _Plan:
    sessions: sessionmaker[Session]
    old: BuildSpec
    new: BuildSpec
    traffic_path: Path
    traffic: Traffic
    directory: Path
    speed: float
    bounds: Bounds
    progress: Progress

    def build(self, arm: str) -> RunningBuild:
        spec = self.new if arm == "new" else self.old
        self.progress(f"starting {spec.name}", 0, 0)
        return RunningBuild(spec, log=self.directory / f"{arm}.log")


async def _run(plan: _Plan) -> int:
    async with plan.build("new") as new:
        pass
    async with plan.build("old_a") as old:
        run_id = _create_run(plan, old, new)
        try:
            passes = [await _pass(plan, run_id, old, "old_a")]
        except BaseException as error:
            _abort(plan, run_id, error)
            raise
    try:
        for arm in ("new", "old_b"):
            async with plan.build(arm) as build:
                passes.append(await _pass(plan, run_id, build, arm))
        fingerprints = {"old": old.fingerprint, "new": new.fingerprint}
        summary = _finish(plan, run_id, passes, fingerprints)
    except BaseException as error:
        _abort(plan, run_id, error)
        raise
    _write_summary(plan, summary)
    return run_id


async def _pass(plan: _Plan, run_id: int, build: RunningBuild, arm: str) -> Pass:
    return await run_pass(
        build,
        arm,
        plan.traffic.records,
        run_id=run_id,
        sessions=plan.sessions,
        speed=plan.speed,
        progress=plan.progress,
    )


def _create_run(plan: _Plan, old: RunningBuild, new: RunningBuild) -> int:
    traffic = plan.traffic
    summary: dict[str, Any] = {
        "process": {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _process_start(os.getpid()),
        },
        "directory": str(plan.directory),
        "builds": {"old": plan.old.name, "new": plan.new.name},
        "speed": plan.speed,
        "traffic": {
            "files": [str(file) for file in traffic.files],
            "requests": len(traffic.records),
            "broken": len(traffic.broken),
            "broken_lines": [str(line) for line in traffic.broken[:SHOWN_BROKEN_LINES]],
            "skipped": traffic.skipped,
            "shortened_s": round(traffic.shortened_s, 3),
        },
    }
    with plan.sessions.begin() as session:
        run = Run(
            old_build_id=_build_id(session, old),
            new_build_id=_build_id(session, new),
            traffic_file=str(plan.traffic_path),
            traffic_digest=traffic.digest,
            summary=summary,
        )
        session.add(run)
        session.flush()
        return run.id


def _build_id(session: Session, build: RunningBuild) -> int:
    """The id of the build with this fingerprint, which another run may be adding just now."""
    query = select(Build.id).where(Build.fingerprint == build.fingerprint)
    known = session.scalar(query)
    if known is not None:
        return known
    row = Build(name=build.spec.name, fingerprint=build.fingerprint, components=build.components)
    try:
        with session.begin_nested():
            session.add(row)
            session.flush()
    except IntegrityError:
        return session.scalars(query).one()
    return row.id


def _abort(plan: _Plan, run_id: int, error: BaseException) -> None:
    if isinstance(error, ReplayError):
        reason = error.one_line
    elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        reason = "interrupted"
    else:
        reason = f"{type(error).__name__}: {error}"
    with plan.sessions.begin() as session:
        run = session.get_one(Run, run_id)
        run.status, run.reason, run.finished_at = "aborted", reason, now()


def _finish(
    plan: _Plan, run_id: int, passes: Sequence[Pass], fingerprints: Mapping[str, str]
) -> dict[str, Any]:
    """Compare the arms, and store diffs, summary and status in one transaction; the summary."""
    problems = [problem for done in passes for problem in _problems(done, plan.bounds)]
    problems += _changed_builds(passes, fingerprints)
    with plan.sessions.begin() as session:
        rows = _rows(session, run_id)
        noise = _compare_arms(rows, "old_a", "old_b")
        changes = _compare_arms(rows, "old_a", "new")
        noisy = frozenset(key for key, found in noise.items() if found.kind != "same")
        inputs = {item.record.request_id: _input(item.record) for item in plan.traffic.records}
        diffs = _diff_rows(run_id, "noise", noise, rows, "old_b", inputs, noisy)
        diffs += _diff_rows(run_id, "change", changes, rows, "new", inputs, noisy)
        if diffs:
            session.execute(insert(Diff), diffs)
        run = session.get_one(Run, run_id)
        run.summary = run.summary | {
            "arms": {done.arm: pass_summary(done) for done in passes},
            "noise": pair_summary(noise, frozenset()),
            "changes": pair_summary(changes, noisy),
            "latency": latency_summary(latency_changes(rows)),
        }
        run.status = "invalid" if problems else "valid"
        run.reason = "; ".join(problems) or None
        run.finished_at = now()
        return {"run": run_id, "status": run.status, "reason": run.reason} | run.summary


def _write_summary(plan: _Plan, summary: Mapping[str, Any]) -> None:
    path = plan.directory / "summary.json"
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"run {summary['run']} is complete ({summary['status']}), but {path} cannot be "
            f"written: {error.strerror}"
        ) from error


def _problems(done: Pass, bounds: Bounds) -> list[str]:
    """Why an arm makes its run invalid."""
    problems = []
    share = done.failures / done.requests
    if share > bounds.failure_share:
        problems.append(
            f"{done.arm}: {done.failures} of {done.requests} requests failed "
            f"({share:.0%}, the limit is {bounds.failure_share:.0%})"
        )
    if done.died is not None:
        problems.append(f"{done.arm}: {done.died}")
    late = done.fidelity.p99_ms
    if late > bounds.lateness_p99_ms:
        problems.append(
            f"{done.arm}: requests were sent late (p99 {late:.0f} ms, the limit is "
            f"{bounds.lateness_p99_ms:.0f} ms): replay on a less busy machine or slower"
        )
    return problems


def _changed_builds(passes: Sequence[Pass], fingerprints: Mapping[str, str]) -> list[str]:
    return [
        f"{done.arm}: the build changed during the run (fingerprint {done.fingerprint})"
        for done in passes
        if done.fingerprint != fingerprints["new" if done.arm == "new" else "old"]
    ]


def _rows(session: Session, run_id: int) -> dict[str, dict[str, ReplayedRequest]]:
    rows: dict[str, dict[str, ReplayedRequest]] = {"old_a": {}, "old_b": {}, "new": {}}
    query = select(ReplayedRequest).where(ReplayedRequest.run_id == run_id)
    for row in session.scalars(query.order_by(ReplayedRequest.id)):
        rows[row.arm][row.request_id] = row
    return rows


def _compare_arms(rows: Rows, left: str, right: str) -> dict[str, Comparison]:
    shared = [key for key in rows[left] if key in rows[right]]
    return {key: compare(rows[left][key], rows[right][key]) for key in shared}


def _diff_rows(
    run_id: int,
    pair: str,
    found: Mapping[str, Comparison],
    rows: Rows,
    right: str,
    inputs: Mapping[str, dict[str, Any]],
    noisy: frozenset[str],
) -> list[dict[str, Any]]:
    return [
        {
            "run_id": run_id,
            "pair": pair,
            "request_id": key,
            "class_key": rows["old_a"][key].class_key,
            "kind": comparison.kind,
            "left_id": rows["old_a"][key].id,
            "right_id": rows[right][key].id,
            "first_divergent": comparison.first_divergent,
            "margin": comparison.margin,
            "token_distance": comparison.token_distance,
            "text_distance": comparison.text_distance,
            "input": inputs[key],
            "detail": comparison.detail
            | {"stages": comparison.stages, "also_in_noise": key in noisy},
        }
        for key, comparison in found.items()
    ]


def _input(record: Any) -> dict[str, Any]:
    if record.messages is not None:
        return {"messages": record.messages}
    if record.prompt is not None:
        return {"prompt": storable(record.prompt)}
    return {"prompt_token_ids": record.prompt_token_ids}


def _make_directory(out_dir: Path) -> Path:
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    directory = out_dir / f"{started}-{os.getpid()}"
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"cannot write to {out_dir}: {error.strerror}") from error
    return directory


def _process_start(pid: int) -> int | None:
    """When a process began, in clock ticks after boot: tells it from a later one of that id."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[19])
