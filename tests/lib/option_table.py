#!/usr/bin/env python3
"""Checks tests/options/options.csv: which tests cover which option of the protocol.

  tests/lib/option_table.py     prints one line per error; exit status 1 if there is any

Every field and enum value of the messages in COVERED has a row. All names in the table exist: fields in the
.proto files, files and test targets in the tree, test functions in their files.
"""
import csv
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests/options/options.csv"
FOLDERS = ("client", "common", "deploy", "server", "tests", "worker")
COVERED = ("AttentionShape", "PackedDocuments", "DocumentOptions", "Packing",
           "AttentionOptions", "Window", "Dropout", "AlibiOptions", "Bias", "Mask", "MaskEncoding", "DilationLevel",
           "Determinism", "ComputeDtype", "PlanOptions", "Layout", "Schedule", "Tuning", "ReplyOptions", "LseFormat")


def protocol_names(text):
    """"Message.field" and "Enum.VALUE" of a .proto file without nested types; no *_UNSPECIFIED."""
    text = re.sub(r"//[^\n]*", "", text)
    names = set()
    for kind, owner, body in re.findall(r"\b(message|enum) (\w+) \{([^}]*(?:oneof \w+ \{[^}]*\}[^}]*)*)\}", text):
        pattern = r"(\w+) = \d+" if kind == "message" else r"\b([A-Z]\w+) = \d+"
        names |= {f"{owner}.{name}" for name in re.findall(pattern, body) if not name.endswith("_UNSPECIFIED")}
    return names


def files():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix()


def targets(known):
    for path in known:
        if path.endswith("/BUILD"):
            yield from re.findall(r'name = "(\w+)"', (ROOT / path).read_text(encoding="utf-8"))


def found(name, known):
    """Files of that name: a path, the end of one, or a source without its suffix."""
    end = re.compile(rf"(?:^|/){re.escape(name)}(?:\.(?:cc|h|py|sh|cu|cuh))?$")
    return [path for path in known if end.search(path)]


def defines(paths, test):
    pattern = re.compile(rf"def {test}\(|TEST(?:_F|_P)?\(\w+,\s*{test}\)")
    return any(pattern.search((ROOT / path).read_text(encoding="utf-8")) for path in paths)


def table_errors(rows, protocol, known, known_targets):
    listed = set()
    for row in rows:
        fields, tests = row["fields"].split(), row["tests"].split()
        if not fields or not tests:
            yield f"row {row}: a row needs fields and tests"
        for field in fields:
            listed.add(field)
            if field not in protocol:
                yield f"{field}: the protocol has no such field"
        for word in row["implementation"].split() + tests:
            name, _, test = word.partition("::")
            paths = found(name, known)
            if not paths and name not in known_targets or test and not defines(paths, test):
                yield f"{word}: not found in the tree ({fields[0] if fields else ''})"
    for name in sorted(protocol - listed):
        if name.partition(".")[0] in COVERED:
            yield f"{name}: no row names a test of this field"
    for owner in COVERED:
        if not any(name.startswith(owner + ".") for name in protocol):
            yield f"{owner}: the protocol has no such message or enum"


def main():
    protocol = set()
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        protocol |= protocol_names(path.read_text(encoding="utf-8"))
    known = list(files())
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    errors = list(table_errors(rows, protocol, known, set(targets(known))))
    covered = sum(name.partition(".")[0] in COVERED for name in protocol)
    print("\n".join(errors) or f"{len(rows)} rows name tests for {covered} fields and values")
    return 1 if errors or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
