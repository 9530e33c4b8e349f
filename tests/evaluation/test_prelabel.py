"""Machine labels follow the referee's likelihood and stay a machine's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from evaluation.errors import EvaluationError
from evaluation.judgements import find_run, judgements
from evaluation.models import Expert, Label
from evaluation.prelabel import LEAST_THRESHOLD, Prelabels, prelabel
from replay.builds import BuildSpec
from replay.models import Build, Diff
from tests.evaluation.factory import CLASS, add_run

Sessions = sessionmaker[Session]


class Referee(BaseHTTPRequestHandler):
    """Serves prompt_logprobs: a token's log-probability is minus its id in hundredths."""

    def do_GET(self) -> None:
        body: dict[str, object] = {"data": [{"id": "referee"}]}
        if self.path == "/inferloop/build":
            body = {"fingerprint": "f" * 32, "components": {"tokenizer": "tok-1"}}
        self._reply(200, body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        entries = [None, *({str(t): {"logprob": -t / 100}} for t in request["prompt"][1:])]
        if 666 in request["prompt"]:
            self._reply(400, {"error": {"message": "too long for the referee"}})
        else:
            self._reply(200, {"choices": [{"prompt_logprobs": entries}]})

    def log_message(self, *args: object) -> None:
        """Tests need no access log."""

    def _reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def referee() -> Iterator[BuildSpec]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Referee)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield BuildSpec(name="float32", endpoint=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def score(sessions: Sessions, referee: BuildSpec, tmp_path: Path) -> Prelabels:
    return prelabel(sessions, referee, log=tmp_path / "log", progress=lambda *_: None)


def with_tokens(
    sessions: Sessions, answers: list[tuple[list[int] | None, list[int] | None]]
) -> None:
    """A run whose changes have these (old, new) output tokens; A/A pairs that differ by 0.2."""
    add_run(sessions, classes=[CLASS] * len(answers), unchanged=3, noisy=3)
    with sessions() as session:
        changes = session.query(Diff).filter_by(pair="change").order_by(Diff.id)
        for diff, (old, new) in zip(changes, answers, strict=False):
            diff.left.prompt_token_ids = [1, 2]
            diff.left.output_token_ids, diff.right.output_token_ids = old, new
        for diff in session.query(Diff).filter_by(pair="noise").filter(Diff.kind != "same"):
            diff.left.prompt_token_ids = [1, 2]
            diff.left.output_token_ids, diff.right.output_token_ids = [50], [70]
        session.commit()


def test_labels_follow_the_likelihood_beyond_the_noise(
    sessions: Sessions, referee: BuildSpec, tmp_path: Path
) -> None:
    with_tokens(
        sessions,
        [([10, 10], [90, 90]), ([90], [10]), ([10], [25]), ([10], [666]), ([10], []), (None, [5])],
    )
    found = score(sessions, referee, tmp_path)
    assert (found.harm, found.neutral, found.benefit, found.unscored) == (1, 1, 1, 3)
    assert found.threshold == pytest.approx(0.2)
    assert found.reason == "too long for the referee"
    with sessions() as session:
        run = find_run(session)
        assert all(not entry.votes for entry in judgements(session, run, "expert"))
        stored = session.scalars(select(Label).order_by(Label.diff_id)).all()
        assert [entry.value for entry in stored] == [-1, 1, 0]
        assert "old -0.1000, new -0.9000, neutral within 0.2000" in str(stored[0].comment)
        expert = session.scalars(select(Expert)).one()
    assert (expert.name, expert.kind) == ("machine:float32:ffffffff", "machine")


def test_scoring_again_replaces_the_labels(
    sessions: Sessions, referee: BuildSpec, tmp_path: Path
) -> None:
    with_tokens(sessions, [([10], [90])] * 4)
    first = score(sessions, referee, tmp_path)
    assert score(sessions, referee, tmp_path) == first
    with sessions() as session:
        assert len(session.scalars(select(Label)).all()) == 4


def test_without_noise_the_least_threshold_holds(
    sessions: Sessions, referee: BuildSpec, tmp_path: Path
) -> None:
    add_run(sessions, classes=[])
    assert score(sessions, referee, tmp_path).threshold == LEAST_THRESHOLD


def test_another_tokenizer_is_refused(
    sessions: Sessions, referee: BuildSpec, tmp_path: Path
) -> None:
    with_tokens(sessions, [([10], [90])])
    with sessions() as session:
        for build in session.scalars(select(Build)):
            build.components = {"tokenizer": "tok-2"}
        session.commit()
    with pytest.raises(EvaluationError, match=r"has tokenizer tok-1, build .* has tok-2"):
        score(sessions, referee, tmp_path)
