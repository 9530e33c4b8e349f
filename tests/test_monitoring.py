"""Alert rules and dashboard against the metrics that engine, telemetry, collector and proxy export.

A renamed metric empties dashboards and silences alerts without an error anywhere: here it fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

from capture.collecting.collector_metrics import CollectorMetrics
from capture.gpu.metrics import TelemetryCollector
from capture.gpu.monitor import GpuMonitor
from capture.gpu.telemetry import Telemetry
from capture.proxy import metrics as proxy
from engine import metrics as engine
from engine.admission import QueueFull
from tests.capture.gpu.nvml_world import NvmlWorld
from tests.engine.live_server import live_server
from tests.waiting import until

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy/prometheus/inferloop.rules.yml"
RULE_TESTS = RULES.with_name("inferloop.test.yml")
DASHBOARD = ROOT / "deploy/grafana/inferloop.json"
DOCS = ROOT / "docs/monitoring.md"
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_count", "_sum"),
    "gauge": ("",),
}
NAME = re.compile(r"\b(?:inferloop:\w+|model:\w+:\w+|gen_ai_\w+|up)\b")


class Memory(NamedTuple):
    index: int = 0
    values: tuple[float, ...] = (6.0, 5.0, 4.0, 3.0, 2.0, 0.5)
    unavailable: str = ""
    walk_s: float = 0.001


def series_of(families: Iterator[Metric]) -> dict[str, set[str]]:
    """Names of the time series, with the labels seen on each."""
    found: dict[str, set[str]] = {}
    for family in families:
        for suffix in SUFFIXES[family.type]:
            name = family.name + suffix
            labels = [set(s.labels) for s in family.samples if s.name == name]
            found[name] = set().union(*labels)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every series of every part, from the real registries."""
    found = {"up": {"job", "instance"}}
    with live_server() as server:
        found |= series_of(server.engine.metrics.registry.collect())
    with pytest.MonkeyPatch.context() as patch:
        world = NvmlWorld(tmp_path_factory.mktemp("nvml"), patch)
        world.fail("nvmlDeviceGetTotalEnergyConsumption", 3)  # power at once, not after 5 s
        found |= series_of(iter(telemetry_families()))
    found |= series_of(parse(CollectorMetrics().exposition().decode()))
    found |= series_of(parse(proxy.ProxyMetrics().exposition().decode()))
    return found


def telemetry_families() -> list[Metric]:
    telemetry = Telemetry(None, GpuMonitor(None, period_s=0.05), Memory, period_s=0.05)
    telemetry.start()

    def is_complete() -> bool:
        measured = any("sm_pct" in sample.values for sample in telemetry.gpus.devices)
        return measured and telemetry.memory is not None

    try:
        until(is_complete, "devices and memory have figures")
        registry = CollectorRegistry()
        registry.register(TelemetryCollector(telemetry, {"model_name": "m", "engine": "0"}))
        return list(registry.collect())
    finally:
        telemetry.close()


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def targets() -> list[tuple[str, str]]:
    return [
        (panel["title"], target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def unknown(expression: str, exported: dict[str, set[str]]) -> list[str]:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    names = NAME.findall(re.sub(r"\{[^}]*\}|by \([^)]*\)|on \([^)]*\)", "", expression))
    assert names, expression
    return [name for name in names if name not in recorded and name not in exported]


def test_rules_use_exported_metrics_only(exported: dict[str, set[str]]) -> None:
    for rule in rules():
        assert unknown(rule["expr"], exported) == [], rule


def test_the_dashboard_uses_exported_metrics_only(exported: dict[str, set[str]]) -> None:
    for title, expression in targets():
        assert unknown(expression, exported) == [], title
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            assert unknown(variable["definition"], exported) == []


def test_objectives_lie_on_bucket_bounds() -> None:
    """A `le` that no bucket has would make the objective's share vanish without an error."""
    bounds = {
        "time_to_first_token_seconds": engine.TTFT_BUCKETS,
        "inter_token_latency_seconds": engine.ITL_BUCKETS,
    }
    found = re.findall(r'inferloop:(\w+)_bucket\{le="([0-9.]+)"\}', RULES.read_text())
    assert {metric for metric, _ in found} == set(bounds)
    for metric, le in found:
        assert le in [str(bound) for bound in bounds[metric]]


def test_label_values_in_rules_are_those_the_code_sets() -> None:
    from capture.gpu.nvml import THROTTLE_REASONS

    text = RULES.read_text()
    assert QueueFull.code == "queue_full"
    assert 'reason="queue_full"' in text
    assert "sw_power_cap" in THROTTLE_REASONS.values()


def test_buckets_of_engine_and_proxy_are_the_same() -> None:
    """They are compared with each other; the packages may not import each other."""
    assert proxy.TTFT_BUCKETS == engine.TTFT_BUCKETS
    assert proxy.GAP_BUCKETS == engine.ITL_BUCKETS
    assert proxy.DURATION_BUCKETS == engine.REQUEST_BUCKETS


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    docs = DOCS.read_text()
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 15
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert f"`{rule['alert']}`" in docs, f"{rule['alert']} is not in docs/monitoring.md"


def test_panels_are_placed_and_numbered_well() -> None:
    panels = dashboard()["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken[x, y])
                taken[x, y] = panel["title"]
    assert dashboard()["schemaVersion"] >= 39


def test_no_panel_mixes_two_models() -> None:
    variables = {v["name"]: v for v in dashboard()["templating"]["list"]}
    assert list(variables) == ["DS_PROMETHEUS", "model_name", "engine"]
    assert not variables["model_name"]["multi"]
    assert not variables["model_name"]["includeAll"]
    for title, expression in targets():
        if "inferloop:collector_" not in expression:
            assert re.search(r'model(_name)?="\$model_name"', expression), title


def test_latencies_are_in_seconds_and_lead_to_requests() -> None:
    panels = {panel["title"]: panel for panel in dashboard()["panels"]}
    for title in ("Time to first token", "Inter-token latency", "Request latency"):
        panel = panels[title]
        assert panel["fieldConfig"]["defaults"]["unit"] == "s"
        assert [t["legendFormat"] for t in panel["targets"]] == ["p50", "p90", "p99"]
        assert any(target.get("exemplar") for target in panel["targets"])


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("promtool (Debian: prometheus) is not installed; names were checked above")
    return subprocess.run(
        [command, *arguments], capture_output=True, text=True, check=False, cwd=RULES.parent
    )


def test_promtool_finds_the_rules_right() -> None:
    assert promtool("check", "rules", str(RULES)).returncode == 0
    result = promtool("test", "rules", str(RULE_TESTS))
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_can_read_the_dashboards_expressions(tmp_path: Path) -> None:
    file = tmp_path / "dashboard.yml"
    expressions = [
        {"record": f"dashboard:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression) in enumerate(targets())
    ]
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": expressions}]}))
    result = promtool("check", "rules", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
