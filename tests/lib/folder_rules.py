#!/usr/bin/env python3
"""Keeps folders small and layered.

  tests/lib/folder_rules.py [ROOT]    exit status 1 if a rule is broken or nothing was looked at

Rules:
  - at most MAX_FILES source files in a folder;
  - inclusions between the folders of client, common, server and worker form no cycle (tests and test
    support aside);
  - a test NAME_test.cc stands next to a file that it is named after (NAME or its beginning), or a file of its
    folder names it in a line "// Tests: NAME_test.cc".
"""
import collections
import pathlib
import re
import sys

MAX_FILES = 45
LAYERED = ("client", "common", "server", "worker")
FOLDERS = LAYERED + ("tests",)
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".py"}
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


def is_test_support(path):
    return path.name.endswith("_test.cc") or "testing" in path.parts or "fake" in path.parts


def cycles(edges):
    """The strongly connected components of more than one folder (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1:
                found.append(sorted(component))

    for node in list(edges):
        if node not in index:
            visit(node)
    return found


def unnamed_tests(folder, paths):
    names = {path.name for path in paths}
    named = set()
    for path in paths:
        if path.suffix in {".h", ".cc", ".cuh", ".cu"}:
            for line in re.findall(r"^// Tests: (.*)$", path.read_text(encoding="utf-8"), re.M):
                named.update(re.findall(r"\w+_test\.cc", line))
    for name in sorted(names):
        if name.endswith("_test.cc") and name not in named:
            stem = name[:-len("_test.cc")]
            tested = {pathlib.PurePath(other).stem for other in names if not other.endswith("_test.cc")}
            if not any(stem == other or stem.startswith(other + "_") for other in tested):
                yield f"{folder}/{name}: no file of its name here, and none names it in a '// Tests:' line"


def main():
    root = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2]
    by_folder = collections.defaultdict(list)
    for top in FOLDERS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and ".cache" not in path.parts:
                by_folder[path.parent.relative_to(root).as_posix()].append(path)
    broken, edges = [], collections.defaultdict(set)
    for folder, paths in by_folder.items():
        if len(paths) > MAX_FILES:
            broken.append(f"{folder}: {len(paths)} source files; at most {MAX_FILES}")
        if folder.split("/")[0] not in LAYERED:
            continue
        if any(path.suffix == ".h" for path in paths):  # a folder of tests alone names itself
            broken += unnamed_tests(folder, paths)
        for path in paths:
            if path.suffix == ".py" or is_test_support(path.relative_to(root)):
                continue
            for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
                other = pathlib.PurePosixPath(include).parent.as_posix()
                if other != folder and other in by_folder:
                    edges[folder].add(other)
    broken += ["folders include one another: " + ", ".join(component) for component in cycles(edges)]
    files = sum(len(paths) for paths in by_folder.values())
    print("\n".join(broken) or f"{files} files in {len(by_folder)} folders keep the rules")
    return 1 if broken or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
