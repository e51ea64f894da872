// The round trip of one word between two threads: the bound of step rings (host memory).
// Tests: tests/e2e/test_kv_cli.py.
#ifndef RINGATTN_CLIENT_CLI_BENCH_WORD_PING_PONG_H_
#define RINGATTN_CLIENT_CLI_BENCH_WORD_PING_PONG_H_

#include <vector>

namespace ringattn::client::cli {

// Measures up to `count` round trips of a SharedWord, for at most 250 ms. Each thread reads the
// other's word until it has changed or, with `sleeps`, sleeps on it. Returns seconds, by round
// trip.
std::vector<double> MeasureWordRoundTrips(int count, bool sleeps);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_WORD_PING_PONG_H_
