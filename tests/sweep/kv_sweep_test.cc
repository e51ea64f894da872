// The sweep over K/V caches: random programs of steps, run on the shards of all ranks in this
// process. The calls of each layer are cut and joined as clients do it, and every result is
// compared with the fp64 oracle of the plain problem. Each program runs three times: once as it is,
// once with every message sent twice, and once cut off at a random message, after which a new
// writer settles the log and goes on.
//
//   kv_sweep_test --cases=400
//   kv_sweep_test --case=7
//
// kv_gpu_sweep is the same on GPU 0. Its programs also draw wide heads.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "tests/sweep/kv_program.h"
#include "tests/sweep/kv_sweep_device.h"

ABSL_FLAG(int64_t, cases, 400, "number of programs");
ABSL_FLAG(int64_t, case, -1, "run this program alone");
ABSL_FLAG(uint64_t, seed, 1, "seed of the programs");

namespace ringattn::tests {
namespace {

int Run() {
  const int64_t only = absl::GetFlag(FLAGS_case);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  // Bazel's shards.
  const char* const total_text = std::getenv("TEST_TOTAL_SHARDS");
  const char* const index_text = std::getenv("TEST_SHARD_INDEX");
  const int64_t shards = total_text == nullptr ? 1 : std::atoll(total_text);
  const int64_t shard = index_text == nullptr ? 0 : std::atoll(index_text);
  if (const char* file = std::getenv("TEST_SHARD_STATUS_FILE")) std::ofstream(file) << "";
  const std::unique_ptr<worker::Device> device = MakeKvSweepDevice();
  const auto begin = std::chrono::steady_clock::now();
  int64_t programs = 0, results = 0, failed = 0;
  for (int64_t index = 0; index < std::max<int64_t>(only + 1, absl::GetFlag(FLAGS_cases));
       ++index) {
    if (only >= 0 ? index != only : index % shards != shard) continue;
    ++programs;
    for (const Mode mode : {Mode::kPlain, Mode::kTwice, Mode::kCut}) {
      KvProgram program(seed, index, mode, device.get());
      const std::string failure = program.Run();
      results += program.results();
      if (failure.empty()) continue;
      ++failed;
      std::printf("FAILED --seed=%llu --case=%lld (%s): %s\n",
                  static_cast<unsigned long long>(seed), static_cast<long long>(index),
                  kModeNames[static_cast<int>(mode)], failure.c_str());
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%lld programs, each in 3 ways, %lld results compared, %lld failed, %.1f s\n",
              static_cast<long long>(programs), static_cast<long long>(results),
              static_cast<long long>(failed), seconds);
  return failed == 0 && results > 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::tests

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::tests::Run();
}
