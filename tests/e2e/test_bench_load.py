"""`ringattn bench` as a load generator: levels of concurrency and of request rate."""

import csv
import json

import pytest

from test_cli import cli
from timing import in_time, timed

PROBLEM = ["--seq_len=64", "--heads=2", "--head_dim=16", "--dtype=fp32"]
QUICK = ["--measurement_interval=150", "--measurement-request-count=3", "--max_trials=4"]


def bench(ring, *flags, code=0, windows=QUICK):
    return cli("bench", f"--server={ring.address}", *PROBLEM, *windows, *flags, code=code)


@timed
def test_levels_of_concurrency(ring, tmp_path):
    table, whole = tmp_path / "load.csv", tmp_path / "load.json"
    done = bench(ring, "--concurrency-range=1:5:2", "--percentile=95", f"--export-csv={table}",
                 f"--export-json={whole}", "--json", "--causal")
    result = json.loads(done.stdout)
    assert result == json.loads(whole.read_text())
    assert result["verified"]["passed"] and result["load"]["mode"] == "concurrency"
    levels = result["load"]["levels"]
    assert [level["concurrency"] for level in levels] == [1, 3, 5]
    for level in levels:
        latency = level["latency_seconds"]
        assert level["succeeded"] >= 3 and not level["failed"] and level["delayed"] == 0
        assert (0 < latency["minimum"] <= latency["p50"] <= latency["p95"] <= latency["p99"]
                <= latency["maximum"])
        assert latency["chosen"] == latency["p95"]
        # So many in flight all the time: what came out is what the latency says (Little's law).
        in_flight = level["calls_per_second"]["value"] * latency["average"]
        in_time(in_flight == pytest.approx(level["concurrency"], rel=0.35), level)
        assert level["calls_per_second"]["bound"] > 0
        assert 0 < sum(level["stage_seconds"].values()) <= latency["average"] * 1.05
        assert level["windows"] <= 4
    rows = list(csv.DictReader(table.open()))
    assert [row["Concurrency"] for row in rows] == ["1", "3", "5"]
    assert float(rows[0]["p95 latency"]) == pytest.approx(
        1e6 * levels[0]["latency_seconds"]["p95"], abs=1)


@pytest.mark.parametrize("more", [[], ["--poisson"]])
@timed
def test_levels_of_rate(ring, more):
    # Of independent clients the number in a window varies by its root: 4 of 20 here.
    done = bench(ring, "--request_rate_range=50:100:50", "--json", "--backward", *more,
                 windows=["--measurement_request_count=20", "--measurement_interval=100",
                          "--stability_percentage=60"])
    load = json.loads(done.stdout)["load"]
    assert load["distribution"] == ("poisson" if more else "constant")
    assert [level["request_rate"] for level in load["levels"]] == [50, 100]
    for level in load["levels"]:
        in_time(level["calls_per_second"]["value"] == pytest.approx(level["request_rate"], rel=0.5),
                level)


@timed
def test_a_rate_that_is_too_high_is_seen_in_the_latency(ring):
    """One call at a time cannot be 5,000 a second: calls begin late, and their latency says so."""
    done = bench(ring, "--request_rate_range=5000", "--max_threads=1", "--json")
    level = json.loads(done.stdout)["load"]["levels"][0]
    assert level["calls_per_second"]["value"] < 5000
    assert level["delayed"] > 0
    in_time(level["latency_seconds"]["p99"] > 5 * (
        level["stage_seconds"]["compute"] + level["stage_seconds"]["queue"]), level)


def test_the_level_above_the_threshold_is_the_last(ring):
    done = bench(ring, "--concurrency_range=1:8", "--latency_threshold=0.001", "--json")
    levels = json.loads(done.stdout)["load"]["levels"]
    assert len(levels) == 1 and not levels[0]["within_threshold"]
    text = bench(ring, "--concurrency_range=1:8", "--latency_threshold=0.001").stdout
    assert "no level has its latency" in text
    text = bench(ring, "--concurrency_range=1:2", "--latency_threshold=60000").stdout
    assert "2 is the last level whose latency (average) is within" in text


def test_failures_are_counted_by_what_they_are(ring):
    done = bench(ring, "--concurrency_range=2", "--deadline=1ms", "--json", code=3)
    assert "DEADLINE_EXCEEDED" in done.stderr  # the first call already
    done = bench(ring, "--concurrency_range=2", "--world_size=9", code=3)
    assert "plan.world_size" in done.stderr


@pytest.mark.parametrize("flags, says", [
    (["--concurrency_range=0"], "--concurrency_range"),
    (["--concurrency_range=4:1"], "ends before it starts"),
    (["--concurrency_range=1:2:0.5"], "whole numbers"),
    (["--concurrency_range=1:2001:1000"], "whole numbers up to 1024"),
    (["--request_rate_range=x"], "--request_rate_range"),
    (["--request_rate_range=1:100000"], "levels"),
    (["--concurrency_range=1", "--request_rate_range=1"], "excludes"),
    (["--concurrency_range=1", "--poisson"], "--poisson needs --request_rate_range"),
    (["--concurrency_range=1", "--trace=x.json"], "--trace"),
    (["--concurrency_range=1", "--percentile=100"], "--percentile"),
    (["--concurrency_range=1", "--stability_percentage=0"], "--stability_percentage"),
])
def test_what_is_wrong_is_said(ring, flags, says):
    assert says in bench(ring, *flags, code=2).stderr
