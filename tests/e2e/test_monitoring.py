"""Dashboard, rules and documentation against what the processes really export: a Prometheus
scrapes a ring under load, in which a worker is lost."""

import json
import re
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest

from attention import make_inputs, run
from cluster import CLI, wait_until
from prometheus import Prometheus
from stubs import ROOT, attention_pb2 as pb

MONITORING = ROOT / "deploy/monitoring"
GUIDE = (ROOT / "docs/operations.md").read_text()
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
LOAD_SECONDS = 4
METRIC = re.compile(r"\bringattn_[a-z0-9_]+")
RECORD = re.compile(r"\bringattn:[a-z0-9_:]+")


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_queries():
    """(panel, expression) as Grafana would send them."""
    queries = [(panel["title"], target["expr"]) for panel in panels()
               for target in panel["targets"]]
    queries += [(a["name"], a["expr"]) for a in DASHBOARD["annotations"]["list"]]
    for variable, value in (("$__rate_interval", "30s"), ("$__range", "5m"),
                            ("$namespace", ".*")):
        queries = [(title, expr.replace(variable, value)) for title, expr in queries]
    return queries


def load(ring, seconds):
    """Requests of every kind for so long, errors among them; a worker is lost in the middle."""
    end, lost = time.monotonic() + seconds, threading.Event()
    inputs = make_inputs(sq=768, heads=4, dim=64)

    def work(index):
        while time.monotonic() < end:
            try:
                run(ring.attention, inputs, backward=index == 0, causal=True,
                    schedule=pb.SCHEDULE_RING, world_size=2 if index else None, timeout=10)
            except grpc.RpcError as error:
                if lost.is_set():
                    time.sleep(0.1)
                else:
                    assert error.code() == grpc.StatusCode.ABORTED, error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    time.sleep(seconds / 2)
    with pytest.raises(grpc.RpcError):
        run(ring.attention, inputs, world_size=60)
    lost.set()
    ring.kill_worker(2)
    [t.join() for t in threads]


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    from cluster import Cluster
    ring = Cluster(tmp_path_factory.mktemp("monitored"), workers=3)
    prometheus = None
    try:
        targets = [ring.ports["metrics"], *(ring.worker_ports(i)["metrics"] for i in range(3))]
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), {"ringattn": targets},
                                MONITORING / "rules.yaml")
        wait_until(lambda: prometheus.query("sum(up) == 4"), 20, "all targets scraped")
        load(ring, LOAD_SECONDS)
        wait_until(lambda: prometheus.query("sum(ringattn_worker_losses_total) > 0"), 10, "a loss")
        prometheus.stop_clock()
        yield ring, prometheus
    finally:
        print(ring.tail())
        if prometheus is not None:
            prometheus.close()
        ring.close()


# ---------------------------------------------------------------- what is exported


def fetch(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        return reply.read().decode()


def families(text):
    """{name: (type, labels)} of a scrape."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    found = {name: (kind, set()) for name, kind in kinds.items()}
    for name, labels in re.findall(r"^([a-z0-9_]+)(?:\{(.*)\})? ", text, re.M):
        if name not in kinds:
            name = re.sub(r"_(bucket|sum|count)$", "", name)
        found[name][1].update(set(re.findall(r'(\w+)="', labels)) - {"le"})
    return found


def documented():
    """{process: {name: (type, labels)}} of the guide's tables, without what only GPU workers export."""
    tables = {}
    for process in ("coordinator", "worker"):
        section = re.search(rf"^### Metrics of the {process}$(.*?)^##", GUIDE, re.M | re.S)[1]
        rows = re.findall(r"^\| `(ringattn_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", section, re.M)
        assert rows, process
        tables[process] = {name: (kind, set(re.findall(r"`(\w+)`", labels)))
                           for name, kind, labels, meaning in rows}
        assert len(tables[process]) == len(rows), f"{process}: a metric twice"
        assert all(meaning.strip() for *_, meaning in rows), f"{process}: a metric without a meaning"
        for name, *_, meaning in rows:
            if meaning.startswith("GPU workers only: "):
                del tables[process][name]
    return tables


def test_the_guide_has_every_metric_and_no_other(monitored):
    ring, _ = monitored
    assert families(fetch(ring.ports["metrics"])) == documented()["coordinator"]
    assert families(fetch(ring.worker_ports(0)["metrics"])) == documented()["worker"]


def test_metrics_keep_prometheus_customs(monitored):
    ring, _ = monitored
    for address in (ring.ports["metrics"], ring.worker_ports(0)["metrics"]):
        text = fetch(address)
        done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True,
                              capture_output=True)
        assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr
        helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.M))
        assert set(helps) == set(families(text)) and all(helps.values())


