// How fast tensors get to a worker and back by host memory, beside the relay and beside a memcpy
// out of the same memory and back by as many threads; also tensors that lie in no region and are
// staged by the client library. Interleaved, in one run; every result is checked.
//
//   transport_rate --server=127.0.0.1:7700 [--kilobytes=256000] [--threads=2] [--rounds=7]
//
// The request is transport_bench's: causal with one key, which the last row sees, so that nothing
// is computed. It goes to one worker; --threads is what that copies with (--copy_threads).
// What is measured is a whole call less the time between the run's begin and end.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "client/client.h"
#include "client/region.h"
#include "common/wire/durations.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int, kilobytes, 256'000, "bytes of q, and of out");
ABSL_FLAG(int, threads, 2, "of the memcpy");
ABSL_FLAG(int, rounds, 7, "rounds; medians are reported");

namespace ringattn::bench {

using namespace ringattn::client;  // what is under test
namespace {

constexpr int kHeads = 16;
constexpr int kDim = 256;
constexpr int64_t kRowBytes = int64_t{kHeads} * kDim * 4;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// Of one call, after one another from `memory` on.
struct Tensors {
  MutableBytes q, k, v, out, lse;

  Tensors(uint8_t* memory, int64_t rows) {
    const auto take = [&](int64_t bytes) {
      const MutableBytes taken(memory, bytes);
      memory += bytes;
      return taken;
    };
    q = take(rows * kRowBytes);
    k = take(kRowBytes);
    v = take(kRowBytes);
    out = take(rows * kRowBytes);
    lse = take(rows * kHeads * 4);
  }
  static int64_t Bytes(int64_t rows) { return (2 * rows + 2) * kRowBytes + rows * kHeads * 4; }
};

double Seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// `threads` parts of `bytes` side by side.
void CopySideBySide(uint8_t* to, const uint8_t* from, int64_t bytes, int threads) {
  std::vector<std::thread> copiers;
  for (int i = 0; i < threads; ++i) {
    copiers.emplace_back([=] {
      const int64_t begin = bytes * i / threads, end = bytes * (i + 1) / threads;
      std::memcpy(to + begin, from + begin, end - begin);
    });
  }
  for (std::thread& copier : copiers) copier.join();
}

double Call(Client& client, const Tensors& tensors, int64_t rows, TransportWish wish) {
  ForwardArgs args;
  args.shape.set_batch(1);
  args.shape.set_seq_len_q(rows);
  args.shape.set_seq_len_kv(1);
  args.shape.set_num_heads(kHeads);
  args.shape.set_head_dim(kDim);
  args.dtype = v1::DATA_TYPE_FLOAT32;
  args.options.set_causal(true);
  args.plan.set_schedule(v1::SCHEDULE_SINGLE);
  args.q = tensors.q;
  args.k = tensors.k;
  args.v = tensors.v;
  std::memset(tensors.out.data(), 0xff, tensors.out.size());
  CallOptions options;
  options.transport = wish;
  options.transport_required = wish == TransportWish::kHost;
  options.with_crc32c = false;
  const CallResult result = client.Forward(args, {.out = tensors.out, .lse = tensors.lse}, options);
  if (!result.ok()) Die(FormatError(result.status()));
  const uint8_t* first = tensors.out.data();
  const uint8_t* last = first + (rows - 1) * kRowBytes;
  const bool zeros = std::all_of(first, last, [](uint8_t byte) { return byte == 0; });
  if (!zeros || std::memcmp(last, tensors.v.data(), kRowBytes) != 0) Die("a wrong result");
  return result->times.finished_seconds - ToSeconds(result->summary.compute_time());
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Run() {
  const int64_t rows =
      std::max<int64_t>(2, absl::GetFlag(FLAGS_kilobytes) * int64_t{1000} / kRowBytes);
  const int threads = absl::GetFlag(FLAGS_threads);
  auto client = Client::Connect(absl::GetFlag(FLAGS_server));
  if (!client.ok()) Die(client.status().ToString());
  auto region = Region::Allocate(client->get(), Tensors::Bytes(rows));
  if (!region.ok()) Die(region.status().ToString());
  const Tensors tensors((*region)->memory().data(), rows);
  std::vector<uint8_t> outside(Tensors::Bytes(rows));
  const Tensors elsewhere(outside.data(), rows);
  std::fill_n(reinterpret_cast<float*>(tensors.q.data()), tensors.q.size() / 4, 0.25f);
  std::fill_n(reinterpret_cast<float*>(tensors.k.data()), tensors.k.size() / 4, 0.5f);
  std::fill_n(reinterpret_cast<float*>(tensors.v.data()), tensors.v.size() / 4, 3.0f);
  std::memcpy(outside.data(), tensors.q.data(), outside.size());
  const auto bytes = static_cast<int64_t>(tensors.q.size());
  std::vector<uint8_t> mine(bytes);

  std::vector<double> host, relay, staged, copy, share;
  for (int round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
    const double by_host = Call(**client, tensors, rows, TransportWish::kHost);
    const double by_stage = Call(**client, elsewhere, rows, TransportWish::kHost);
    const double by_copy = Seconds([&] {
      CopySideBySide(mine.data(), tensors.q.data(), bytes, threads);
      CopySideBySide(tensors.out.data(), mine.data(), bytes, threads);
    });
    const double by_relay = Call(**client, tensors, rows, TransportWish::kRelay);
    if (round < 0) continue;  // faults and connections
    host.push_back(by_host);
    staged.push_back(by_stage);
    copy.push_back(by_copy);
    relay.push_back(by_relay);
    share.push_back(by_copy / by_host);
  }
  const auto rate = [&](const std::vector<double>& seconds) {
    return 2e-9 * static_cast<double>(bytes) / Median(seconds);
  };
  std::printf("%.2f MB up and %.2f MB down, medians of %zu rounds, GB/s\n", 1e-6 * bytes,
              1e-6 * bytes, host.size());
  std::printf("memcpy of the same memory, %d threads  %6.2f\n", threads, rate(copy));
  std::printf("host memory                           %6.2f  %.2f of the memcpy (%.2f to %.2f)\n",
              rate(host), Median(share), *std::min_element(share.begin(), share.end()),
              *std::max_element(share.begin(), share.end()));
  std::printf("host memory, staged                   %6.2f  %.2f of the memcpy\n", rate(staged),
              Median(copy) / Median(staged));
  std::printf("relay, one stream                     %6.2f  %.2f of the memcpy\n", rate(relay),
              Median(copy) / Median(relay));
  std::printf("a call, ms: host %.3f, staged %.3f, relay %.3f\n", 1e3 * Median(host),
              1e3 * Median(staged), 1e3 * Median(relay));
  return 0;
}

}  // namespace
}  // namespace ringattn::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::bench::Run();
}
