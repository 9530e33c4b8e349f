"""Blind judging: which pair an expert sees next, on which side, and what the verdict means.

A client gets a token and two answers called left and right. Which of them is the new build's, and
whether the pair is a hidden A/A check, stays in the database. Used by `inferloop label` and the
dashboard alike.
"""

from __future__ import annotations

import random
import secrets
import unicodedata
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import delete, insert, literal, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from evaluation.errors import LabelError
from evaluation.hidden_checks import (
    checks_to_come,
    current_block,
    fresh_checks,
    places_of_check,
)
from evaluation.judgements import PANEL, Judgement, find_run, judgements
from evaluation.models import Expert, Label, PastLabel, Presentation
from evaluation.pairs import Pair, pair_of
from replay.database import now
from replay.models import Diff, Run

Verdict = Literal["left", "right", "same"]

SIDE_BLOCK = 8
"""In every block of this many pairs an expert sees the new build on each side equally often."""
MAX_NAME = 80
MACHINE_PREFIX = "machine:"
MAX_COMMENT = 4000
ALREADY_JUDGED = (
    "this pair has your verdict already: undo it first, or replace it "
    "(`inferloop label add --replace`)"
)


@dataclass(frozen=True)
class Progress:
    """Counts for one expert in one run. Hidden checks, also those to come, are counted like any
    other pair: no count moves differently when one is shown or judged."""

    judged: int
    skipped: int
    remaining: int


@dataclass(frozen=True)
class Past:
    """A verdict this expert gave, and the machine's on the same pair (None: it has none)."""

    token: str
    verdict: Verdict
    machine: Verdict | None


