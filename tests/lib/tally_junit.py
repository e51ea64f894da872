"""Turns pytest's report into tally lines (tests/lib/tally.sh).

  python3 tests/lib/tally_junit.py NAME REPORT.xml
"""
import sys
import xml.etree.ElementTree as tree


def main():
    suite, report = sys.argv[1:]
    for case in tree.parse(report).iter("testcase"):
        name = f"{suite} {case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            print("fail", name)
        elif case.find("skipped") is not None:
            print(f"skip {name}: {case.find('skipped').get('message')}")
        else:
            print("pass", name)


if __name__ == "__main__":
    main()
