"""A Perfetto trace file: tracks, slices, instants, counters and flows as TrackEvent packets.

Written as a stream with interned names, so memory stays small however large the trace. Keeps what
makes a trace valid: each track's times never go back, slices nest, ids are unique. Not for what an
engine's trace means: that is `capture.exports.perfetto`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import IO, Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    CounterDescriptor,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

SEQUENCE = 1
STATE_CLEARED, NEEDS_STATE = 1, 2
OTHER_HOST_PIDS = 1 << 22  # above any pid of Linux
REALTIME, BOOTTIME = 1, 6  # of Perfetto's built-in clocks
BYTES = CounterDescriptor.Unit.UNIT_SIZE_BYTES
COUNT = CounterDescriptor.Unit.UNIT_COUNT
_BEGIN = TrackEvent.Type.TYPE_SLICE_BEGIN
_END = TrackEvent.Type.TYPE_SLICE_END
_INSTANT = TrackEvent.Type.TYPE_INSTANT
_COUNTER = TrackEvent.Type.TYPE_COUNTER

Args = dict[str, Any]


@dataclass
class Track:
    """A line of the picture. `now_ns` is its latest time, `depth` the slices open on it."""

    uuid: int
    now_ns: int = 0
    depth: int = 0
    value: float | None = field(default=None)


class TraceFile:
    """Writes packets to a binary stream; `size` and `events` say how much so far.

    An event is a slice, an instant or a value of a counter. Times are ns since 1970.
    """

    def __init__(self, stream: IO[bytes], start_ns: int) -> None:
        self.events = 0
        self.size = 0
        self._stream = stream
        self._builder = StreamingTraceProtoBuilder(_Counting(self))
        self._names: dict[str, int] = {}
        self._arguments: dict[str, int] = {}
        self._uuids: set[int] = set()
        self._pids: set[int] = set()
        self._flows = 0
        packet = self._packet(start_ns)
        packet.sequence_flags = STATE_CLEARED
        for clock in (BOOTTIME, REALTIME):  # so that viewers can show the time of day
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=start_ns)
        self._builder.write_packet(packet)

    def group(self, key: str, name: str) -> Track:
        """A group of tracks; `key` tells it from all other tracks."""
        track, descriptor, packet = self._track(key, None)
        descriptor.name = name
        self._builder.write_packet(packet)
        return track

    def process(self, key: str, name: str, pid: int) -> Track:
        """A process; viewers take those of equal pid for one, so that a second gets another."""
        track, descriptor, packet = self._track(key, None)
        while pid in self._pids:
            pid += OTHER_HOST_PIDS
        self._pids.add(pid)
        descriptor.process.pid = pid
        descriptor.process.process_name = name
        descriptor.child_ordering = TrackDescriptor.ChildTracksOrdering.EXPLICIT
        self._builder.write_packet(packet)
        return track

    def track(self, key: str, name: str, parent: Track, *, rank: int = 0) -> Track:
        """A track below another one; `rank` orders it among its siblings."""
        track, descriptor, packet = self._track(key, parent)
        descriptor.name = name
        descriptor.sibling_order_rank = rank
        descriptor.child_ordering = TrackDescriptor.ChildTracksOrdering.CHRONOLOGICAL
        self._builder.write_packet(packet)
        return track

    def counter(self, key: str, name: str, parent: Track, *, unit: Any, rank: int) -> Track:
        """A track of numbers; `unit` BYTES, COUNT, or the unit's name."""
        track, descriptor, packet = self._track(key, parent)
        descriptor.name = name
        descriptor.sibling_order_rank = rank
        if isinstance(unit, str):
            descriptor.counter.unit_name = unit
        else:
            descriptor.counter.unit = unit
        self._builder.write_packet(packet)
        return track

    def new_flow(self) -> int:
        """An id for an arrow from one slice to another."""
        self._flows += 1
        return self._flows

    def begin(
        self,
        track: Track,
        at_ns: int,
        name: str,
        args: Args | None = None,
        *,
        starts: tuple[int, ...] = (),
        ends: tuple[int, ...] = (),
        intern: bool = True,
    ) -> None:
        """Open a slice. `starts`, `ends`: flows that leave it, that arrive here for good."""
        event = self._event(track, at_ns, _BEGIN, name, args, intern)
        event.track_event.flow_ids.extend(starts)
        event.track_event.terminating_flow_ids.extend(ends)
        track.depth += 1
        self.events += 1
        self._builder.write_packet(event)

    def end(self, track: Track, at_ns: int) -> None:
        """Close the innermost open slice; nothing when there is none."""
        if not track.depth:
            return
        packet = self._at(track, at_ns)
        packet.track_event.type = _END
        track.depth -= 1
        self._builder.write_packet(packet)

    def instant(self, track: Track, at_ns: int, name: str, args: Args | None = None) -> None:
        self.events += 1
        self._builder.write_packet(self._event(track, at_ns, _INSTANT, name, args, False))

    def count(self, track: Track, at_ns: int, value: float | None) -> None:
        """A counter's value, when it is another one than before; None: not known, not drawn."""
        if value is None or value == track.value:
            return
        packet = self._at(track, at_ns)
        packet.track_event.type = _COUNTER
        packet.track_event.double_counter_value = value
        track.value = value
        self.events += 1
        self._builder.write_packet(packet)

    def _event(
        self, track: Track, at_ns: int, kind: Any, name: str, args: Args | None, intern: bool
    ) -> Any:
        packet = self._at(track, at_ns)
        event = packet.track_event
        event.type = kind
        if intern:
            event.name_iid = self._iid(packet.interned_data.event_names, self._names, name)
        else:
            event.name = name
        for key, value in (args or {}).items():
            if value is None:
                continue
            annotation = event.debug_annotations.add()
            known = self._arguments
            annotation.name_iid = self._iid(packet.interned_data.debug_annotation_names, known, key)
            if isinstance(value, bool):
                annotation.bool_value = value
            elif isinstance(value, int):
                annotation.int_value = value
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.string_value = str(value)
        return packet

    def _at(self, track: Track, at_ns: int) -> Any:
        """A packet on a track, whose time never goes back."""
        track.now_ns = max(track.now_ns, at_ns)
        packet = self._packet(track.now_ns)
        packet.sequence_flags = NEEDS_STATE
        packet.track_event.track_uuid = track.uuid
        return packet

    def _packet(self, at_ns: int) -> Any:
        packet = self._builder.create_packet()
        packet.timestamp = at_ns
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _track(self, key: str, parent: Track | None) -> tuple[Track, Any, Any]:
        digest = hashlib.blake2s(key.encode("utf-8", "replace"), digest_size=8).digest()
        uuid = int.from_bytes(digest, "little") or 1
        if uuid in self._uuids:
            raise ValueError(f"two tracks have the key {key!r}")
        self._uuids.add(uuid)
        packet = self._packet(0)
        packet.ClearField("timestamp")
        descriptor = packet.track_descriptor
        descriptor.uuid = uuid
        if parent is not None:
            descriptor.parent_uuid = parent.uuid
        return Track(uuid), descriptor, packet

    @staticmethod
    def _iid(entries: Any, known: dict[str, int], name: str) -> int:
        iid = known.get(name)
        if iid is None:
            iid = known[name] = len(known) + 1
            entries.add(iid=iid, name=name)
        return iid

    def _write(self, data: bytes) -> int:
        self.size += len(data)
        return self._stream.write(data)


class _Counting:
    """The stream as the builder sees it."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return self._file._write(data)
