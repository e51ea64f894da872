// How fast tensors reach the workers and return, over each transport and compared with its bound,
// interleaved in one run; every result is checked.
//
//   transport_rate --server=127.0.0.1:7700 [--paths=host,staged,relay] [--megabytes=256]
//   [--rounds=7]
//                  [--workers=1] [--threads=2] [--channels=2] [--beside=COMMAND]
//
//   host    host memory; bound: a memcpy out of the same memory and back by --threads threads,
//           which is what workers copy with (--copy_threads)
//   staged  host memory for tensors that lie in no region: the client library copies them into and
//           out of one that it allocates; bound: that memcpy as well as the workers', each way
//   direct  streams straight to the workers, --channels to each; bound: plain TCP on as many
//           connections to one process. --beside: another program that moves as many bytes on as
//           many streams: each round it reads a line on its standard input and answers with the
//           seconds that it took (flight_rate.py)
//   relay   through the coordinator, one stream
//
// The request is transport_bench's: causal with one key, which the last row sees, so that nothing
// is computed. The measured time is that of a whole call less the time between the run's begin and
// end. Two parts are also reported: the stage of the upload, and the time from the first output to
// the last. --crc32c: with checksums, which are the default of calls. --fresh: results go to memory
// whose pages are not mapped yet (not with host or staged).
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "client/api/client.h"
#include "client/api/region.h"
#include "common/wire/allocator.h"
#include "common/wire/durations.h"
#include "tests/bench/tcp_relay.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int, megabytes, 256, "bytes of q, and of out");
ABSL_FLAG(std::vector<std::string>, paths, (std::vector<std::string>{"host", "relay"}),
          "of host, staged, direct, relay");
ABSL_FLAG(int, workers, 1, "of the ring that serves the request");
ABSL_FLAG(int, threads, 2, "of the memcpy");
ABSL_FLAG(int, channels, 2, "direct: connections to each worker");
ABSL_FLAG(std::string, beside, "", "direct: another program to compare with");
ABSL_FLAG(int, rounds, 7, "rounds; medians are reported");
ABSL_FLAG(bool, crc32c, false, "checksums");
ABSL_FLAG(bool, fresh, false, "results' memory is touched for the first time");

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

// The tensors of one call, one after another from `memory` on.
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

// Another program, one line in, one line out.
class Beside {
 public:
  explicit Beside(const std::string& command) {
    int in[2], out[2];
    if (pipe(in) != 0 || pipe(out) != 0) Die("no pipe");
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(in[0], 0);
      dup2(out[1], 1);
      for (const int fd : {in[0], in[1], out[0], out[1]}) close(fd);
      execl("/bin/sh", "sh", "-c", command.c_str(), static_cast<char*>(nullptr));
      std::_Exit(127);
    }
    close(in[0]);
    close(out[1]);
    to_ = fdopen(in[1], "w");
    from_ = fdopen(out[0], "r");
  }
  double Round() {
    std::fputs("go\n", to_);
    std::fflush(to_);
    double seconds = 0;
    if (std::fscanf(from_, "%lf", &seconds) != 1) Die("the program of --beside does not answer");
    return seconds;
  }

 private:
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

// The times of a call, or of its counterpart without the service.
struct Took {
  double seconds = 0;
  double up = 0, down = 0;  // each way; 0: not known
};

// As if it had just been mapped, but for what shares a page with others.
void Untouch(const MutableBytes& memory) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + memory.size()) / page * page;
  if (madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0) Die("no madvise");
}

// One key, which a causal mask shows to the last row alone. The output memory is zero before the
// call or never written: the last row sees the key and equals v.
bool IsRight(const Tensors& tensors, int64_t rows) {
  const uint8_t* const first = tensors.out.data();
  const uint8_t* const last = first + (rows - 1) * kRowBytes;
  if (std::memcmp(last, tensors.v.data(), kRowBytes) != 0) return false;
  if (!absl::GetFlag(FLAGS_fresh)) {
    return std::all_of(first, last, [](uint8_t byte) { return byte == 0; });
  }
  for (const uint8_t* row = first; row != last; row += kRowBytes) {
    if (std::memcmp(row, last, kRowBytes) != 0) return false;
  }
  return true;
}

