// Measures rates between two GPUs that exchange over sockets or NCCL, as two hosts of one GPU each,
// and what exchange and computation take from each other. Ranks are processes, as workers are.
// Prints one JSON object per line. Exits 1 if a transfer or a call fails, or if bytes are wrong.
//
//   wire_rate [--bytes=N] [--seconds=S] [--connections=N,...] [--transports=wire,wire_tls,nccl]
//             [--compute] [--one_way] [--one_gpu] [--namespaces=A,B --addresses=IP,IP]
//             [--singles=N,... [--pauses=MS,...] [--rounds=N]] [--label=TEXT]
//
//   --bytes        of each transfer; a group has one in each direction [268435456]
//   --singles      instead of rates, the times of separate exchanges of these lengths, at most
//                  --bytes: --rounds [20], at most 100, after each of --pauses in ms [0,5,200]
//   --one_way      only from rank 0 to rank 1
//   --one_gpu      both ranks use GPU 0, so that one is enough
//   --seconds      duration of each measurement [3]
//   --connections  TCP connections per pair, for wire [1,2,4,8]
//   --compute      in addition the rates with a forward that fills the device at the same time, and
//                  the rate of that forward alone
//   --namespaces   network namespaces (/var/run/netns) of rank 0 and rank 1, whose interfaces have
//                  `addresses`; default: both ranks use loopback
//
// Needs two GPUs unless --one_gpu is given, and NCCL if it is one of the transports.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/comm/wire_cuda/wire_cuda_ranks.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

constexpr int kRanks = 2;
constexpr int kMaxRounds = 100;
constexpr int64_t kRows = 16384, kHeads = 32, kHeadDim = 128;  // of the forward: 12 ms on an H200

struct Settings {
  int64_t bytes = int64_t{256} << 20;
  int seconds = 3;
  std::vector<int> connections = {1, 2, 4, 8};
  std::vector<std::string> transports = {"wire", "wire_tls", "nccl"};
  bool compute = false;
  std::vector<int64_t> singles;              // bytes of separate exchanges
  std::vector<int> pauses_ms = {0, 5, 200};  // before each of them
  int rounds = 20;
  bool one_way = false;
  bool one_gpu = false;
  std::vector<std::string> namespaces;
  std::vector<std::string> addresses = {"127.0.0.1", "127.0.0.1"};
  std::string label;

  int gpu(int rank) const { return one_gpu ? 0 : rank; }
};

// One ring's measurements by rank, in memory that the ranks share.
struct Measured {
  double exchange[kRanks] = {};            // bytes per second and direction
  double exchange_busy[kRanks] = {};       // the same next to the forward
  double forward[kRanks] = {};             // calls per second without exchange
  double forward_busy[kRanks] = {};        // the same next to exchange
  double processor_seconds[kRanks] = {};   // per second of exchange
  double single[kRanks][kMaxRounds] = {};  // seconds of separate exchanges
  std::atomic<int> arrived{0};
};

void Check(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  _exit(1);
}

