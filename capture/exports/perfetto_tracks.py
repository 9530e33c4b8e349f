"""How requests and engines are drawn in a Perfetto trace.

A request's track is a small state machine, so that its slices nest whatever was lost: phases close
before the next opens, and nothing begins before what is drawn already. Not for reading the lake.
"""

from __future__ import annotations

from capture.exports.perfetto_file import BYTES, COUNT, Args, TraceFile, Track
from capture.exports.perfetto_source import Row, step_us

SHORTEST_NS = 1000
STEP_ARGS = (
    "step_id",
    "decode_tokens",
    "prefill_tokens",
    "running",
    "waiting",
    "kv_used",
    "kv_total",
    "prefix_hit_tokens",
    "graph_bucket",
    "device_us",
)
REQUEST_ARGS = (
    "request_id",
    "slot",
    "tenant",
    "route",
    "class_key",
    "priority",
    "adjustment",
    "prompt_tokens",
    "cached_tokens",
    "max_tokens",
    "output_tokens",
)
TOKEN_ARGS = (
    "position",
    "token_id",
    "latency_us",
    "logprob",
    "margin",
    "step_id",
    "kv_blocks",
)
COUNTERS = {
    "KV blocks used": (COUNT, 10),
    "requests running": (COUNT, 11),
    "requests waiting": (COUNT, 12),
    "tokens in a step": (COUNT, 13),
}
GPU_COUNTERS = {
    "utilization_pct": ("utilisation", "%"),
    "sm_pct": ("multiprocessors busy", "%"),
    "memory_used_bytes": ("memory used", BYTES),
    "power_w": ("power", "W"),
    "temperature_c": ("temperature", "C"),
}
MEMORY_COUNTERS = {
    "reserved_bytes": "allocator reserved",
    "allocated_bytes": "allocator allocated",
    "largest_free_bytes": "allocator largest free",
    "rss_bytes": "resident memory",
}


class RequestTrack:
    """The track of one request, from its arrival on."""

    def __init__(self, file: TraceFile, parent: Track, row: Row, start_us: int) -> None:
        self._file = file
        self._row = row
        name = f"{row['request_id'][:8]} {row['tenant'] or ''} {row['route'] or ''}".rstrip()
        key = f"request {row['engine_id']} {row['slot']}"
        self._track = file.track(key, name, parent)
        args = {name: row[name] for name in REQUEST_ARGS}
        args["outcome"] = row["reason"] or "unfinished"
        at_ns = max(row["arrived_us"], start_us) * 1000
        file.begin(self._track, at_ns, f"request {row['request_id']}", args, intern=False)
        file.begin(self._track, at_ns, "queued")
        self._phase = "queued"

    def admit(self, at_us: int) -> None:
        if self._phase == "queued":
            self._enter("prefill", at_us)

    def token(self, row: Row, step_start_us: int | None) -> int | None:
        """A slice from the token before to this one; the arrow that leaves it for its step."""
        file, track = self._file, self._track
        step_ns = None if step_start_us is None else step_start_us * 1000
        if row["is_first"]:
            self.admit(row["at_us"] if step_start_us is None else step_start_us)
        elif self._phase != "decode":  # its first token was lost, or before the window
            self._enter("decode", row["at_us"] - (row["latency_us"] or 0))
        begin_ns = max(track.now_ns, step_ns or 0) if row["is_first"] else track.now_ns
        arrow = file.new_flow() if step_ns is not None and begin_ns <= step_ns else None
        file.begin(
            track,
            begin_ns,
            f"token {row['position']}",
            {name: row[name] for name in TOKEN_ARGS},
            starts=() if arrow is None else (arrow,),
            intern=False,
        )
        file.end(track, row["at_us"] * 1000)
        if row["is_first"]:
            self._enter("decode", row["at_us"])
        return arrow

    def finish(self) -> None:
        """Close the phases as the request's own times say."""
        row = self._row
        if row["flushed_us"] is not None and self._phase == "decode":
            self._enter("sending", row["last_token_us"] or 0)
        self.close(row["flushed_us"] or row["finished_us"] or 0)

    def close(self, at_us: int) -> None:
        while self._track.depth:
            self._file.end(self._track, at_us * 1000)

    def _enter(self, phase: str, at_us: int) -> None:
        self._file.end(self._track, at_us * 1000)
        self._file.begin(self._track, at_us * 1000, phase)
        self._phase = phase