def test_the_guide_s_plans_are_what_plan_prints():
    examples = re.findall(r"^    \$ ringattn (plan .+)\n((?:    .+\n)+)", GUIDE, re.M)
    assert len(examples) >= 4
    for command, shown in examples:
        printed = subprocess.run([CLI, *command.split()], check=True, capture_output=True,
                                 text=True).stdout.splitlines()
        for line in shown.splitlines():
            assert any(other.startswith(line[4:]) for other in printed), f"{command}: {line}"


# ---------------------------------------------------------------- the dashboard


def test_every_query_of_the_dashboard_has_an_answer(monitored):
    _, prometheus = monitored
    queries = dashboard_queries()
    assert len(queries) > 40
    empty = [f"{title}: {expr}" for title, expr in queries if not prometheus.has_numbers(expr)]
    assert not empty, "\n".join(empty)


def test_the_dashboard_is_whole():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["title"] and panel["description"].endswith((".", "words.")), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "table"
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])
    # Nothing overlaps or sticks out of Grafana's 24 columns.
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


# ---------------------------------------------------------------- the rules


def rules(prometheus):
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]


def test_rules_pass_their_own_tests():
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(["promtool", *arguments], cwd=MONITORING, text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_tested():
    text = (MONITORING / "rules.yaml").read_text()
    tests = (MONITORING / "rules_test.yaml").read_text()
    for alert in re.findall(r"- alert: (\w+)", text):
        wanted = re.findall(rf"alertname: {alert}\n +eval_time: \S+\n +exp_alerts:\n", tests)
        assert wanted, f"{alert} is never made to fire"
        assert re.search(rf"alertname: {alert}, eval_time: \S+, exp_alerts: \[\]", tests) or alert in (
            "RingattnWorkerFlaps", "RingattnClientsStall"), f"{alert} is never silent"
    for record in re.findall(r"- record: (\S+)", text):
        assert f"- expr: {record}" in tests, record


def test_every_rule_is_evaluated_on_real_series(monitored):
    _, prometheus = monitored
    found = rules(prometheus)
    assert len(found) > 25
    for rule in found:
        assert rule["health"] == "ok" and not rule.get("lastError"), rule
        # An alert that is silent has no result; what it looks at must be there.
        prometheus.query(rule["query"])
        for name in METRIC.findall(rule["query"]) + RECORD.findall(rule["query"]):
            assert prometheus.query(name), f"{rule['name']}: {name} has no series"
        if rule["type"] == "recording":
            assert prometheus.has_numbers(rule["name"]), rule["name"]


def test_a_loss_fires_its_alert_and_nothing_else_is_critical(monitored):
    _, prometheus = monitored
    def fires():
        return {(alert["labels"]["alertname"], alert["labels"].get("worker"))
                for rule in rules(prometheus) for alert in rule.get("alerts", ())
                if alert["state"] == "firing"}
    wait_until(lambda: ("RingattnWorkerLost", "worker-2") in fires(), 10, "RingattnWorkerLost")
    critical = {rule["name"] for rule in rules(prometheus) if rule["type"] == "alerting"
                and rule["labels"]["severity"] == "critical" and rule["state"] == "firing"}
    assert not critical


def anchors(text):
    """Returns the anchors of a Markdown file's headings, as GitHub creates them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ (.+)$", text, re.M)}


def test_every_alert_has_its_runbook():
    text = (MONITORING / "rules.yaml").read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    books = re.findall(r"runbook: (\S+)#(\S+)", text)
    assert len(alerts) == len(books) > 15
    for alert, (path, anchor) in zip(alerts, books):
        assert anchor == alert.lower()
        assert anchor in anchors((ROOT / path).read_text()), f"{path}#{anchor}"
    # And none is left of an alert that is gone.
    assert set(re.findall(r"^### (Ringattn\w+)$", GUIDE, re.M)) == set(alerts)