class LabelQueue:
    """One expert judging one run. All state is in the database: any number may be open at once.

    `expert` is created when new. Raises LabelError for a name that cannot be used and
    EvaluationError when the run does not exist.
    """

    def __init__(
        self,
        sessions: sessionmaker[Session],
        expert: str,
        run_id: int | None = None,
        *,
        randomness: random.Random | None = None,
    ) -> None:
        self._sessions = sessions
        self._random = randomness or secrets.SystemRandom()
        with sessions() as session:
            self.run_id = find_run(session, run_id, valid=True).id
            self.expert = expert_named(session, expert).name
            session.commit()

    def next(self) -> Pair | None:
        """The pair to judge now: the one still open, else a new one. None when all is done."""
        with self._sessions() as session:
            run, expert = self._load(session)
            presentation = self._open(session, run, expert)
            if presentation is None:
                diff = self._choose(session, run, expert)
                if diff is None:
                    return None
                presentation = self._present(session, expert, diff)
            return pair_of(presentation)

    def judge(
        self,
        token: str,
        verdict: str,
        *,
        comment: str | None = None,
        seconds: float | None = None,
        replace: bool = False,
    ) -> None:
        """Record which side is better.

        A pair this expert has judged before raises LabelError, or with `replace` gets the new
        verdict; the old one is kept in the history.
        """
        if verdict not in get_args(Verdict):
            raise LabelError(f"verdict {verdict!r} is not known: use left, right or same")
        comment = (comment or "").strip()
        if len(comment) > MAX_COMMENT:
            raise LabelError(f"the comment has {len(comment)} characters, at most {MAX_COMMENT}")
        with self._sessions() as session:
            presentation = self._presentation(session, token)
            value = _value(verdict, presentation.new_side)
            if replace:
                before = _label_of(session, presentation)
                if before is not None and (before.value, before.comment or "") == (value, comment):
                    return
                _withdraw(session, presentation)
            session.add(
                Label(
                    diff_id=presentation.diff_id,
                    expert_id=presentation.expert_id,
                    value=value,
                    comment=comment or None,
                    seconds=seconds,
                )
            )
            presentation.skip_reason = None
            try:
                session.commit()
            except IntegrityError as error:
                raise LabelError(ALREADY_JUDGED) from error

    def skip(self, token: str, reason: str) -> None:
        """Decline to judge the pair; it does not come back unless undone."""
        reason = reason.strip()
        if not reason or len(reason) > MAX_COMMENT:
            raise LabelError(f"a skip needs a reason of 1 to {MAX_COMMENT} characters")
        with self._sessions() as session:
            presentation = self._presentation(session, token)
            if _label_of(session, presentation) is not None:
                raise LabelError(ALREADY_JUDGED)
            presentation.skip_reason = reason
            session.commit()

    def undo(self, token: str) -> None:
        """Take back the verdict (kept in the history) or skip of that pair, which then comes next
        again."""
        with self._sessions() as session:
            presentation = self._presentation(session, token)
            if not _withdraw(session, presentation) and presentation.skip_reason is None:
                raise LabelError("there is nothing to undo for this pair")
            presentation.skip_reason = None
            presentation.shown_at = now()
            session.commit()

    def progress(self) -> Progress:
        """How much is done, for this expert and in the run."""
        with self._sessions() as session:
            run, expert = self._load(session)
            mine = self._seen(session, run, expert)
            labelled = _labelled(session, run, expert)
            shown = sum(
                reason is None and diff_id not in labelled for diff_id, reason in mine.items()
            )
            changes = len(_candidates(judgements(session, run), set(mine)))
            checks = min(
                checks_to_come(current_block(session, run, expert), changes),
                len(fresh_checks(session, run, set(mine))),
            )
            return Progress(
                judged=len(labelled),
                skipped=sum(reason is not None for reason in mine.values()),
                remaining=shown + changes + checks,
            )

    def past(self, tokens: list[str]) -> list[Past]:
        """The verdicts on those pairs with the machine's beside them, in terms of left and right.

        Only for pairs this expert has judged: a machine's label is never shown before.
        """
        with self._sessions() as session:
            return [
                found
                for token in tokens
                if (found := _past(session, self._presentation(session, token))) is not None
            ]

    def _load(self, session: Session) -> tuple[Run, Expert]:
        return find_run(session, self.run_id), expert_named(session, self.expert)

    def _presentation(self, session: Session, token: str) -> Presentation:
        found = session.scalar(
            select(Presentation)
            .join(Expert, Expert.id == Presentation.expert_id)
            .where(Presentation.token == token, Expert.name == self.expert)
        )
        if found is None:
            raise LabelError(
                f"token {token!r} is not a pair shown to {self.expert}: give the --expert that "
                "`inferloop label next --json` was called with"
            )
        return found

    def _open(self, session: Session, run: Run, expert: Expert) -> Presentation | None:
        labelled = select(Label.diff_id).where(Label.expert_id == expert.id)
        return session.scalar(
            select(Presentation)
            .join(Diff, Diff.id == Presentation.diff_id)
            .where(
                Diff.run_id == run.id,
                Presentation.expert_id == expert.id,
                Presentation.skip_reason.is_(None),
                Presentation.diff_id.not_in(labelled),
            )
            .order_by(Presentation.shown_at.desc())
            .limit(1)
        )

    def _seen(self, session: Session, run: Run, expert: Expert) -> dict[int, str | None]:
        rows = session.execute(
            select(Presentation.diff_id, Presentation.skip_reason)
            .join(Diff, Diff.id == Presentation.diff_id)
            .where(Diff.run_id == run.id, Presentation.expert_id == expert.id)
        )
        return dict(rows.all())

    def _choose(self, session: Session, run: Run, expert: Expert) -> Diff | None:
        seen = set(self._seen(session, run, expert))
        candidates = _candidates(judgements(session, run), seen)
        places = places_of_check(current_block(session, run, expert), len(candidates))
        if places and self._random.random() * places < 1:
            candidates = fresh_checks(session, run, seen)[:1] or candidates
        return session.get_one(Diff, candidates[0]) if candidates else None

    def _present(self, session: Session, expert: Expert, diff: Diff) -> Presentation:
        presentation = Presentation(
            token=secrets.token_hex(16),
            diff_id=diff.id,
            expert_id=expert.id,
            new_side=self._side(session, expert, diff.pair),
        )
        session.add(presentation)
        try:
            session.commit()
        except IntegrityError:
            session.rollback()
            return session.scalars(
                select(Presentation).where(
                    Presentation.diff_id == diff.id, Presentation.expert_id == expert.id
                )
            ).one()
        return presentation

    def _side(self, session: Session, expert: Expert, pair: str) -> Literal["left", "right"]:
        """Side of the new build: a random order within each block, half of it left."""
        used = session.scalars(
            select(Presentation.new_side)
            .join(Diff, Diff.id == Presentation.diff_id)
            .where(Presentation.expert_id == expert.id, Diff.pair == pair)
            .order_by(Presentation.id)
        ).all()
        block = used[len(used) - len(used) % SIDE_BLOCK :]
        lefts = SIDE_BLOCK // 2 - block.count("left")
        return "left" if self._random.random() * (SIDE_BLOCK - len(block)) < lefts else "right"


