"""A gate's report for people (Markdown), for CI (JUnit XML) and for programs (JSON)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from evaluation.criteria import ClassResult, Criterion, Outcome, percent
from evaluation.gate import GateReport
from evaluation.statistics import wilson
from evaluation.wording import visible

TITLES = {
    Outcome.PASS: "PASS",
    Outcome.FAIL: "FAIL",
    Outcome.INSUFFICIENT: "NOT ENOUGH EVIDENCE",
    Outcome.INVALID: "INVALID RUN",
}
PLAIN_NAME = re.compile(r"[\w./:@+-]+(?: [\w./:@+-]+)*")
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped."""


def render_json(report: GateReport) -> str:
    """The report as JSON, schema `inferloop.gate/1`."""
    return json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n"


def render_markdown(report: GateReport) -> str:
    """The report as a page that a manager can read: decision first, then why."""
    counts = report.tally
    lines = [
        f"# Release gate: {TITLES[report.outcome]}",
        "",
        f"Run {report.run_id}: {_code(report.old_build)} -> {_code(report.new_build)}, "
        f"{sum(report.kinds.values())} requests, decided {report.decided_at:%Y-%m-%d %H:%M} UTC, "
        f"exit code {int(report.outcome)}.",
        "",
        *_table(
            ("criterion", "result", "found", "required", "why"),
            [
                (
                    item.name,
                    TITLES[item.outcome].lower(),
                    _text(item.value),
                    item.bound,
                    _text(item.explanation),
                )
                for item in report.criteria
            ],
        ),
        "",
        "## Verdicts",
        "",
        f"{counts.diffs} answers changed visibly; {counts.judged} are judged: {counts.harm} harm, "
        f"{counts.neutral} neutral, {counts.benefit} benefit, {counts.disputed} disputed.",
    ]
    if report.noisy:
        lines.append(
            f"{report.noisy} more requests differ, but there the old build differs from itself too."
        )
    if counts.machine:
        lines.append(f"**{counts.machine} of these verdicts are a machine's, not an expert's.**")
    if report.agreement is not None:
        lines.append(f"Agreement of the experts (Krippendorff's alpha): {report.agreement:.2f}.")
    if report.disputes:
        numbers = ", ".join(map(str, report.disputes))
        lines.append(
            f"Disputed diffs, waiting for an adjudicator: {numbers} "
            f"(`inferloop replay show {report.run_id} --diff N`)."
        )
    lines += ["", *_classes(report), *_experts(report), *_kinds(report)]
    return "\n".join(lines).rstrip() + "\n"


def render_junit(report: GateReport) -> str:
    """JUnit XML: a suite of criteria and a suite of request classes, one test case each.

    A failed criterion or class is a <failure>, missing evidence for a criterion a <failure> of
    type not-enough-evidence, an invalid run an <error>, a class without enough evidence <skipped>.
    """
    root = ElementTree.Element("testsuites", name=f"inferloop gate, run {report.run_id}")
    suite = _suite(root, "criteria")
    for item in report.criteria:
        _criterion_case(suite, item)
    suite = _suite(root, "classes")
    for found in report.classes:
        _class_case(suite, found)
    for parent in (*root, root):
        cases = list(parent.iter("testcase"))
        parent.set("tests", str(len(cases)))
        for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            parent.set(name, str(sum(case.find(tag) is not None for case in cases)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=name)


def _criterion_case(suite: ElementTree.Element, item: Criterion) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="inferloop.gate", name=item.name)
    text = _xml(f"found {item.value}; required {item.bound}; {item.explanation}")
    if item.outcome is Outcome.PASS:
        ElementTree.SubElement(case, "system-out").text = text
    elif item.outcome is Outcome.INVALID:
        ElementTree.SubElement(case, "error", type="invalid-run", message=text)
    else:
        kind = "failed" if item.outcome is Outcome.FAIL else "not-enough-evidence"
        ElementTree.SubElement(case, "failure", type=kind, message=text)


def _class_case(suite: ElementTree.Element, found: ClassResult) -> None:
    name = _xml(found.class_key)
    case = ElementTree.SubElement(suite, "testcase", classname="inferloop.gate.class", name=name)
    if found.outcome is Outcome.FAIL:
        ElementTree.SubElement(case, "failure", type="harm", message=_xml(found.explanation))
    elif found.outcome is Outcome.INSUFFICIENT:
        ElementTree.SubElement(case, "skipped", message=_xml(found.explanation))
    else:
        ElementTree.SubElement(case, "system-out").text = _xml(found.explanation)


def _classes(report: GateReport) -> list[str]:
    if not report.classes:
        return []
    rows = []
    for found in report.classes:
        counts, (lower, upper) = found.tally, found.harm_rate
        harm = f"{percent(lower)} to {percent(upper)}" if counts.judged else "-"
        rows.append(
            (
                _code(found.class_key),
                TITLES[found.outcome].lower(),
                str(counts.diffs),
                str(counts.judged),
                f"{counts.harm} / {counts.neutral} / {counts.benefit}",
                harm,
            )
        )
    header = ("class", "result", "changed", "judged", "harm / neutral / benefit", "harm rate")
    note = "Harm rates are 95 % Wilson intervals, for orientation; the gate uses the bounds above."
    return ["## Classes", "", *_table(header, rows), "", note, ""]


def _experts(report: GateReport) -> list[str]:
    if not report.experts:
        return []
    rows = []
    for expert in report.experts:
        alarms = f"{expert.false_alarms} of {expert.hidden_pairs}"
        limits = "-"
        if expert.hidden_pairs:
            limits = f"{percent(expert.interval.lower)} to {percent(expert.interval.upper)}"
        rows.append((_text(expert.name), str(expert.labels), str(expert.corrected), alarms, limits))
    header = ("expert", "labels", "corrected", "false alarms on hidden A/A pairs", "95 % interval")
    return ["## Experts", "", *_table(header, rows), ""]


def _kinds(report: GateReport) -> list[str]:
    total = sum(report.kinds.values())
    rows = []
    for kind, count in sorted(report.kinds.items(), key=lambda item: -item[1]):
        lower, upper = wilson(count, total, 0.95)
        share = f"{percent(count / total)} ({percent(lower)} to {percent(upper)})"
        rows.append((kind, str(count), share))
    return ["## What differs first", "", *_table(("kind", "requests", "share"), rows), ""]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return lines


def _text(text: str) -> str:
    """Text on one line that can neither leave its table cell nor become a link, image or tag."""
    escaped = re.sub(r"[\\|\[]", r"\\\g<0>", " ".join(visible(text).split()))
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", escaped)


def _code(name: str) -> str:
    """A name as code where that is safe: names come from request headers."""
    return f"`{name}`" if PLAIN_NAME.fullmatch(name) else _text(name)


def _xml(text: str) -> str:
    return NOT_XML.sub("\ufffd", text)
