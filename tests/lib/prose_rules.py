#!/usr/bin/env python3
"""Keeps the project's English plain: docs, comments, protos, help texts and messages.

  tests/lib/prose_rules.py [--list] [PATH...]    exit status 1 if a bound is exceeded or nothing was read

Two bounds:
  - at most MAX_PER_THOUSAND hard-to-read constructions per 1,000 words, over everything that was read;
  - in each Markdown file, sentences of MAX_MEAN_WORDS words on average, and one in ten of at most
    MAX_TENTH_WORDS.
--list prints every hit. A single hit may be right; the bound counts all of them.
"""
import pathlib
import re
import subprocess
import sys

MAX_PER_THOUSAND = 1.5
MAX_MEAN_WORDS = 18
MAX_TENTH_WORDS = 30
CODE = {".h", ".cc", ".cu", ".cuh", ".proto", ".py", ".sh", ".bzl", ".yaml"}

# What to avoid, and what to write instead.
CONSTRUCTIONS = (
    (r"\bbeside\b", "next to, alongside, in addition to, compared with"),
    (r"\b[Bb]ehind (?:it|the|one|another|all|everything)\b", "after, following"),
    (r"\b(?:who|what|which|where|when)ever\b(?! possible)", "name the actor or the thing"),
    (r"\b(?:no|some|any)body\b", "name the actor: no client, a caller"),
    (r"\b(?:anew|thereof|therein|hereof|likewise|hence|whereof)\b", "again, also, therefore"),
    (r"\b(?:lets?|letting) (?:go|past|in) of?\b", "releases, admits"),
    (r"\b(?:tells?|told|hears?|heard|knows nothing)\b", "reports, receives, has no"),
    (r"(?:^|[.:;] )Of (?!course\b)[a-z]", "start with the noun"),
    (r"(?:^|[.:;] )What (?!follows)[a-z]+ [^?]*$", "start with the noun"),
    (r"\b(?:is|are|was|were) (?:of no use|nobody's|worth nothing|good for nothing)\b", "is invalid, must be destroyed"),
    (r"\b(?:is|are|has|have) no more\b", "no longer"),
    (r"\bby (?:itself|themselves)\b|\bof (?:its|their) own\b", "say what does it, or drop it"),
    (r"\b(?:was|were) (?:asked for|wanted)\b", "requested, required"),
)


def tracked(root):
    listed = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True)
    return [root / name for name in listed.stdout.splitlines()]


def prose_lines(path):
    """Yields (line number, English text): Markdown outside of code and tables, else comments and long strings."""
    text = path.read_text(encoding="utf-8")
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if path.suffix == ".md":
            fenced ^= line.startswith("```")
            if not fenced and not line.startswith(("```", "    ", "|")):
                yield number, line
            continue
        comment = re.search(r"(?<!:)(?://+|#)\s(.*)$", line)
        strings = [s for s in re.findall(r'"((?:[^"\\]|\\.)*)"', line) if s.count(" ") > 2]
        if comment or strings:
            yield number, " ".join(([comment.group(1)] if comment else []) + strings)


def sentence_lengths(path):
    text = " ".join(line for _, line in prose_lines(path) if not line.startswith("#"))
    text = re.sub(r"`[^`]*`", "code", text)
    counts = [len(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s", text)]
    return sorted(count for count in counts if count > 2)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--list"]
    root = pathlib.Path(__file__).resolve().parents[2]
    files = [pathlib.Path(argument) for argument in arguments] or tracked(root)
    rules = [(re.compile(pattern), instead) for pattern, instead in CONSTRUCTIONS]
    words, hits, broken = 0, [], []
    own = pathlib.Path(__file__).resolve()
    for path in files:
        if path.suffix not in CODE | {".md"} or not path.is_file() or path.resolve() == own:
            continue
        for number, text in prose_lines(path):
            words += len(text.split())
            hits += [f"{path}:{number}: {text.strip()[:100]}  ({instead})" for rule, instead in rules
                     if rule.search(text)]
        if path.suffix == ".md":
            lengths = sentence_lengths(path)
            if len(lengths) > 9:
                mean, tenth = sum(lengths) / len(lengths), lengths[int(len(lengths) * 0.9)]
                if mean > MAX_MEAN_WORDS or tenth > MAX_TENTH_WORDS:
                    broken.append(f"{path}: sentences of {mean:.1f} words on average (at most {MAX_MEAN_WORDS}), "
                                  f"one in ten over {tenth} (at most {MAX_TENTH_WORDS})")
    per_thousand = 1000 * len(hits) / max(1, words)
    if "--list" in sys.argv or per_thousand > MAX_PER_THOUSAND:
        print("\n".join(hits[:200]))
    if per_thousand > MAX_PER_THOUSAND:
        broken.append(f"{per_thousand:.2f} constructions to avoid per 1,000 words; at most {MAX_PER_THOUSAND}")
    print("\n".join(broken) or f"{words} words, {per_thousand:.2f} constructions to avoid per 1,000")
    return 1 if broken or words == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