def expert_named(session: Session, name: str, kind: str = "expert") -> Expert:
    """The expert of that name, created when new (flushed, not committed)."""
    name = " ".join(unicodedata.normalize("NFC", name).split())
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise LabelError(f"an expert's name has 1 to {MAX_NAME} printable characters")
    if kind == "expert" and name.startswith(MACHINE_PREFIX):
        raise LabelError(f"names that begin with {MACHINE_PREFIX!r} are for referee builds")
    query = select(Expert).where(Expert.name == name)
    found = session.scalar(query)
    if found is None:
        found = Expert(name=name, kind=kind)
        try:
            with session.begin_nested():
                session.add(found)
        except IntegrityError:  # another window was faster
            found = session.scalars(query).one()
    if found.kind != kind:
        raise LabelError(f"{name!r} is the name of a {found.kind}, not of a {kind}: use another")
    return found


def _candidates(found: list[Judgement], seen: set[int]) -> list[int]:
    """Diffs this expert may be shown, first to last: disputed ones, then those short of votes."""
    unseen = [judgement for judgement in found if judgement.diff_id not in seen]
    disputed = [judgement.diff_id for judgement in unseen if judgement.disputed(PANEL)]
    return disputed + [judgement.diff_id for judgement in unseen if len(judgement.votes) < PANEL]


def _withdraw(session: Session, presentation: Presentation) -> bool:
    """Move the expert's verdict on that pair, if there is one, from the labels to the history.

    Of two windows that do it at once each moves what the other left: PostgreSQL locks the
    presentation, SQLite the database at the first write.
    """
    session.execute(
        select(Presentation.id).where(Presentation.id == presentation.id).with_for_update()
    )
    mine = Label.diff_id == presentation.diff_id, Label.expert_id == presentation.expert_id
    kept = ("diff_id", "expert_id", "value", "comment", "seconds", "guideline", "created_at")
    withdrawn_at = literal(now(), PastLabel.withdrawn_at.type)
    session.execute(
        insert(PastLabel).from_select(
            [*kept, "withdrawn_at"],
            select(*(getattr(Label, name) for name in kept), withdrawn_at).where(*mine),
        )
    )
    return session.scalar(delete(Label).where(*mine).returning(Label.id)) is not None


def _value(verdict: str, new_side: str) -> int:
    if verdict == "same":
        return 0
    return 1 if verdict == new_side else -1


def _verdict(value: int, new_side: str) -> Verdict:
    if value == 0:
        return "same"
    return "left" if (value == 1) == (new_side == "left") else "right"


def _label_of(session: Session, presentation: Presentation) -> Label | None:
    return session.scalar(
        select(Label).where(
            Label.diff_id == presentation.diff_id, Label.expert_id == presentation.expert_id
        )
    )


def _past(session: Session, presentation: Presentation) -> Past | None:
    label = _label_of(session, presentation)
    if label is None:
        return None
    machine = session.scalar(
        select(Label.value)
        .join(Expert, Expert.id == Label.expert_id)
        .where(Label.diff_id == presentation.diff_id, Expert.kind == "machine")
        .order_by(Label.id.desc())
        .limit(1)
    )
    side = presentation.new_side
    return Past(
        presentation.token,
        _verdict(label.value, side),
        None if machine is None else _verdict(machine, side),
    )


def _labelled(session: Session, run: Run, expert: Expert) -> set[int]:
    return set(
        session.scalars(
            select(Label.diff_id)
            .join(Diff, Diff.id == Label.diff_id)
            .where(Diff.run_id == run.id, Label.expert_id == expert.id)
        )
    )
