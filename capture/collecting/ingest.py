"""From frames to rows: gathers a ring's decoded columns in the shape of the lake's tables.

Not for writing them: that is `capture.collecting.insert`. Timestamps are made here, from the
ring's clock anchors; a clock step after the engine's start cannot make a latency negative.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from capture.collecting.row_types import arrow_table, check_row
from capture.decode import (
    EngineFrame,
    EventFrame,
    FinishFrame,
    Frame,
    GpuFrame,
    KernelFrame,
    MarkFrame,
    MemoryFrame,
    RequestFrame,
    StepColumns,
    decode,
    decode_steps,
    well_formed,
)
from capture.errors import FrameError
from capture.frames import FrameType, Phase
from capture.reader import Cursor, FrameBatch, Gap
from capture.ring import RingHeader
from capture.rings.liveness import boot_id

Columns = dict[str, npt.NDArray[Any]]
LOGPROB_BITS, MARGIN_BITS, DURATION_BITS = 10, 8, 3
"""Kept behind the binary point, which saves bytes where they are many: probabilities stay within
0.05 %, a step's durations within 1/16 us."""

RADIX_SORTED = 65535  # integers of 16 bits NumPy sorts in a sixth of the time
BATCH_OTHERS = 10  # rows' memory that the columns of a batch take, however few rows are in it
MOST_US = 1e15  # 31 years: a latency beyond it was never measured