class EngineTracks:
    """The tracks of one engine process."""

    def __init__(self, file: TraceFile, row: Row, losses: list[Row]) -> None:
        self._file = file
        self._key = row["engine_id"]
        name = f"engine {row['model'] or 'unknown model'} {self._key[:8]} on {row['host'] or '?'}"
        self.process = file.process(f"engine {self._key}", name, row["pid"] or 1)
        self._steps = self._track("steps", 1)
        self._kernels = self._track("kernels", 2)
        self._events = self._track("events", 3)
        self._losses = self._track("losses", 4)
        self.requests = self._track("requests", 50)
        self._counters: dict[str, Track] = {}
        self._pauses: dict[str, Track] = {}
        self._gaps_lost = [loss for loss in losses if loss["kind"] == "overwritten"]
        self._others_lost = [loss for loss in losses if loss["kind"] != "overwritten"]
        self._last: tuple[int, int] | None = None  # id and end of the step before

    def draw_step(self, row: Row, kernels: list[Row], arrows: tuple[int, ...]) -> None:
        """A step with its parts, its counters and its kernels."""
        file, track = self._file, self._steps
        start_ns, end_ns = row["at_us"] * 1000, row["at_us"] * 1000 + int(step_us(row) * 1000)
        self._draw_gap(row["step_id"], start_ns, end_ns)
        to_kernels = file.new_flow() if kernels and kernels[0]["at_us"] >= row["at_us"] else None
        args: Args = {name: row[name] for name in STEP_ARGS}
        starts = () if to_kernels is None else (to_kernels,)
        file.begin(track, start_ns, "step", args, starts=starts, ends=arrows)
        part_ns = start_ns
        for part in ("schedule", "prepare", "forward", "sample"):
            file.begin(track, part_ns, part)
            part_ns += int((row[f"{part}_us"] or 0.0) * 1000)
            file.end(track, part_ns)
        file.end(track, end_ns)
        tokens = (row["decode_tokens"] or 0) + (row["prefill_tokens"] or 0)
        values = (row["kv_used"], row["running"], row["waiting"], tokens)
        for (name, (unit, rank)), value in zip(COUNTERS.items(), values, strict=True):
            self._count(name, start_ns, value, unit, rank)
        for number, kernel in enumerate(kernels):
            arrives = (to_kernels,) if number == 0 and to_kernels is not None else ()
            at_ns = kernel["at_us"] * 1000
            file.begin(
                self._kernels,
                at_ns,
                kernel["kernel"] or "unknown",
                {"layer": kernel["layer"], "step_id": kernel["step_id"]},
                ends=arrives,
            )
            file.end(self._kernels, at_ns + int((kernel["duration_us"] or 0.0) * 1000))

    def draw_event(self, row: Row) -> None:
        """An instant; a slice when it lasted, such as a garbage collection."""
        args = {name: row.get(name) for name in ("request_id", "slot", "detail")}
        at_ns, spent_us = row["at_us"] * 1000, row.get("duration_us")
        if spent_us is None:
            self._file.instant(self._events, at_ns, row["kind"], args)
            return
        if row["kind"] not in self._pauses:
            self._pauses[row["kind"]] = self._track(row["kind"], 5)
        track = self._pauses[row["kind"]]
        self._file.begin(track, at_ns - spent_us * 1000, row["kind"], args)
        self._file.end(track, at_ns)

    def draw_gpu(self, row: Row) -> None:
        for column, (name, unit) in GPU_COUNTERS.items():
            shown = f"GPU {row['device']} {name}"
            self._count(shown, row["at_us"] * 1000, row[column], unit, 20)

    def draw_memory(self, row: Row) -> None:
        where = "" if row["device"] < 0 else f"GPU {row['device']} "
        for column, name in MEMORY_COUNTERS.items():
            self._count(f"{where}{name}", row["at_us"] * 1000, row[column], BYTES, 30)

    def draw_other_losses(self, until_us: int) -> None:
        """Losses that are no gap between two steps, where the collector noticed them."""
        noticed = sorted([*self._gaps_lost, *self._others_lost], key=lambda loss: loss["at_us"])
        for loss in noticed:
            if loss["at_us"] <= until_us:
                self._draw_loss(loss, loss["at_us"] * 1000, loss["at_us"] * 1000 + SHORTEST_NS)

    def _draw_gap(self, step_id: int, start_ns: int, end_ns: int) -> None:
        """What was lost between the step before and this one."""
        last, self._last = self._last, (step_id, end_ns)
        if last is None or step_id <= last[0] + 1:
            return
        for number, loss in enumerate(self._gaps_lost):
            if loss["at_us"] * 1000 >= last[1]:
                self._draw_loss(self._gaps_lost.pop(number), last[1], start_ns)
                return
        missing = step_id - last[0] - 1
        self._file.begin(self._losses, last[1], "steps missing", {"steps": missing})
        self._file.end(self._losses, start_ns)

    def _draw_loss(self, loss: Row, start_ns: int, end_ns: int) -> None:
        name = f"trace lost {loss['tokens']} tokens"
        args = {name: loss[name] for name in ("kind", "tokens", "frames", "detail")}
        self._file.begin(self._losses, start_ns, name, args, intern=False)
        self._file.end(self._losses, end_ns)

    def _count(self, name: str, at_ns: int, value: float | None, unit: object, rank: int) -> None:
        if value is None:
            return
        if name not in self._counters:
            key = f"counter {self._key} {name}"
            parent = self.process
            track = self._file.counter(key, name, parent, unit=unit, rank=rank)
            self._counters[name] = track
        self._file.count(self._counters[name], at_ns, float(value))

    def _track(self, name: str, rank: int) -> Track:
        return self._file.track(f"{name} {self._key}", name, self.process, rank=rank)
