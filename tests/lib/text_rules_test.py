#!/usr/bin/env python3
"""folder_rules.py and prose_rules.py find what breaks their rules."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent


class TextRulesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def write(self, name, text=""):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def run_rules(self, program, *arguments):
        result = subprocess.run([sys.executable, HERE / program, *arguments], capture_output=True, text=True, check=False)
        return result.returncode, result.stdout

    def folders(self):
        return self.run_rules("folder_rules.py", self.root)

    def test_a_layered_tree_passes(self):
        self.write("server/edge/a.cc", '#include "common/b.h"\n')
        self.write("common/b.h")
        self.write("common/b_test.cc")
        self.assertEqual(self.folders()[0], 0)

    def test_cycles_are_found(self):
        self.write("server/a/x.h", '#include "server/b/y.h"\n')
        self.write("server/b/y.h", '#include "server/a/x.h"\n')
        status, output = self.folders()
        self.assertEqual(status, 1)
        self.assertIn("server/a, server/b", output)

    def test_tests_do_not_form_cycles(self):
        self.write("server/a/x.h", '#include "server/b/y.h"\n')
        self.write("server/b/y.h")
        self.write("server/b/y_test.cc", '#include "server/a/x.h"\n')
        self.assertEqual(self.folders()[0], 0)

    def test_large_folders_are_found(self):
        for i in range(46):
            self.write(f"worker/w{i}.cc")
        self.assertIn("46 source files", self.folders()[1])

    def test_tests_without_a_subject_are_found(self):
        self.write("worker/a.h")
        self.write("worker/other_test.cc")
        self.assertIn("worker/other_test.cc", self.folders()[1])
        self.write("worker/a.h", "// A.\n// Tests: other_test.cc\n")
        self.assertEqual(self.folders()[0], 0)

    def test_nothing_to_look_at_fails(self):
        self.assertEqual(self.folders()[0], 1)
        self.assertEqual(self.run_rules("prose_rules.py", self.root / "missing.md")[0], 1)

    def test_plain_english_passes(self):
        path = self.write("a.h", "// Returns the rank of a worker. Thread safe.\n")
        self.assertEqual(self.run_rules("prose_rules.py", path)[0], 0)

    def test_constructions_to_avoid_are_found(self):
        for line in ("// Of each rank its bytes, beside the others.", '#error "nobody hears of it anew"',
                     "# Whoever asks is told."):
            path = self.write("a.h" if line[0] == "/" else "a.sh", line + "\n")
            self.assertEqual(self.run_rules("prose_rules.py", path)[0], 1, line)

    def test_long_sentences_in_markdown_are_found(self):
        sentence = " ".join(["word"] * 31) + ". "
        path = self.write("a.md", sentence * 12)
        self.assertEqual(self.run_rules("prose_rules.py", path)[0], 1)


if __name__ == "__main__":
    unittest.main()
