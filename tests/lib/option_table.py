#!/usr/bin/env python3
"""The table of options in docs/semantics.md: every row is there, and names tests and folders that exist.

  tests/lib/option_table.py     exit status 1, and a line for each name that nothing has
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = 48
FOLDERS = ("client", "common", "deploy", "docs", "server", "tests", "worker")


def files():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix()


def found(name, known):
    """Files of that name: a path, its end, a folder, or a source without its suffix."""
    end = re.compile(rf"(?:^|/){re.escape(name)}(?:\.(?:cc|h|py|sh|cu|cuh))?(?:/.*)?$")
    return [path for path in known if end.search(path)]


def holds(paths, test):
    defined = re.compile(rf"def {test}\(|TEST(?:_F|_P)?\(\w+,\s*{test}\)")
    return any(defined.search((ROOT / path).read_text(encoding="utf-8")) for path in paths)


def main():
    text = (ROOT / "docs/semantics.md").read_text(encoding="utf-8")
    table = [line for line in text[text.index("## Every option of the five"):].splitlines()
             if line.startswith("|")]
    rows = [int(row) for row in re.findall(r"^\| (\d+) \|", "\n".join(table), re.M)]
    wrong = [] if rows == list(range(1, ROWS + 1)) else [f"rows {rows}, not 1 to {ROWS}"]
    known = list(files())
    targets = set()
    for path in known:
        if path.endswith("/BUILD"):
            targets |= set(re.findall(r'name = "(\w+)"', (ROOT / path).read_text(encoding="utf-8")))
    names, last = 0, []
    for line in table:
        for word in re.findall(r"`([^` ]+)[^`]*`", line):
            name, _, test = word.partition("::")
            if not test and not re.search(r"_test$|^test_|[a-z]/[a-z]|\.(?:py|sh|cc|h|md)$", name):
                continue  # an option, a flag, a schedule
            names += 1
            if name:
                last = found(name, known)
            if not last and name not in targets or test and not holds(last, test):
                wrong.append(f"{word}: nothing has this name ({line[:60]} ...)")
    print("\n".join(wrong) or f"{len(rows)} rows, {names} names that exist")
    return 1 if wrong or names == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
