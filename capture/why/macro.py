"""Why a request was slow: the table macro `why(request_id)` and the query it is made of.

The query is a chain of named pieces: what happened (`capture.why.pieces`), what each cause took
(`capture.why.causes`), who was involved and the verdict (`capture.why.evidence`). The report for
people is `capture.why.report`.
"""

from __future__ import annotations

from capture.schema import Column, View
from capture.why.causes import COSTS
from capture.why.evidence import CLAIMED, EVIDENCE
from capture.why.pieces import MIN_PREFIX, PIECES, Piece, request_key, wanted

_ASKED = Piece("asked", f"SELECT {request_key('wanted_request_id')} AS key")

_RESULT = """
SELECT position, emitted_at, latency_us / 1000 AS latency_ms, usual_us / 1000 AS usual_ms,
    verdict.cause AS cause, verdict.evidence AS evidence, step_id, slot,
    verdict.us / 1000 AS explained_ms, causes, request_id,
    engine_id
FROM (FROM verdicts UNION ALL BY NAME FROM sending UNION ALL BY NAME FROM sending_chunk)
ORDER BY arrived_at_us, slot, position NULLS LAST, emitted_at
"""


CAUSES = (*(claim.cause for claim in CLAIMED), "sending slow", "unexplained")
"""Every verdict there is."""


def why_query(condition: str) -> str:
    """The query for the requests that fulfil `condition`, an SQL expression on `requests AS r`."""
    return _query((wanted(condition), *PIECES, *COSTS, *EVIDENCE))


def _query(pieces: tuple[Piece, ...]) -> str:
    return (
        "WITH " + ", ".join(f"{name} AS MATERIALIZED ({sql}\n)" for name, sql in pieces) + _RESULT
    )


_BY_ID = wanted(
    f"starts_with(r.request_id, (SELECT key FROM asked)) "
    f"AND length((SELECT key FROM asked)) >= {MIN_PREFIX}"
)

WHY = View(
    "why",
    "Why a request's first token, its slow gaps (the slowest 1 %, and at least a quarter above its "
    "median) and its sending took their time: the cause that explains most of it, with its "
    "evidence. `unexplained` where no cause explains a quarter of the time lost. docs/why.md has "
    "every cause. Takes the request's id in any form that a client saw, or its first 8 hex digits.",
    (
        Column("position", "INTEGER", "output position of the late token; NULL: the sending's end"),
        Column("emitted_at", "TIMESTAMP", "when it came; of the sending, its end"),
        Column("latency_ms", "DOUBLE", "time it took; position 0: since arrival"),
        Column(
            "usual_ms",
            "DOUBLE",
            "the request's median gap; position 0 and sending: the median of like requests",
        ),
        Column(
            "cause",
            "VARCHAR",
            ", ".join(CAUSES),
        ),
        Column("evidence", "VARCHAR", "the figures behind it, and other causes over a quarter"),
        Column("step_id", "BIGINT", "the step that produced the token"),
        Column("slot", "BIGINT", "the request: several calls of a client may share a trace id"),
        Column("explained_ms", "DOUBLE", "what the cause explains of the time"),
        Column(
            "causes",
            "STRUCT(cause VARCHAR, ms DOUBLE)[]",
            "what each cause took, the largest first",
        ),
        Column("request_id", "VARCHAR", "the request: the beginning of an id may fit several"),
        Column("engine_id", "UUID", "where it ran"),
    ),
    _query((_ASKED, _BY_ID, *PIECES, *COSTS, *EVIDENCE)),
    "SELECT position, latency_ms, cause, evidence\n"
    "FROM why((SELECT request_id FROM request_latency ORDER BY duration_ms DESC LIMIT 1))",
    parameters="wanted_request_id",
)