def rounded(values: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """`values` rounded to multiples of 2^-`bits`; NaN stays NaN, and there is no -0."""
    unit = np.float32(2.0**-bits)
    with np.errstate(over="ignore"):  # becomes infinite, as good as what it was
        whole: npt.NDArray[np.float32] = np.rint(values / unit) * unit
    return whole + np.float32(0)


class RingRows:
    """Rows of one ring that wait for their commit: `tokens`, `in_columns` with steps and prefill
    chunks, and `others` of all other kinds, to which the memory of small batches is counted.

    `last_step`: the largest step id among all rows so far, -1: none; its step may go on.
    `cursor_us`: the time in the row of the cursor that is committed with these rows, by which that
    row is found again.
    """

    def __init__(self, header: RingHeader) -> None:
        self.header = header
        self.engine_id = str(header.engine_id)
        self.tokens = 0
        self.in_columns = 0
        self.others = 0
        self.last_step = -1
        self.cursor_us: int | None = None
        self._wall_offset_ns = header.anchor_wall_ns - header.anchor_monotonic_ns
        self._same_boot = header.boot_id == boot_id()
        self._steps: list[Columns] = []
        self._tokens: list[Columns] = []
        self._chunks: list[Columns] = []
        self._rows: dict[str, list[tuple[Any, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._steps or self._tokens or self._chunks or self._rows)

    def take(self) -> RingRows:
        """All rows so far, to be committed; here the next ones gather."""
        taken = copy(self)
        self.tokens = self.in_columns = self.others = 0
        self._steps, self._tokens, self._chunks, self._rows = [], [], [], {}
        return taken

    def wall_us(self, time_ns: int) -> int | None:
        """UTC in microseconds of a monotonic time; None for 0: it never happened."""
        return (time_ns + self._wall_offset_ns) // 1000 if time_ns else None

    def now_us(self) -> int:
        """The time by the ring's clock, which no step of the wall clock moves: what the collector
        notes is never earlier than what the engine wrote before."""
        if self._same_boot:
            return (time.monotonic_ns() + self._wall_offset_ns) // 1000
        return time.time_ns() // 1000

    def add(self, batch: FrameBatch) -> None:
        """Take the frames of a batch in."""
        for gap in batch.gaps:
            self.add_gap(gap)
        if not len(batch):
            return
        is_step = batch.headers["type"] == FrameType.STEP
        indices = np.flatnonzero(is_step)
        fits = well_formed(batch, indices)
        if len(indices[fits]):
            self._add_steps(decode_steps(batch, indices[fits]))
        for index in [*np.flatnonzero(~is_step).tolist(), *indices[~fits].tolist()]:
            try:
                self._add_frame(decode(batch, index))
            except FrameError as error:
                header = batch.headers[index]
                self.add_loss("undecodable", header["sequence"], 1, header["tokens"], str(error))

    def add_gap(self, gap: Gap) -> None:
        self.add_loss("overwritten", gap.first_sequence, gap.frames, gap.tokens, None)

    def add_loss(self, kind: str, sequence: int, frames: int, tokens: int, why: str | None) -> None:
        row = (self.header.epoch, self.now_us(), kind, int(sequence), int(frames), int(tokens), why)
        self.add_row("losses", *row)

    def add_row(self, table: str, *values: Any) -> None:
        """One row, without its engine id, in the order of the table's columns.

        Raises FrameError when a value does not fit: the lake would refuse the whole commit.
        """
        check_row(table, values)
        self._rows.setdefault(table, []).append(values)
        self.others += 1

    def add_cursor(self, cursor: Cursor, *, finished: bool) -> None:
        self.cursor_us = self.now_us()
        self.add_row(
            "ingest_cursor",
            self.header.epoch,
            cursor.sequence,
            cursor.tokens,
            cursor.position,
            cursor.lost_frames,
            cursor.lost_tokens,
            cursor.torn_frames,
            cursor.corrupt_frames,
            finished,
            self.cursor_us,
        )

    def has(self, table: str) -> bool:
        return table in self._rows

    def add_end(self, kind: str, detail: str) -> None:
        """The engine's own end, as an event."""
        self.add_row("events", self.now_us(), kind, None, None, detail, None)

    def tables(self) -> Iterator[tuple[str, Columns | pa.Table]]:
        """The rows by table, without their engine id; they stay here."""
        for name, parts in (
            ("steps", self._steps),
            ("tokens", self._tokens),
            ("prefill_chunks", self._chunks),
        ):
            if parts:
                rows_of = _concatenated(parts)
                yield name, _by_request(rows_of) if name == "tokens" else rows_of
        for name, rows in self._rows.items():
            yield name, arrow_table(name, rows)

    def _add_steps(self, decoded: StepColumns) -> None:
        steps, rows, counts = decoded.steps, decoded.rows, decoded.counts
        spent_us = (
            steps["schedule_us"].astype(np.float64)
            + steps["prepare_us"]
            + steps["forward_us"]
            + steps["sample_us"]
        )
        start_ns = steps["start_ns"]
        end_ns = start_ns + (_possible(spent_us) * 1000).astype(np.int64)
        step_id = np.repeat(steps["step_id"].astype(np.int64), counts)
        ended_at = np.repeat(self._walls(end_ns), counts)
        is_token = rows["phase"] != Phase.PREFILL
        tokens = slice(None) if is_token.all() else is_token
        latency_us = _possible(rows["latency_us"][tokens])
        self._tokens.append(
            {
                "slot": rows["slot"][tokens].astype(np.int64),
                "step_id": step_id[tokens],
                "position": rows["position"][tokens].view(np.int32),
                "token_id": rows["token_id"][tokens].view(np.int32),
                "is_first": rows["phase"][tokens] == Phase.FIRST,
                "emitted_at": ended_at[tokens],
                "latency_us": np.rint(latency_us).astype(np.int64),
                "logprob": rounded(rows["logprob"][tokens], LOGPROB_BITS),
                "margin": rounded(rows["margin"][tokens], MARGIN_BITS),
                "kv_blocks": rows["kv_blocks"][tokens].view(np.int32),
            }
        )
        self.tokens += len(latency_us)
        self.in_columns += len(is_token) + len(steps)
        self.others += BATCH_OTHERS
        self.last_step = max(self.last_step, int(steps["step_id"].max()))
        if not is_token.all():
            chunks = ~is_token
            self._chunks.append(
                {
                    "slot": rows["slot"][chunks].astype(np.int64),
                    "step_id": step_id[chunks],
                    "position": rows["position"][chunks].view(np.int32),
                    "computed_at": ended_at[chunks],
                    "kv_blocks": rows["kv_blocks"][chunks].view(np.int32),
                }
            )
        self._steps.append(self._step_rows(steps[steps["part"] == 0]))

    def _step_rows(self, steps: npt.NDArray[np.void]) -> Columns:
        columns: Columns = {
            "step_id": steps["step_id"].astype(np.int64),
            "started_at": self._walls(steps["start_ns"]),
        }
        for name in ("schedule_us", "prepare_us", "forward_us", "sample_us", "device_us"):
            columns[name] = rounded(steps[name], DURATION_BITS)
        for name in (
            "prefill_tokens",
            "decode_tokens",
            "running",
            "waiting",
            "kv_used",
            "kv_total",
            "prefix_hit_tokens",
        ):
            columns[name] = np.ascontiguousarray(steps[name]).view(np.int32)
        columns["graph_bucket"] = steps["graph_bucket"]
        return columns

    def _walls(self, time_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.datetime64]:
        microseconds = (time_ns + self._wall_offset_ns) // 1000
        return microseconds.astype(np.int64).view("datetime64[us]")

    def _add_frame(self, frame: Frame) -> None:
        match frame:
            case RequestFrame():
                self.add_row(
                    "requests",
                    frame.slot,
                    frame.request_id,
                    self.wall_us(frame.arrival_ns),
                    frame.prompt_tokens,
                    frame.cached_tokens,
                    frame.max_tokens,
                    frame.priority,
                    frame.adjustment,
                    frame.tenant,
                    frame.route,
                    frame.class_key,
                )
            case FinishFrame():
                self.add_row(
                    "finishes",
                    frame.slot,
                    frame.reason,
                    frame.output_tokens,
                    self.wall_us(frame.admitted_ns),
                    self.wall_us(frame.first_token_ns),
                    self.wall_us(frame.last_token_ns),
                    self.wall_us(frame.detokenized_ns),
                    self.wall_us(frame.serialized_ns),
                    self.wall_us(frame.flushed_ns),
                    self.wall_us(frame.time_ns),
                )
            case EventFrame():
                at = self.wall_us(frame.time_ns)
                spent_us = None if frame.duration_ns is None else frame.duration_ns // 1000
                self.add_row(
                    "events",
                    at,
                    frame.kind,
                    frame.request_id,
                    frame.slot,
                    frame.detail,
                    spent_us,
                )
            case EngineFrame():
                self.add_engine(frame.info)
            case KernelFrame():
                self._add_kernels(frame)
            case GpuFrame():
                self._add_gpu(frame)
            case MemoryFrame():
                self._add_memory(frame)
            case MarkFrame():
                self.add_row("marks", self.wall_us(frame.time_ns), frame.text)
            case _:
                raise FrameError("a STEP frame is not decoded alone")

    def add_engine(self, info: dict[str, Any] | None) -> None:
        """The engine's row; None: its ENGINE frame was lost."""
        model, fingerprint = (info or {}).get("model"), (info or {}).get("fingerprint")
        self.add_row(
            "engines",
            self.header.epoch,
            socket.gethostname(),
            self.header.pid,
            self.wall_us(self.header.anchor_monotonic_ns),
            _as_text(fingerprint),
            _as_text(model),
            json.dumps(info, ensure_ascii=False) if info is not None else None,
        )

    def _add_kernels(self, frame: KernelFrame) -> None:
        starts = self._walls(frame.start_ns).view(np.int64).tolist()
        columns = (frame.layer, frame.kernel, starts, frame.duration_us)
        for layer, kernel, start, duration in zip(*columns, strict=True):
            self.add_row("kernels", frame.step_id, layer, frame.names[kernel], start, duration)

    def _add_gpu(self, frame: GpuFrame) -> None:
        self.add_row(
            "gpu_samples",
            self.wall_us(frame.time_ns),
            frame.device,
            frame.utilization_pct,
            frame.sm_pct,
            frame.memory_bandwidth_pct,
            _as_bytes(frame.memory_used_bytes),
            frame.power_w,
            frame.temperature_c,
            frame.sm_clock_mhz,
            frame.memory_clock_mhz,
            frame.age_ms,
            frame.unavailable or None,
        )

    def _add_memory(self, frame: MemoryFrame) -> None:
        self.add_row(
            "memory_samples",
            self.wall_us(frame.time_ns),
            frame.device,
            _as_bytes(frame.rss_bytes),
            _as_bytes(frame.reserved_bytes),
            _as_bytes(frame.allocated_bytes),
            _as_bytes(frame.peak_allocated_bytes),
            _as_bytes(frame.largest_free_bytes),
            frame.fragmentation,
            frame.unavailable or None,
        )


def _possible(spent_us: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """Microseconds that a whole number can hold; what is none, or no time at all, becomes 0."""
    possible: npt.NDArray[np.floating[Any]] = np.nan_to_num(spent_us, posinf=0).clip(0, MOST_US)
    return possible


def _as_bytes(value: float) -> int | None:
    return int(value) if np.isfinite(value) else None


def _concatenated(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _by_request(tokens: Columns) -> Columns:
    """A commit's tokens request by request, in the order of its steps: 1.3 bytes a token less,
    because neighbouring rows then differ in little more than their text."""
    slots = tokens["slot"] - tokens["slot"].min()
    if slots.max() <= RADIX_SORTED:
        slots = slots.astype(np.uint16)
    order = np.argsort(slots, kind="stable")
    return {name: column.take(order) for name, column in tokens.items()}


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