void EnterNamespace(const std::string& name) {
  const int fd = open(absl::StrCat("/var/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd >= 0 && setns(fd, CLONE_NEWNET) == 0) {
    close(fd);
    return;
  }
  std::perror("network namespace");
  _exit(1);
}

// The rank of this process. Its transport is created when its rank is known.
class HostRank : public RingTransport {
 public:
  HostRank(const Settings& settings, std::string name, int connections,
           std::optional<TlsMaterial> tls)
      : settings_(settings), name_(std::move(name)), connections_(connections), tls_(tls) {}

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    if (!settings_.namespaces.empty()) EnterNamespace(settings_.namespaces[rank]);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // as workers do
    setenv("NCCL_HOSTID", absl::StrCat("host", rank).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", settings_.namespaces.empty() ? "lo" : "e0", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
    if (name_ == "nccl") {
      auto made = NcclRingTransport::Create({.device = settings_.gpu(rank)});
      if (!made.ok()) return made.status();
      transport_ = *std::move(made);
    } else {
      CudaWireTransportOptions options =
          TestWireOptions(settings_.gpu(rank), connections_, tls_, {});
      options.wire.host = settings_.addresses[rank];
      auto made = CudaWireTransport::Create(std::move(options));
      if (!made.ok()) return made.status();
      transport_ = *std::move(made);
    }
    auto prepared = transport_->Prepare(generation, rank, world_size);
    if (!prepared.ok()) std::fprintf(stderr, "%s\n", prepared.status().ToString().c_str());
    return prepared;
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override {
    auto ring = transport_->Connect(generation, blobs, deadline);
    if (!ring.ok()) std::fprintf(stderr, "%s\n", ring.status().ToString().c_str());
    return ring;
  }
  void Cancel() override { transport_->Cancel(); }

 private:
  const Settings& settings_;
  const std::string name_;
  const int connections_;
  const std::optional<TlsMaterial> tls_;
  std::unique_ptr<RingTransport> transport_;
};

// Forward calls one after the other, by one thread.
class Forwards {
 public:
  explicit Forwards(int cuda_index) {
    auto made = CudaDevice::Create({.device = cuda_index,
                                    .pinned_pool_bytes = int64_t{16} << 20,
                                    .memory_limit_bytes = int64_t{8} << 30});
    Check(made.status(), "device");
    device_ = *std::move(made);
    problem_.dtype = DType::kBFloat16;
    problem_.num_heads = problem_.num_kv_heads = kHeads;
    problem_.head_dim = problem_.head_dim_v = kHeadDim;
    problem_.softmax_scale = 0.1f;
    problem_.bands = {Band{}};
    ForwardCall call;
    call.problem = &problem_;
    call.q_rows = kRows;
    call.q_pieces = {Piece{.length = kRows}};
    call.q = Tensor(2);
    call.blocks = {{kRows, {Piece{.length = kRows}}, Tensor(2), Tensor(2)}};
    call.out = Tensor(2);
    call.lse = static_cast<float*>(Tensor(4, 1));
    call.initial = call.final = true;
    auto prepared = device_->Prepare({KernelCall(std::move(call))});
    Check(prepared.status(), "forward");
    prepared_ = *std::move(prepared);
    for (int i = 0; i < 5; ++i) One();
  }

  // Returns calls per second until `stop`, at least for `seconds`.
  double Run(int seconds, const std::atomic<bool>* stop) {
    const absl::Time begin = MonotonicNow(), end = begin + absl::Seconds(seconds);
    int calls = 0;
    do {
      One();
      ++calls;
    } while (stop != nullptr ? !stop->load() : MonotonicNow() < end);
    return calls / absl::ToDoubleSeconds(MonotonicNow() - begin);
  }

 private:
  void One() {
    // Two in the queue, so that the device never waits for the host.
    next_.push_back(device_->Start(*prepared_.front(), {}, &control_));
    if (next_.size() < 2) return;
    Check(next_.front()->Wait(Soon()), "forward");
    next_.erase(next_.begin());
  }
  // Random bits that are numbers of about 1 in bf16.
  void* Tensor(int64_t element_bytes, int64_t dim = kHeadDim) {
    const int64_t bytes = kRows * kHeads * dim * element_bytes;
    std::vector<uint16_t> values(bytes / 2);
    uint32_t state = 1;
    for (uint16_t& value : values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<uint16_t>(0x3f00 | (state >> 24 & 0x7f) | (state >> 16 & 0x8000));
    }
    auto buffer = device_->Allocate(bytes);
    Check(buffer.status(), "memory");
    Check(device_->CopyFromHost((*buffer)->data(), values.data(), bytes), "memory");
    buffers_.push_back(*std::move(buffer));
    return buffers_.back()->data();
  }

  std::unique_ptr<CudaDevice> device_;
  AttentionProblem problem_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  PreparedCalls prepared_;
  RunControl control_;
  std::vector<EventRef> next_;
};

// Both ranks reach this point. They leave it at the same time except for `pause`.
void Meet(Measured* measured, int* meetings, absl::Duration pause = absl::Microseconds(100)) {
  ++measured->arrived;
  ++*meetings;
  while (measured->arrived < *meetings * kRanks) absl::SleepFor(pause);
}

double ProcessorSeconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + time.tv_nsec / 1e9;
}

// Exchanges groups for some seconds, two of them enqueued at a time. The ranks agree about the
// number of groups. Returns bytes per second and direction.
double Exchange(Communicator& ring, char* sent, char* received, const Settings& settings,
                int groups) {
  const int peer = 1 - ring.rank();
  RunControl control;
  std::vector<EventRef> next;
  const auto start = [&] {
    std::vector<PeerTransfer> group = {{Kind::kSend, peer, sent, settings.bytes},
                                       {Kind::kReceive, peer, received, settings.bytes}};
    if (settings.one_way) group.erase(group.begin() + (ring.rank() == 0 ? 1 : 0));
    next.push_back(ring.StartInLane(Lane::kBetween, std::move(group), {}, &control));
  };
  const absl::Time begin = MonotonicNow();
  start();
  for (int i = 1; i < groups; ++i) {
    start();
    Check(next.front()->Wait(Soon()), "exchange");
    next.erase(next.begin());
  }
  Check(next.front()->Wait(Soon()), "exchange");
  return static_cast<double>(settings.bytes) * groups /
         absl::ToDoubleSeconds(MonotonicNow() - begin);
}

// Measures separate exchanges, each after a pause, and prints their times.
void Singles(Communicator& ring, char* sent, char* received, const Settings& settings,
             Measured* measured, int* meetings) {
  const int rank = ring.rank(), peer = 1 - rank;
  RunControl control;
  for (int64_t bytes : settings.singles) {
    for (int pause : settings.pauses_ms) {
      for (int round = 0; round < settings.rounds; ++round) {
        absl::SleepFor(absl::Milliseconds(pause));
        Meet(measured, meetings, absl::ZeroDuration());
        const EventRef done = ring.StartInLane(
            Lane::kBetween,
            {{Kind::kSend, peer, sent, bytes}, {Kind::kReceive, peer, received, bytes}}, {},
            &control);
        Check(done->Wait(Soon()), "exchange");
        measured->single[rank][round] =
            absl::ToDoubleSeconds(done->end_time() - done->begin_time());
      }
      Meet(measured, meetings);
      if (rank == 0) {
        std::string line = absl::StrCat("{\"label\":\"", settings.label, "\",\"bytes\":", bytes,
                                        ",\"pause_ms\":", pause, ",\"milliseconds\":[");
        for (int round = 0; round < settings.rounds; ++round) {
          const double slowest = std::max(measured->single[0][round], measured->single[1][round]);
          absl::StrAppend(&line, round > 0 ? "," : "", std::round(slowest * 1e6) / 1e3);
        }
        std::printf("%s]}\n", line.c_str());
        std::fflush(stdout);
      }
      Meet(measured, meetings);
    }
  }
}

int Measure(Communicator& ring, const Settings& settings, Measured* measured) {
  const int rank = ring.rank();
  int meetings = 0;
  GpuRank memory(settings.gpu(rank), nullptr);
  Memory sent(&memory, Pattern(settings.bytes, rank)), received(&memory, settings.bytes);
  // The number of groups follows from rank 0's first ones.
  const double rate = Exchange(ring, sent.data(), received.data(), settings, 2);
  if ((rank == 1 || !settings.one_way) && received.Read() != Pattern(settings.bytes, 1 - rank)) {
    std::fprintf(stderr, "rank %d received wrong bytes\n", rank);
    return 1;
  }
  if (!settings.singles.empty()) {
    Singles(ring, sent.data(), received.data(), settings, measured, &meetings);
    return 0;
  }
  if (rank == 0) measured->exchange[0] = rate;
  Meet(measured, &meetings);
  const int groups =
      std::max(3, static_cast<int>(measured->exchange[0] * settings.seconds / settings.bytes));
  Meet(measured, &meetings);
  const double processor = ProcessorSeconds();
  const absl::Time begin = MonotonicNow();
  measured->exchange[rank] = Exchange(ring, sent.data(), received.data(), settings, groups);
  measured->processor_seconds[rank] =
      (ProcessorSeconds() - processor) / absl::ToDoubleSeconds(MonotonicNow() - begin);
  if (!settings.compute) return 0;
  Forwards forwards(settings.gpu(rank));
  Meet(measured, &meetings);
  measured->forward[rank] = forwards.Run(settings.seconds, nullptr);
  Meet(measured, &meetings);
  std::atomic<bool> stop{false};
  std::thread computes([&] { measured->forward_busy[rank] = forwards.Run(0, &stop); });
  absl::SleepFor(absl::Milliseconds(100));
  measured->exchange_busy[rank] = Exchange(ring, sent.data(), received.data(), settings, groups);
  stop = true;
  computes.join();
  Meet(measured, &meetings);
  return 0;
}

double Least(const double (&values)[kRanks]) { return *std::min_element(values, values + kRanks); }

void Report(const Settings& settings, const std::string& transport, int connections,
            const Measured& measured) {
  std::string line = absl::StrCat(
      "{\"label\":\"", settings.label, "\",\"transport\":\"", transport,
      "\",\"connections\":", connections, ",\"bytes\":", settings.bytes,
      ",\"one_way\":", settings.one_way ? "true" : "false",
      ",\"gb_per_second_each_way\":", Least(measured.exchange) / 1e9,
      ",\"cores\":", (measured.processor_seconds[0] + measured.processor_seconds[1]) / kRanks);
  if (settings.compute) {
    const auto ratio = [](const double(&part)[kRanks], const double(&whole)[kRanks]) {
      return std::min(part[0] / whole[0], part[1] / whole[1]);
    };
    absl::StrAppend(&line,
                    ",\"gb_per_second_next_to_forward\":", Least(measured.exchange_busy) / 1e9,
                    ",\"exchange_ratio\":", ratio(measured.exchange_busy, measured.exchange),
                    ",\"forwards_per_second\":", Least(measured.forward),
                    ",\"forward_ratio\":", ratio(measured.forward_busy, measured.forward));
  }
  std::printf("%s}\n", line.c_str());
  std::fflush(stdout);
}

// Runs a ring whose ranks are processes.
void Run(const Settings& settings, const std::string& transport, int connections) {
  void* memory =
      mmap(nullptr, sizeof(Measured), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* measured = new (memory) Measured;
  std::optional<TlsMaterial> tls;
  if (transport == "wire_tls") tls = TestTlsMaterial();
  {
    ForkedRing ring(
        kRanks, [&] { return std::make_unique<HostRank>(settings, transport, connections, tls); },
        [&](Communicator& communicator) { return Measure(communicator, settings, measured); });
    ring.ExpectSuccess();
  }
  if (::testing::Test::HasFailure()) std::exit(1);
  if (settings.singles.empty()) Report(settings, transport, connections, *measured);
  munmap(memory, sizeof(Measured));
}

template <typename Number>
bool ParseList(absl::string_view list, std::vector<Number>* numbers) {
  numbers->clear();
  for (absl::string_view text : absl::StrSplit(list, ',')) {
    numbers->emplace_back();
    if (!absl::SimpleAtoi(text, &numbers->back())) return false;
  }
  return true;
}

bool Parse(absl::string_view option, Settings* settings) {
  if (option == "--compute") return settings->compute = true;
  if (option == "--one_way") return settings->one_way = true;
  if (option == "--one_gpu") return settings->one_gpu = true;
  if (absl::ConsumePrefix(&option, "--bytes=")) return absl::SimpleAtoi(option, &settings->bytes);
  if (absl::ConsumePrefix(&option, "--seconds=")) {
    return absl::SimpleAtoi(option, &settings->seconds);
  }
  if (absl::ConsumePrefix(&option, "--label=")) {
    settings->label = std::string(option);
    return true;
  }
  if (absl::ConsumePrefix(&option, "--transports=")) {
    settings->transports = absl::StrSplit(option, ',');
    return true;
  }
  if (absl::ConsumePrefix(&option, "--namespaces=")) {
    settings->namespaces = absl::StrSplit(option, ',');
    return settings->namespaces.size() == kRanks;
  }
  if (absl::ConsumePrefix(&option, "--addresses=")) {
    settings->addresses = absl::StrSplit(option, ',');
    return settings->addresses.size() == kRanks;
  }
  if (absl::ConsumePrefix(&option, "--singles=")) return ParseList(option, &settings->singles);
  if (absl::ConsumePrefix(&option, "--pauses=")) return ParseList(option, &settings->pauses_ms);
  if (absl::ConsumePrefix(&option, "--rounds=")) {
    return absl::SimpleAtoi(option, &settings->rounds) && settings->rounds > 0 &&
           settings->rounds <= kMaxRounds;
  }
  return absl::ConsumePrefix(&option, "--connections=") &&
         ParseList(option, &settings->connections);
}

int Main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const bool parsed = Parse(argv[i], &settings);
    const bool fits = std::all_of(settings.singles.begin(), settings.singles.end(),
                                  [&](int64_t n) { return n > 0 && n <= settings.bytes; });
    if (parsed && fits && settings.bytes > 0 && settings.seconds > 0) continue;
    std::fprintf(stderr, "%s: unknown option or value; see wire_rate.cc\n", argv[i]);
    return 2;
  }
  for (const std::string& transport : settings.transports) {
    if (transport == "nccl") {
      Run(settings, transport, 0);
      continue;
    }
    for (int connections : settings.connections) Run(settings, transport, connections);
  }
  return 0;
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  ::testing::InitGoogleTest();
  return ringattn::worker::Main(argc, argv);
}