// `staged_bytes`: what the client library must have copied.
Took Call(Client& client, const Tensors& tensors, int64_t rows, TransportPreference wish,
          uint64_t staged_bytes) {
  ForwardArgs args;
  args.shape.set_batch(1);
  args.shape.set_seq_len_q(rows);
  args.shape.set_seq_len_kv(1);
  args.shape.set_num_heads(kHeads);
  args.shape.set_head_dim(kDim);
  args.dtype = v1::DATA_TYPE_FLOAT32;
  args.options.set_causal(!absl::GetFlag(FLAGS_fresh));
  const int workers = absl::GetFlag(FLAGS_workers);
  args.plan.set_schedule(workers == 1 ? v1::SCHEDULE_SINGLE : v1::SCHEDULE_RING);
  args.plan.set_layout(v1::LAYOUT_CONTIGUOUS);
  args.plan.set_world_size(workers);
  args.q = tensors.q;
  args.k = tensors.k;
  args.v = tensors.v;
  std::memset(tensors.out.data(), 0xff, tensors.out.size());
  if (absl::GetFlag(FLAGS_fresh)) Untouch(tensors.out);
  CallOptions options;
  options.transport = wish;
  options.transport_required = wish != TransportPreference::kRelay;
  options.with_crc32c = absl::GetFlag(FLAGS_crc32c);
  const CallResult result = client.Forward(args, {.out = tensors.out, .lse = tensors.lse}, options);
  if (!result.ok()) Die(FormatError(result.status()));
  if (result->staged_bytes != staged_bytes) {
    Die(absl::StrCat(result->staged_bytes, " bytes were staged rather than ", staged_bytes));
  }
  if (!IsRight(tensors, rows)) Die("a wrong result");
  Took took;
  took.seconds = result->times.finished_seconds - ToSeconds(result->summary.compute_time());
  if (result->times.first_output_seconds > 0) {
    took.down = result->times.finished_seconds - result->times.first_output_seconds;
    for (const v1::StageTime& stage : result->summary.stages()) {
      if (stage.stage() == v1::STAGE_UPLOAD) took.up = ToSeconds(stage.time());
    }
  }
  return took;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Path {
  std::string name;
  std::string bound_name;
  std::function<Took()> run;
  std::vector<Took> took = {};

  double Median(double Took::*part) const {
    std::vector<double> values;
    for (const Took& one : took) values.push_back(one.*part);
    return bench::Median(std::move(values));
  }
};

// The ratio of a path to its reference, round by round.
struct Ratio {
  size_t path;
  size_t bound;
};

}  // namespace

class Bench {
 public:
  Bench() : direct_(Has("direct")) {
    if (absl::GetFlag(FLAGS_fresh) && (Has("host") || Has("staged"))) {
      Die("--fresh is of direct and relay alone");
    }
    // Before gRPC has threads, as they fork.
    if (direct_) tcp_.emplace();
    if (!absl::GetFlag(FLAGS_beside).empty()) beside_.emplace(absl::GetFlag(FLAGS_beside));
    ClientOptions options;
    options.channels_per_worker = absl::GetFlag(FLAGS_channels);
    auto client = Client::Connect(absl::GetFlag(FLAGS_server), options);
    if (!client.ok()) Die(client.status().ToString());
    client_ = *std::move(client);
    rows_ = std::max<int64_t>(2, absl::GetFlag(FLAGS_megabytes) * 1'000'000 / kRowBytes);
    for (const std::string& path : absl::GetFlag(FLAGS_paths)) {
      if (path != "host" && path != "staged" && path != "direct" && path != "relay") {
        Die(absl::StrCat("--paths: path is ", path, ", must be host, staged, direct or relay"));
      }
    }
    if (Has("host")) {
      auto region = Region::Allocate(client_.get(), Tensors::Bytes(rows_));
      if (!region.ok()) Die(region.status().ToString());
      region_ = *std::move(region);
      tensors_.emplace(region_->memory().data(), rows_);
    }
    if (!Has("host") || Has("staged")) {
      memory_.resize(Tensors::Bytes(rows_));
      plain_.emplace(memory_.data(), rows_);
      FillInputs(*plain_);
    }
    if (region_ == nullptr) tensors_ = plain_;
    FillInputs(*tensors_);
    bytes_ = static_cast<int64_t>(tensors_->q.size());
    mine_.resize(bytes_);
    AddPaths();
  }

  void Run() {
    for (int round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
      for (Path& path : paths_) {
        const Took took = path.run();
        if (round >= 0) path.took.push_back(took);  // the first: faults and connections
      }
    }
  }

  void Print() const {
    std::printf("%.0f MB up and %.0f MB down, %d workers, medians of %d rounds, GB/s\n",
                1e-6 * bytes_, 1e-6 * bytes_, absl::GetFlag(FLAGS_workers),
                absl::GetFlag(FLAGS_rounds));
    for (size_t i = 0; i < paths_.size(); ++i) {
      const Path& path = paths_[i];
      std::printf("%-42s %6.2f", path.name.c_str(),
                  2e-9 * static_cast<double>(bytes_) / path.Median(&Took::seconds));
      if (const double down = path.Median(&Took::down); down > 0) {
        std::printf("  up %.2f down %.2f",
                    1e-9 * static_cast<double>(bytes_) / path.Median(&Took::up),
                    1e-9 * static_cast<double>(bytes_) / down);
      }
      for (const Ratio& ratio : ratios_) {
        if (ratio.path != i) continue;
        std::vector<double> shares;
        for (size_t round = 0; round < path.took.size(); ++round) {
          shares.push_back(paths_[ratio.bound].took[round].seconds / path.took[round].seconds);
        }
        std::printf("  %.2f of %s (%.2f to %.2f)", Median(shares),
                    paths_[ratio.bound].bound_name.c_str(),
                    *std::min_element(shares.begin(), shares.end()),
                    *std::max_element(shares.begin(), shares.end()));
      }
      std::printf("\n");
    }
  }

