"""Unit tests of check_ptxas.py."""

import unittest

from check_ptxas import judge

LOG = """\
ptxas info    : Compiling entry function '_Z7kernel1v' for 'sm_90'
ptxas info    : Function properties for _Z7kernel1v
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z7kernel2v' for 'sm_80'
ptxas info    : Function properties for _Z7kernel2v
    64 bytes stack frame, 60 bytes spill stores, 72 bytes spill loads
""".splitlines()


class Judge(unittest.TestCase):
    def test_spills_up_to_the_allowance_pass(self):
        self.assertEqual(judge(LOG, "72"), ([], []))

    def test_an_architecture_may_have_its_own(self):
        self.assertEqual(judge(LOG, "0,80:72"), ([], []))
        self.assertEqual(len(judge(LOG, "72,80:71")[0]), 1)
        self.assertEqual(len(judge(LOG, "90:72")[0]), 1)

    def test_spills_beyond_the_allowance_name_the_kernel(self):
        complaints, _ = judge(LOG, "71")
        self.assertEqual(len(complaints), 1)
        self.assertIn("_Z7kernel2v for sm_80 spills 72", complaints[0])

    def test_serialised_matrix_instructions_fail(self):
        line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions"
        self.assertEqual(judge([line], "1000000000"), ([line], []))

    def test_other_warnings_are_shown_only(self):
        line = 'a.cu(3): warning #177-D: variable "x" was declared but never referenced'
        self.assertEqual(judge([line], "0"), ([], [line]))


if __name__ == "__main__":
    unittest.main()
