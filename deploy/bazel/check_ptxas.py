#!/usr/bin/env python3
"""Checks the messages of nvcc and `ptxas -v` about one source; see cuda.bzl.

    check_ptxas.py LOG SPILLS

Fails on serialised matrix instructions (C75xx) and on kernels that spill more bytes per thread than
SPILLS allows: "24", or "0,80:16", that is none but for sm_80. Prints warnings of nvcc that are neither.
"""

import re
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"C75\d\d")


def allowances(text):
    """{architecture: bytes} of SPILLS; None stands for those that are not named."""
    found = {}
    for word in text.split(","):
        architecture, _, spilled = word.rpartition(":")
        found[f"sm_{architecture}" if architecture else None] = int(spilled)
    return {None: 0, **found}


def judge(lines, spills):
    """The complaints about a log, and the warnings that are to be shown but do no harm."""
    by_architecture = allowances(spills)
    complaints, warnings = [], []
    entry, allowed = "?", by_architecture[None]
    for line in lines:
        if match := ENTRY.search(line):
            entry = f"{match[1]} for {match[2]}"
            allowed = by_architecture.get(match[2], by_architecture[None])
        if match := SPILL.search(line):
            spilled = max(int(match[1]), int(match[2]))
            if spilled > allowed:
                complaints.append(f"{entry} spills {spilled} bytes per thread; allowed: {allowed}")
        elif SERIALISED.search(line):
            complaints.append(line)
        elif "warning" in line.lower():
            warnings.append(line)
    return complaints, warnings


def main():
    path, spills = sys.argv[1:]
    with open(path, encoding="utf-8", errors="replace") as log:
        complaints, warnings = judge([line.rstrip("\n") for line in log], spills)
    for line in warnings + complaints:
        print(line, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
