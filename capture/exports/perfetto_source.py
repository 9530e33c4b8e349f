"""What a Perfetto trace is made of, read from the lake slice by slice of time.

A slice holds a bounded number of tokens with the steps they came from, so memory does not grow
with the export. Needs the table `chosen` of `capture.exports.selection`. Times are us since 1970.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from capture.exports.selection import Window

if TYPE_CHECKING:
    import duckdb

SLICE_TOKENS = 20_000
LONGEST_STEP_US = 60_000_000

Row = dict[str, Any]
StepKey = tuple[str, int]


@dataclass
class Slice:
    """What began in a slice of time; tokens by their step, those without one by themselves."""

    start_us: int
    end_us: int
    requests: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    tokens: dict[StepKey, list[Row]] = field(default_factory=dict)
    orphans: list[Row] = field(default_factory=list)
    kernels: dict[StepKey, list[Row]] = field(default_factory=dict)
    events: list[Row] = field(default_factory=list)
    gpu: list[Row] = field(default_factory=list)
    memory: list[Row] = field(default_factory=list)


def microseconds(time: datetime) -> int:
    """A UTC time without zone as us since 1970."""
    whole = time.replace(tzinfo=UTC, microsecond=0).timestamp()
    return int(whole) * 1_000_000 + time.microsecond


class TraceSource:
    """The chosen part of the lake."""

    def __init__(self, lake: duckdb.DuckDBPyConnection, window: Window) -> None:
        self.start_us = microseconds(window.start)
        self.end_us = microseconds(window.end)
        self._lake = lake
        lake.execute(
            "CREATE OR REPLACE TEMP TABLE chosen_engines AS SELECT DISTINCT engine_id FROM chosen"
        )

    def engines(self) -> list[Row]:
        return self._rows(
            "SELECT c.engine_id::VARCHAR AS engine_id, any_value(e.model) AS model, "
            "any_value(e.host) AS host, any_value(e.pid) AS pid, "
            "any_value(e.fingerprint) AS fingerprint "
            "FROM chosen_engines AS c LEFT JOIN engines AS e USING (engine_id) GROUP BY ALL"
        )

    def losses(self) -> list[Row]:
        return self._rows(
            "SELECT engine_id::VARCHAR AS engine_id, epoch_us(noticed_at) AS at_us, kind, frames, "
            "tokens, detail FROM losses SEMI JOIN chosen_engines USING (engine_id) "
            "WHERE noticed_at >= make_timestamp($start) ORDER BY engine_id, first_sequence"
        )

    def totals(self) -> dict[str, int]:
        """How much there is of what a cap may leave out."""
        within = "BETWEEN make_timestamp($start) AND make_timestamp($end)"
        (row,) = self._rows(
            "SELECT (SELECT count(*) FROM chosen) AS requests,"
            " (SELECT count(*) FROM tokens SEMI JOIN chosen USING (engine_id, slot)"
            f" WHERE emitted_at {within}) AS tokens,"
            " (SELECT count(*) FROM steps SEMI JOIN chosen_engines USING (engine_id)"
            f" WHERE started_at {within}) AS steps,"
            " (SELECT count(*) FROM kernels SEMI JOIN chosen_engines USING (engine_id)"
            f" WHERE started_at {within}) AS kernels"
        )
        return {name: int(count) for name, count in row.items()}

    def slices(self) -> Iterator[Slice]:
        """The window from its start to its end."""
        edges = [self.start_us, *self._edges(), self.end_us]
        for number in range(len(edges) - 1):
            yield self._slice(edges[number], edges[number + 1], first=number == 0)

    def _edges(self) -> list[int]:
        """Starts of steps that cut the window into slices of about SLICE_TOKENS tokens."""
        rows = self._rows(
            "WITH counted AS (SELECT epoch_us(started_at) AS at_us,"
            " sum(coalesce(decode_tokens, 0) + 4) OVER (ORDER BY started_at, step_id"
            f" ROWS UNBOUNDED PRECEDING)::BIGINT // {SLICE_TOKENS} AS number"
            " FROM steps SEMI JOIN chosen_engines USING (engine_id)"
            " WHERE started_at >= make_timestamp($start) AND started_at < make_timestamp($end))"
            " SELECT min(at_us) AS at_us FROM counted GROUP BY number ORDER BY at_us"
        )
        return [int(row["at_us"]) for row in rows[1:]]

    def _slice(self, start_us: int, end_us: int, *, first: bool) -> Slice:
        part = Slice(start_us, end_us)
        bounds = {"start": start_us, "end": end_us}
        before = "true" if first else "arrived_at >= make_timestamp($start)"
        part.requests = self._rows(
            "SELECT engine_id::VARCHAR AS engine_id, * EXCLUDE (engine_id, arrived_at, admitted_at,"
            " first_token_at, last_token_at, detokenized_at, serialized_at, flushed_at,"
            " finished_at), epoch_us(arrived_at) AS arrived_us, epoch_us(admitted_at)"
            " AS admitted_us, epoch_us(last_token_at) AS last_token_us,"
            " epoch_us(flushed_at) AS flushed_us, epoch_us(finished_at) AS finished_us"
            f" FROM chosen WHERE {before} AND arrived_at < make_timestamp($end)"
            " ORDER BY arrived_at, slot",
            **bounds,
        )
        part.steps = self._began("steps", "started_at", **bounds)
        keys = {(row["engine_id"], row["step_id"]) for row in part.steps}
        ends = [row["at_us"] + int(step_us(row)) + 1 for row in part.steps]
        latest = max([end_us, *ends])
        for row in self._token_rows(start_us, end_us, latest):
            key = (row["engine_id"], row["step_id"])
            if key in keys:
                part.tokens.setdefault(key, []).append(row)
            elif row["orphan"]:
                part.orphans.append(row)
        for row in self._kernel_rows(part.steps, latest):
            part.kernels.setdefault((row["engine_id"], row["step_id"]), []).append(row)
        part.events = self._began("events", "happened_at", **bounds)
        part.events += [
            {**row, "kind": f"mark: {row['text']}"}
            for row in self._began("marks", "marked_at", **bounds)
        ]
        part.gpu = self._began("gpu_samples", "sampled_at", **bounds)
        part.memory = self._began("memory_samples", "sampled_at", **bounds)
        return part

    def _began(self, table: str, time: str, **bounds: int) -> list[Row]:
        """The engines' rows of a table in a slice, their time as `at_us`."""
        return self._rows(
            f"SELECT engine_id::VARCHAR AS engine_id, * EXCLUDE (engine_id, {time}),"
            f" epoch_us({time}) AS at_us FROM {table} SEMI JOIN chosen_engines USING (engine_id)"
            f" WHERE {time} >= make_timestamp($start) AND {time} < make_timestamp($end)"
            f" ORDER BY {time}",
            **bounds,
        )

    def _token_rows(self, start_us: int, end_us: int, latest_us: int) -> list[Row]:
        """Tokens of the slice's steps; `orphan`: its step is in no slice, because it was lost."""
        return self._rows(
            "SELECT t.engine_id::VARCHAR AS engine_id, t.* EXCLUDE (engine_id, emitted_at),"
            " epoch_us(t.emitted_at) AS at_us, s.step_id IS NULL"
            " AND t.emitted_at < make_timestamp($end) AS orphan"
            " FROM tokens AS t SEMI JOIN chosen USING (engine_id, slot)"
            " LEFT JOIN steps AS s ON s.engine_id = t.engine_id AND s.step_id = t.step_id"
            f" AND s.started_at >= make_timestamp($start - {LONGEST_STEP_US})"
            " AND s.started_at < make_timestamp($latest)"
            " WHERE t.emitted_at >= make_timestamp($start)"
            " AND t.emitted_at <= make_timestamp($latest) ORDER BY t.emitted_at, t.position",
            start=start_us,
            end=end_us,
            latest=latest_us,
        )

    def _kernel_rows(self, steps: list[Row], latest_us: int) -> list[Row]:
        if not steps:
            return []
        numbers = [row["step_id"] for row in steps]
        return self._rows(
            "SELECT engine_id::VARCHAR AS engine_id, * EXCLUDE (engine_id, started_at),"
            " epoch_us(started_at) AS at_us FROM kernels"
            " SEMI JOIN chosen_engines USING (engine_id)"
            " WHERE step_id BETWEEN $first AND $last"
            f" AND started_at BETWEEN make_timestamp($start - {LONGEST_STEP_US})"
            f" AND make_timestamp($latest + {LONGEST_STEP_US}) ORDER BY started_at",
            start=steps[0]["at_us"],
            latest=latest_us,
            first=min(numbers),
            last=max(numbers),
        )

    def _rows(self, sql: str, **values: int) -> list[Row]:
        values = {"start": self.start_us, "end": self.end_us, **values}
        used = {name: value for name, value in values.items() if f"${name}" in sql}
        rows: list[Row] = self._lake.execute(sql, used).to_arrow_table().to_pylist()
        return rows


def step_us(row: Row) -> float:
    """Duration of a step."""
    parts = ("schedule_us", "prepare_us", "forward_us", "sample_us")
    return float(sum(row[part] or 0.0 for part in parts))
