#!/usr/bin/env python3
"""source_rules.py finds what it is there to find."""
import pathlib
import tempfile
import unittest

import source_rules


class SourceRulesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def broken(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        found, _ = source_rules.violations(self.root)
        path.unlink()
        return found

    def test_credentials_outside_their_place(self):
        for code in ("builder.AddListeningPort(a, grpc::InsecureServerCredentials(), &port);",
                     "auto c = InsecureChannelCredentials();",
                     "auto c = grpc::SslCredentials({});",
                     "auto c = grpc::experimental::TlsServerCredentials(options);"):
            found = self.broken("server/edge/x.cc", "\n" + code)
            self.assertEqual(len(found), 1, code)
            self.assertTrue(found[0].startswith("server/edge/x.cc:2: credentials"), found)
            self.assertTrue(self.broken("tests/bench/x.cc", code), code)
            self.assertEqual(self.broken("common/security/credentials.cc", code), [])

    def test_secrets_compared_elsewhere(self):
        for code in ("if (given == secret_) return;", "return secret != other;", "a == options->secret",
                     "CRYPTO_memcmp(a, b, 3);", "return std::memcmp(a, secret.data(), n) == 0;"):
            self.assertEqual(len(self.broken("worker/service/x.cc", code)), 1, code)
            self.assertEqual(self.broken("common/security/secret.cc", code), [])
            self.assertEqual(self.broken("worker/service/x_test.cc", code), [])

    def test_devices_and_transports_named_elsewhere(self):
        for code in ('#include "worker/comm/tcp/tcp_ring_transport.h"',
                     '#include "worker/device/cpu/cpu_device.h"'):
            for name in ("worker/main.cc", "worker/backend.h", "worker/service/worker.cc"):
                self.assertEqual(len(self.broken(name, code)), 1, name)
            for name in ("worker/backend.cc", "worker/comm/tcp/x.h", "worker/service/x_test.cc"):
                self.assertEqual(self.broken(name, code), [], name)

    def test_intervals_on_the_wall_clock(self):
        for code in ("const absl::Time begin = absl::Now();", "if (absl::Now() >= give_up) break;",
                     "while (absl::Now() < end) {", "return absl::Now() - begin;", "if (end <= absl::Now()) return;"):
            self.assertEqual(len(self.broken("worker/device/cuda/x.cc", code)), 1, code)
            self.assertEqual(self.broken("worker/device/x_test.cc", code), [], code)
        for code in ("context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));",
                     "gauge.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));",
                     "absl::FormatTime(kFormat, absl::Now(), zone);", "const absl::Time begin = MonotonicNow();"):
            self.assertEqual(self.broken("server/edge/x.cc", code), [], code)

    def test_what_is_allowed(self):
        for code in ("// plain text: Insecure", "options.security.ServerCredentials()",
                     "line->worker.secret = *std::move(secret);", "if (!secret.ok()) throw;",
                     "if (secret.size() == 0) return;", "if (raw.secret_file == name) return;",
                     "if (bytes == secret.size()) return;"):
            self.assertEqual(self.broken("server/x.cc", code), [], code)

    def test_nothing_to_look_at_is_told(self):
        self.assertEqual(source_rules.violations(self.root), ([], 0))


if __name__ == "__main__":
    unittest.main()