 private:
  static bool Has(const std::string& path) {
    const std::vector<std::string> paths = absl::GetFlag(FLAGS_paths);
    return std::find(paths.begin(), paths.end(), path) != paths.end();
  }
  static void Fill(const MutableBytes& tensor, float value) {
    std::fill_n(reinterpret_cast<float*>(tensor.data()), tensor.size() / 4, value);
  }

  static void FillInputs(const Tensors& tensors) {
    Fill(tensors.q, 0.25f);
    Fill(tensors.k, 0.5f);
    Fill(tensors.v, 3.0f);
  }

  size_t Add(Path path) {
    paths_.push_back(std::move(path));
    return paths_.size() - 1;
  }
  size_t AddCall(const std::string& name, TransportPreference wish) {
    return Add({name, name, [this, wish] { return Call(*client_, *tensors_, rows_, wish, 0); }});
  }

  void AddStaged() {
    const int threads = absl::GetFlag(FLAGS_threads);
    const size_t staged =
        Add({"host memory, staged", "", [this] {
               return Call(*client_, *plain_, rows_, TransportPreference::kHostMemory,
                           Tensors::Bytes(rows_));
             }});
    between_.resize(bytes_);
    const size_t copies =
        Add({absl::StrCat("memcpy, twice each way, ", threads, " threads"), "both memcpys",
             [this, threads] {
               return Took{Seconds([&] {
                 CopySideBySide(between_.data(), plain_->q.data(), bytes_, threads);
                 CopySideBySide(mine_.data(), between_.data(), bytes_, threads);
                 CopySideBySide(between_.data(), mine_.data(), bytes_, threads);
                 CopySideBySide(plain_->out.data(), between_.data(), bytes_, threads);
               })};
             }});
    ratios_.push_back({staged, copies});
  }

  void AddPaths() {
    if (region_ != nullptr) {
      const int threads = absl::GetFlag(FLAGS_threads);
      const size_t host = AddCall("host memory", TransportPreference::kHostMemory);
      const size_t copy =
          Add({absl::StrCat("memcpy of the same memory, ", threads, " threads"), "the memcpy",
               [this, threads] {
                 return Took{Seconds([&] {
                   CopySideBySide(mine_.data(), tensors_->q.data(), bytes_, threads);
                   CopySideBySide(tensors_->out.data(), mine_.data(), bytes_, threads);
                 })};
               }});
      ratios_.push_back({host, copy});
    }
    if (Has("staged")) AddStaged();
    if (direct_) {
      const int streams = absl::GetFlag(FLAGS_workers) * absl::GetFlag(FLAGS_channels);
      const size_t direct =
          AddCall(absl::StrCat("direct, ", streams, " streams"), TransportPreference::kDirect);
      const size_t tcp =
          Add({absl::StrCat("plain TCP, one hop, ", streams, " connections"), "plain TCP",
               [this, streams] {
                 return Took{tcp_->ExchangeWithSink(streams, bytes_ / streams, bytes_ / streams)};
               }});
      ratios_.push_back({direct, tcp});
      if (beside_) {
        const size_t beside = Add({"--beside", "it", [this] { return Took{beside_->Round()}; }});
        ratios_.push_back({direct, beside});
      }
    }
    if (Has("relay")) AddCall("relay, one stream", TransportPreference::kRelay);
  }

  const bool direct_;
  std::optional<TcpRelay> tcp_;
  std::optional<Beside> beside_;
  std::unique_ptr<Client> client_;
  int64_t rows_ = 0;
  int64_t bytes_ = 0;
  std::shared_ptr<Region> region_;
  std::vector<uint8_t> memory_;
  std::optional<Tensors> tensors_;  // of all calls but the staged ones
  std::optional<Tensors> plain_;    // in memory_
  std::vector<uint8_t> mine_;
  std::vector<uint8_t> between_;
  std::vector<Path> paths_;
  std::vector<Ratio> ratios_;
};

}  // namespace ringattn::bench

int main(int argc, char** argv) {
  ringattn::wire::KeepFreedMemory();  // as the command line does
  absl::ParseCommandLine(argc, argv);
  ringattn::bench::Bench bench;
  bench.Run();
  bench.Print();
  return 0;
}
