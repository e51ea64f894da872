// Makes one call over host memory for each line on stdin, as the reference for a program in another
// language (tests/bench/python_call.py).
//
//   region_calls --server=127.0.0.1:7700 [--tokens=65536] [--heads=32] [--kv_heads=8] [--dim=128]
//   [--window=64]
//
// Prints the seconds of each call as the caller sees them, from its begin until it has returned.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "client/api/client.h"
#include "client/api/region.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int, tokens, 65'536, "of q, k and v");
ABSL_FLAG(int, heads, 32, "of q");
ABSL_FLAG(int, kv_heads, 8, "of k and v");
ABSL_FLAG(int, dim, 128, "of a head");
ABSL_FLAG(int, window, 0, "keys before its own that a query sees");

namespace ringattn::bench {

using namespace ringattn::client;  // what is under test
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

int Run() {
  auto client = Client::Connect(absl::GetFlag(FLAGS_server));
  if (!client.ok()) Die(client.status().ToString());
  ForwardArgs args;
  args.shape.set_batch(1);
  args.shape.set_seq_len_q(absl::GetFlag(FLAGS_tokens));
  args.shape.set_seq_len_kv(absl::GetFlag(FLAGS_tokens));
  args.shape.set_num_heads(absl::GetFlag(FLAGS_heads));
  args.shape.set_num_kv_heads(absl::GetFlag(FLAGS_kv_heads));
  args.shape.set_head_dim(absl::GetFlag(FLAGS_dim));
  args.dtype = v1::DATA_TYPE_FLOAT16;
  args.options.mutable_window()->set_left(absl::GetFlag(FLAGS_window));
  args.options.mutable_window()->set_right(0);
  const int64_t row = int64_t{2} * absl::GetFlag(FLAGS_dim) * absl::GetFlag(FLAGS_tokens);
  const int64_t q = row * absl::GetFlag(FLAGS_heads), k = row * absl::GetFlag(FLAGS_kv_heads);
  const int64_t lse = int64_t{4} * absl::GetFlag(FLAGS_heads) * absl::GetFlag(FLAGS_tokens);
  auto region = Region::Allocate(client->get(), 2 * q + 2 * k + lse);
  if (!region.ok()) Die(region.status().ToString());
  uint8_t* at = (*region)->memory().data();
  const auto take = [&](int64_t bytes) {
    const MutableBytes taken(at, bytes);
    at += bytes;
    return taken;
  };
  args.q = take(q);
  args.k = take(k);
  args.v = take(k);
  const ForwardResults results{.out = take(q), .lse = take(lse)};
  CallOptions options;
  options.transport = TransportPreference::kHostMemory;
  options.transport_required = true;
  std::printf("ready\n");
  std::fflush(stdout);
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto begin = std::chrono::steady_clock::now();
    const CallResult result = (*client)->Forward(args, results, options);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!result.ok()) Die(FormatError(result.status()));
    std::printf("%.9f\n", seconds);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::bench::Run();
}
