#!/usr/bin/env python3
"""Writes text files into a C++ header, each as a constant named after it: page.css is kPageCss.

    embed_files.py NAMESPACE GUARD FILE... > HEADER
"""

import pathlib
import re
import sys

DELIMITER = "embedded"  # of the raw strings


def constant(path):
    words = re.split(r"\W+", path.name)
    return "k" + "".join(word.capitalize() for word in words)


def main():
    namespace, guard, *names = sys.argv[1:]
    print(f"#ifndef {guard}\n#define {guard}\n\n#include <string_view>\n\nnamespace {namespace} {{\n")
    for path in map(pathlib.Path, names):
        text = path.read_text(encoding="utf-8")
        if f"){DELIMITER}\"" in text:
            sys.exit(f"{path}: holds the end of a raw string")
        print(f'inline constexpr std::string_view {constant(path)} = R"{DELIMITER}({text}){DELIMITER}";\n')
    print(f"}}  // namespace {namespace}\n\n#endif  // {guard}")


if __name__ == "__main__":
    main()
