"""One captured request: from copies of its bytes to what is known of it.

The wire calls `upload`, `response`, `download` and `end`, which only copy or queue; the work is
done after the wire's. Whatever fails here is counted and ends this request's capture, never its
forwarding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from capture.proxy.answer import Answer, Piece
from capture.proxy.body import Body
from capture.proxy.caller import Caller
from capture.proxy.content import BrokenContentError, UnknownCodingError
from capture.proxy.messages import RequestHead, ResponseHead, values_of
from capture.proxy.outcome import Outcome, Verdict, judge
from capture.proxy.question import Question, read_question
from capture.proxy.record import Series
from capture.proxy.sse import EventStream

if TYPE_CHECKING:
    from capture.proxy.recorder import Recorder

log = logging.getLogger("inferloop.proxy")

CHUNKS_KEPT = 100_000
"""Times of chunks that are kept: an endless answer must not take endless memory."""


@dataclass(slots=True)
class Timeline:
    """When what came, `time.monotonic_ns()`, 0: never. `chunks`: when each came;
    `gaps`: the ns since the one before it of the same choice."""

    arrival_ns: int
    arrival: datetime
    first_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    chunks: Series = field(default_factory=Series)
    gaps: Series = field(default_factory=Series)


class Observation:
    """Made when a request's head is complete; `chat`: of chat completions, else completions.

    `question`, `answer` and `time` hold what is known so far; `skipped` says why the rest is not,
    "" while nothing is in the way, `skipped_why` says more.
    """

    def __init__(
        self,
        recorder: Recorder,
        head: RequestHead,
        caller: Caller,
        *,
        chat: bool,
        arrival_ns: int,
    ) -> None:
        self.caller, self.chat = caller, chat
        self.slot = recorder.trace.new_slot()
        self.time = Timeline(arrival_ns, datetime.now(UTC))
        self.question = Question()
        self.is_traced = self.has_token = False
        self.conversation_id = caller.conversation or caller.request_id
        self.is_mirrored = False
        self.answer = Answer(
            keeps_text=False, limit_bytes=recorder.body_bytes, budget=recorder.budget
        )
        self.skipped = self.skipped_why = ""
        self.request_bytes = 0
        self.is_cut = False
        self._recorder = recorder
        self._request: Body | None = None
        self._response: Body | None = None
        self._events: EventStream | None = None
        self._rows = 0
        self._last_of_choice: dict[int, int] = {}
        self._guarded(self._begin, head)

    @property
    def rows(self) -> int:
        """Tokens that were traced one by one."""
        return self._rows

    # for the wire

    def upload(self, data: bytes) -> None:
        if self._request is not None and self._request.is_plain:
            self._guarded(self._request.keep, data)  # as cheap as queueing, and takes no room there
        else:
            self._queue(self._keep_request, data, size=len(data))

    def upload_end(self) -> None:
        self._queue(self._read_request)

    def response(self, head: ResponseHead) -> None:
        self._queue(self._begin_response, head)

    def download(self, data: bytes, at_ns: int) -> None:
        self._queue(self._read_response, data, at_ns, size=len(data))

    def end(self, outcome: Outcome, detail: str, status: int, at_ns: int) -> None:
        """`status`: what the client was told, 0: nothing."""
        self._recorder.offwire.post(self._end, outcome, detail, status, at_ns)

    # after the wire

    def _queue(self, work: Callable[..., None], *arguments: Any, size: int = 0) -> None:
        if not self._recorder.offwire.post(self._guarded, work, *arguments, size=size):
            self._skip("overflow")

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        if self.skipped:
            return
        try:
            work(*arguments)
        except UnknownCodingError as error:
            log.info("request %s is not captured: %s", self.caller.request_id, error)
            self._skip("encoding", str(error))
        except BrokenContentError as error:
            log.info("request %s is not captured: %s", self.caller.request_id, error)
            self._skip("broken_content", str(error))
        except Exception:  # noqa: BLE001 - forwarding must not depend on the capture
            self._recorder.failed(self.caller.request_id)
            self._skip("failed")

    def _skip(self, reason: str, why: str = "") -> None:
        """Read no more of its content; it is still counted, and its end is traced."""
        if not self.skipped:
            self.skipped, self.skipped_why = reason, why
            self._recorder.metrics.skipped(reason)

    def _begin(self, head: RequestHead) -> None:
        self._request = Body(head.headers, self._recorder.budget, self._recorder.body_bytes)

    def _keep_request(self, data: bytes) -> None:
        if self._request is not None:
            self._request.keep(data)

    def _read_request(self) -> None:
        """The whole request is there, or as much as came before its answer."""
        if self._request is None:
            return
        request, self._request = self._request, None
        self.request_bytes, self.is_cut = request.wire_bytes, request.cut
        self.question = read_question(request.take(), chat=self.chat, cut=self.is_cut)
        self.conversation_id = self._recorder.conversation_id(self.caller, self.question)
        self.is_mirrored = self._recorder.is_mirrored(self.conversation_id)
        self.answer.keeps_text = self.is_mirrored
        self._recorder.began(self)

    def _begin_response(self, head: ResponseHead) -> None:
        self._read_request()
        self._recorder.describe(head.headers, self.question.model)
        self._response = Body(head.headers, self._recorder.budget, self._recorder.body_bytes)
        kinds = values_of(head.headers, b"content-type")
        if kinds and kinds[0].lower().startswith(b"text/event-stream"):
            self._events = EventStream(self._recorder.body_bytes)

    def _read_response(self, data: bytes, at_ns: int) -> None:
        if self._response is None:
            return
        if self._events is None:
            self._response.keep(data)
            return
        for part in self._response.decode(data):
            for event in self._events.feed(part):
                self._take(self.answer.read_event(event), at_ns)

    def _take(self, pieces: list[Piece], at_ns: int) -> None:
        """Note what an event brought."""
        if not pieces:
            return
        for piece in pieces:
            self._trace(piece, at_ns)
        self.time.first_ns = self.time.first_ns or at_ns
        self.time.last_ns = at_ns
        if not self.has_token:
            self.has_token = True
            self._recorder.waiting -= 1
        if self.is_mirrored and len(self.time.chunks) < CHUNKS_KEPT:
            self.time.chunks.add(at_ns, sum([piece.tokens for piece in pieces]))

    def _trace(self, piece: Piece, at_ns: int) -> None:
        """Rows for a piece's tokens: a chunk of k tokens counts as k equal steps since the choice's
        token before it; in a choice's first chunk the tokens after the first took no time."""
        before_ns = self._last_of_choice.get(piece.choice)
        self._last_of_choice[piece.choice] = at_ns
        if before_ns is None:
            first_us, step_us = (at_ns - self.time.arrival_ns) / 1e3, 0.0
        else:
            first_us = step_us = (at_ns - before_ns) / 1e3 / piece.tokens
            if len(self.time.gaps) < CHUNKS_KEPT:
                self.time.gaps.add(at_ns - before_ns, piece.tokens)
        self._recorder.trace.tokens(
            self.slot, self._rows, piece, first_us, step_us, at_ns, is_first=before_ns is None
        )
        self._rows += piece.tokens

    def _end(self, outcome: Outcome, detail: str, status: int, at_ns: int) -> None:
        self.time.end_ns = at_ns
        self._guarded(self._read_request)
        self._guarded(self._read_rest)
        for body in (self._request, self._response):
            if body is not None:
                body.take()
        verdict = self._judge(outcome, status)
        try:
            self._recorder.ended(self, verdict, detail)
        except Exception:  # noqa: BLE001 - forwarding must not depend on the capture
            self._recorder.failed(self.caller.request_id)
            self._skip("failed")
        self.answer.release()

    def _read_rest(self) -> None:
        if self._events is not None:
            for event in self._events.end():
                self._take(self.answer.read_event(event), self.time.end_ns)
            self.answer.truncated |= bool(self._events.oversized)
        elif self._response is not None:
            self.answer.read_document(self._response.take(), cut=self._response.cut)

    def _judge(self, outcome: Outcome, status: int) -> Verdict:
        streamed, known = self._events is not None, not self.skipped
        return judge(outcome, status, self.answer, streamed=streamed, known=known)
