"""Turns JUnit reports of pytest or GoogleTest into tally lines (tests/lib/tally.sh).

  python3 tests/lib/tally_junit.py SUITE REPORT.xml...

With RINGATTN_SLOWEST set, appends "SECONDS NAME" for every case to that file.
"""
import os
import sys
import xml.etree.ElementTree as tree


def lines(suite, report):
    """Yields (seconds, tally line) for every case of a report."""
    for case in tree.parse(report).iter("testcase"):
        name = f"{suite} {case.get('classname')}.{case.get('name')}"
        seconds = float(case.get("time") or 0)
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield seconds, f"fail {name}"
        elif skipped is not None:
            why = " ".join((skipped.get("message") or skipped.text or "").split())
            yield seconds, f"skip {name}: {why}"
        elif case.get("status") == "notrun":
            continue  # a GoogleTest case that is disabled or filtered out
        else:
            yield seconds, f"pass {name}"


def main():
    suite, *reports = sys.argv[1:]
    slowest = os.environ.get("RINGATTN_SLOWEST")
    for report in reports:
        for seconds, line in lines(suite, report):
            print(line)
            if slowest:
                with open(slowest, "a", encoding="utf-8") as file:
                    print(f"{seconds:.2f} {line.split(' ', 1)[1]}", file=file)


if __name__ == "__main__":
    main()
