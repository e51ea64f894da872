// Times the work of one rank of a ring alone: its program's calls on one GPU, without transfers,
// compared with the same calls with steps joined (worker/executor/late_keys.h) and keys present
// from the start, by the schedules ring and all_gather. This isolates the cost of splitting the
// work into steps from exchange and neighbours.
//
//   ring_steps [--tokens=N,...] [--world=N] [--heads=H/HKV] [--rounds=R] [--pause_ms=N]
//              [--long_keys=N] [--late_us=N,...] [--devices=N [--fetch]] [--backward]
//
// --devices: as many cards compute each row, and all start at once, so that each card runs with
// busy neighbours. Each prints its figures. With --fetch also while copy engines fetch the first
// step's keys from the next card: with calls that wait for them and with calls that do not.
// --late_us: when joined calls receive the signal that their late keys have arrived.
//
// --pause_ms: the card rests before each, as between a service's requests. Without, it is soon at
// its power limit.
//
// Causal, zigzag, bf16, head_dim 128. Random inputs. The outputs of a rank's forwards are compared:
// equal positions of all buffers hold equal bytes, so the rows differ by rounding alone. Results
// are judged elsewhere (cuda_kernels_test).
//
// "overlapped" rows of a backward: each call may begin while the one before it ends
// (StartAfter::overlaps_previous).
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/schedule/schedule.h"
#include "worker/executor/bind_call.h"
#include "worker/executor/late_keys.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker {
namespace {

bool own_group = false;

[[noreturn]] void Fail(const char* what, const char* why) {
  std::fprintf(stderr, "FATAL %s: %s\n", what, why);
  if (own_group) kill(0, SIGTERM);  // the processes of other cards too, which would wait
  std::exit(2);
}
void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Fail(what, cudaGetErrorString(error));
}
void Check(const absl::Status& status) {
  if (!status.ok()) Fail("kernels", status.ToString().c_str());
}

// Device memory of random bf16 numbers around 1; read as fp32 they are harmless too.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    Check(cudaMalloc(&data_, std::max<int64_t>(bytes, 256)), "cudaMalloc");
    static const std::vector<uint16_t> noise = [] {
      std::mt19937 random(1);
      std::vector<uint16_t> bits(1 << 20);
      for (uint16_t& each : bits) each = (random() & 0x8000) | (0x3e80 + random() % 0x100);
      return bits;
    }();
    const int64_t piece = static_cast<int64_t>(noise.size()) * 2;
    for (int64_t at = 0; at < bytes; at += piece) {
      Check(cudaMemcpy(static_cast<char*>(data_) + at, noise.data(), std::min(piece, bytes - at),
                       cudaMemcpyHostToDevice),
            "fill");
    }
  }
  ~Memory() { (void)cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* get() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

// A program's attention calls, prepared.
class Calls {
 public:
  Calls(const AttentionSpec& spec, const ShardPlan& plan, const Program& program,
        const cuda::DeviceInfo& device, const cuda::KernelTuning& tuning, absl::Duration late_after)
      : context_(spec, plan, program) {
    for (const BufferSpec& buffer : program.buffers) {
      buffers_.push_back(std::make_unique<Memory>(buffer.bytes));
      if (buffer.output != TensorId::kOut) continue;
      out_ = buffers_.back()->get();
      out_bytes_ = buffer.bytes;
    }
    for (const Step& step : program.steps) {
      std::vector<std::pair<char*, int64_t>> received;
      for (const Transfer& transfer : step.transfers) {
        if (transfer.kind != Transfer::Kind::kReceive) continue;
        received.emplace_back(buffers_[transfer.range.buffer]->get() + transfer.range.offset,
                              transfer.range.bytes);
      }
      if (!received.empty()) received_.push_back(std::move(received));
    }
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) {
        KernelCall described = DescribeCall(context_, call);
        SetAddresses(
            call,
            [this](const ByteRange& range) -> void* {
              return buffers_[range.buffer]->get() + range.offset;
            },
            described);
        if (auto* forward = std::get_if<ForwardCall>(&described)) {
          const int arrivals = forward->has_late_keys() ? forward->blocks.back().late : 0;
          for (int i = 1; i <= arrivals; ++i) forward->late_after.push_back(i * late_after);
          Add(cuda::PrepareForward(*forward, device, tuning));
        } else if (const auto* backward = std::get_if<BackwardCall>(&described)) {
          Add(cuda::PrepareBackward(*backward, device));
        }
      }
    }
  }

  size_t size() const { return kernels_.size(); }
  void Launch(size_t i, bool awaits_keys, cudaStream_t stream = nullptr) const {
    Check(kernels_[i].kernel->Launch(
        {stream, kernels_[i].tables->get(), kernels_[i].scratch->get(), nullptr, awaits_keys}));
  }
  uint32_t* KeysWord() const {
    return reinterpret_cast<uint32_t*>(kernels_[0].tables->get() +
                                       *kernels_[0].kernel->keys_word_offset());
  }
  // A forward's output.
  std::vector<float> Output() const {
    std::vector<uint16_t> bits(out_bytes_ / 2);
    Check(cudaMemcpy(bits.data(), out_, out_bytes_, cudaMemcpyDeviceToHost), "output");
    std::vector<float> values(bits.size());
    ConvertToFloat(DType::kBFloat16, bits.data(), values.data(), values.size());
    return values;
  }
  // The keys that each step receives.
  const std::vector<std::vector<std::pair<char*, int64_t>>>& received() const { return received_; }

 private:
  struct Ready {
    std::unique_ptr<cuda::PreparedKernel> kernel;
    std::unique_ptr<Memory> tables, scratch;
  };
  void Add(absl::StatusOr<std::unique_ptr<cuda::PreparedKernel>> prepared) {
    Check(prepared.status());
    Ready ready{*std::move(prepared), nullptr, nullptr};
    std::vector<char> host(ready.kernel->table_bytes());
    ready.tables = std::make_unique<Memory>(ready.kernel->table_bytes());
    ready.scratch = std::make_unique<Memory>(ready.kernel->scratch_bytes());
    Check(ready.kernel->PlaceScratch(ready.scratch->get()));
    ready.kernel->WriteTables(host.data());
    Check(cudaMemcpy(ready.tables->get(), host.data(), host.size(), cudaMemcpyHostToDevice),
          "tables");
    kernels_.push_back(std::move(ready));
  }

  const BindContext context_;
  std::vector<std::unique_ptr<Memory>> buffers_;
  std::vector<Ready> kernels_;
  const char* out_ = nullptr;
  int64_t out_bytes_ = 0;
  std::vector<std::vector<std::pair<char*, int64_t>>> received_;
};

// Memory that processes made later have in common.
void* Shared(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Fail("mmap", std::strerror(errno));
  return memory;
}

// Where the processes of several cards wait for each other.
class Start {
 public:
  explicit Start(int processes)
      : barrier_(static_cast<pthread_barrier_t*>(Shared(sizeof(pthread_barrier_t)))) {
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(barrier_, &shared, processes);
  }
  void Wait() const { pthread_barrier_wait(barrier_); }

 private:
  pthread_barrier_t* const barrier_;
};

// Memory of the next card, which copy engines fetch keys from, as a ring's transport does.
class Neighbour {
 public:
  static constexpr int kMostCards = 16;
  Neighbour()
      : handles_(static_cast<cudaIpcMemHandle_t*>(Shared(sizeof(*handles_) * kMostCards))) {}

  // REQUIRES: all cards call it, and `bytes` is everyone's.
  void Meet(const Start& start, int card, int cards, int64_t bytes) {
    outbox_ = std::make_unique<Memory>(bytes);
    Check(cudaIpcGetMemHandle(&handles_[card], outbox_->get()), "cudaIpcGetMemHandle");
    start.Wait();
    Check(cudaIpcOpenMemHandle(&theirs_, handles_[(card + 1) % cards],
                               cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle");
    Check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "cudaStreamCreate");
    there_.resize(kMostCards);
    for (cudaEvent_t& event : there_) {
      Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
    Check(cudaHostAlloc(reinterpret_cast<void**>(&numbers_), 4 * kMostCards, cudaHostAllocDefault),
          "pinned words");
    std::iota(numbers_, numbers_ + kMostCards, 1);
  }
  bool met() const { return theirs_ != nullptr; }

  // Copies as many bytes as each of the ranges has, step by step. After each step it writes the
  // step's number, from 1, to the word, if there is one.
  void Fetch(const std::vector<std::vector<std::pair<char*, int64_t>>>& steps,
             uint32_t* word) const {
    for (size_t step = 0; step < steps.size(); ++step) {
      int64_t at = 0;
      for (const auto& [target, bytes] : steps[step]) {
        Check(cudaMemcpyAsync(target, static_cast<char*>(theirs_) + at, bytes,
                              cudaMemcpyDeviceToDevice, copies_),
              "fetch");
        at += bytes;
      }
      if (word != nullptr) {
        Check(cudaMemcpyAsync(word, &numbers_[step], 4, cudaMemcpyHostToDevice, copies_), "word");
      }
      Check(cudaEventRecord(there_[step], copies_), "cudaEventRecord");
    }
  }
  // Makes calls wait for a step's bytes.
  void MakeWait(size_t step) const {
    Check(cudaStreamWaitEvent(nullptr, there_[step], 0), "cudaStreamWaitEvent");
  }
  void StartAfter(cudaEvent_t event) const {
    Check(cudaStreamWaitEvent(copies_, event, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaIpcMemHandle_t* const handles_;
  std::unique_ptr<Memory> outbox_;
  void* theirs_ = nullptr;
  cudaStream_t copies_ = nullptr;
  std::vector<cudaEvent_t> there_;  // by step
  uint32_t* numbers_ = nullptr;
};

double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double{a[i]} - b[i]);
    most = difference <= most ? most : difference;  // also NaN
  }
  return most;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Milliseconds of all calls one after the other, and of each call.
struct Times {
  std::vector<double> all;
  std::vector<std::vector<double>> each;
};

enum class Keys { kThere, kThereOverlapped, kFetched, kFetchedBeside };

// Each call may begin while the one before it ends: they alternate between two streams.
void TimeOverlapped(const Calls& calls, Times& times) {
  static const std::array<cudaStream_t, 2> streams = [] {
    std::array<cudaStream_t, 2> made;
    for (cudaStream_t& stream : made) {
      Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    return made;
  }();
  std::vector<cudaEvent_t> begins(calls.size()), ends(calls.size());
  for (auto* events : {&begins, &ends}) {
    for (cudaEvent_t& event : *events) Check(cudaEventCreate(&event), "cudaEventCreate");
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    const cudaStream_t stream = streams[i % 2];
    if (i > 0) Check(cudaStreamWaitEvent(stream, begins[i - 1], 0), "cudaStreamWaitEvent");
    Check(cudaEventRecord(begins[i], stream), "cudaEventRecord");
    calls.Launch(i, false, stream);
    Check(cudaEventRecord(ends[i], stream), "cudaEventRecord");
  }
  Check(cudaDeviceSynchronize(), "kernels");
  times.each.resize(calls.size());
  float last = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begins[0], ends[i]), "cudaEventElapsedTime");
    times.each[i].push_back(milliseconds - last);
    last = std::max(last, milliseconds);
  }
  times.all.push_back(last);
  for (const auto& events : {begins, ends}) {
    for (cudaEvent_t event : events) (void)cudaEventDestroy(event);
  }
}

void Time(const Calls& calls, Keys keys, const Neighbour& neighbour, Times& times) {
  if (keys == Keys::kThereOverlapped) return TimeOverlapped(calls, times);
  std::vector<cudaEvent_t> events(calls.size() + 1);
  for (cudaEvent_t& event : events) Check(cudaEventCreate(&event), "cudaEventCreate");
  Check(cudaEventRecord(events[0], nullptr), "cudaEventRecord");
  const bool joined = calls.size() == 1, awaited = keys == Keys::kFetched;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i > 0 && awaited) neighbour.MakeWait(std::min(i, calls.received().size()) - 1);
    calls.Launch(i, joined && awaited);
    if (i == 0 && keys != Keys::kThere) {
      neighbour.StartAfter(events[0]);
      neighbour.Fetch(calls.received(), joined && awaited ? calls.KeysWord() : nullptr);
    }
    Check(cudaEventRecord(events[i + 1], nullptr), "cudaEventRecord");
  }
  Check(cudaDeviceSynchronize(), "kernels");
  times.each.resize(calls.size());
  float milliseconds = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    Check(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]), "cudaEventElapsedTime");
    times.each[i].push_back(milliseconds);
  }
  Check(cudaEventElapsedTime(&milliseconds, events[0], events.back()), "cudaEventElapsedTime");
  times.all.push_back(milliseconds);
  for (cudaEvent_t event : events) (void)cudaEventDestroy(event);
}

struct Arguments {
  std::vector<int64_t> tokens = {16384, 32768, 65536};
  int world = 2;
  int64_t heads = 32, kv_heads = 8;
  int rounds = 9;
  int pause_ms = 0;
  int devices = 1, card = 0;
  bool fetch = false;
  std::vector<int> late_us = {0, 400};
  bool backward = false;
  cuda::KernelTuning tuning;
};

AttentionSpec SpecOf(const Arguments& arguments, int64_t tokens) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.shape.num_heads = arguments.heads;
  spec.shape.num_kv_heads = arguments.kv_heads;
  spec.shape.head_dim = spec.shape.head_dim_v = 128;
  spec.options.softmax_scale = 0.088;
  spec.options.causal = true;
  return spec;
}

void Measure(const Arguments& arguments, int64_t tokens, const cuda::DeviceInfo& device,
             const Start& start, const Neighbour& neighbour) {
  const AttentionSpec spec = SpecOf(arguments, tokens);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, arguments.world);
  const Direction direction = arguments.backward ? Direction::kBackward : Direction::kForward;
  struct Row {
    std::string name;
    std::shared_ptr<Calls> calls;
    double pairs = 0;
    Keys keys = Keys::kThere;
    Times times;
    std::string reference;  // the row of the rank with a call a step, by name
    double difference = 0;  // the largest of an output from the reference's
  };
  std::vector<Row> rows;
  const auto add = [&](const std::string& name, const AttentionSpec& of, const ShardPlan& on,
                       Program program, absl::Duration late_after) {
    const double pairs = static_cast<double>(program.PairCount());
    rows.push_back({name,
                    std::make_shared<Calls>(of, on, program, device, arguments.tuning, late_after),
                    pairs,
                    Keys::kThere,
                    {},
                    {},
                    0});
    if (!neighbour.met() || rows.back().calls->received().empty()) return;
    Row again = rows.back();
    again.name = name + ", fetched";
    again.keys = Keys::kFetched;
    rows.push_back(again);
    again.name = name + ", fetched meanwhile";
    again.keys = Keys::kFetchedBeside;
    rows.push_back(again);
  };
  // As much work as a rank has, in one request.
  Arguments one = arguments;
  const auto equal = static_cast<int64_t>(tokens / std::sqrt(arguments.world) / 256) * 256;
  const AttentionSpec alone = SpecOf(one, equal);
  const ShardPlan on_one = MakeShardPlan(alone, Layout::kContiguous, 1);
  add("one GPU, equal work", alone, on_one,
      MakeProgram(alone, on_one, RecipeOn(on_one, ScheduleKind::kSingle, direction), 0), {});
  for (int rank = 0; rank < arguments.world; ++rank) {
    const std::string name = "rank " + std::to_string(rank);
    const Program program =
        MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kRing, direction), rank);
    add(name + ", a call a step", spec, plan, program, {});
    if (arguments.backward) {
      Row overlapped = rows.back();
      overlapped.name += ", overlapped";
      overlapped.keys = Keys::kThereOverlapped;
      rows.push_back(overlapped);
      continue;
    }
    for (const int microseconds : arguments.late_us) {
      add(name + ", joined, keys after " + std::to_string(microseconds) + " us", spec, plan,
          JoinLateKeys(program, [](const ComputeCall&) { return true; }),
          absl::Microseconds(microseconds));
    }
    const Program gathered =
        MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kAllGather, direction), rank);
    for (const int microseconds : arguments.late_us) {
      add(name + ", gathered, keys after " + std::to_string(microseconds) + " us", spec, plan,
          JoinLateKeys(gathered, [](const ComputeCall&) { return true; }),
          absl::Microseconds(microseconds));
    }
  }
  std::map<std::string, std::vector<float>> outputs;
  for (Row& row : rows) {
    if (arguments.backward || row.name.rfind("rank", 0) != 0) continue;
    row.reference = row.name.substr(0, row.name.find(',')) + ", a call a step";
    if (row.name != row.reference) continue;
    Times unused;
    Time(*row.calls, Keys::kThere, neighbour, unused);
    outputs[row.name] = row.calls->Output();
  }
  std::mt19937 random(7);
  for (int round = 0; round <= arguments.rounds; ++round) {
    std::vector<Row*> order;
    for (Row& row : rows) order.push_back(&row);
    std::shuffle(order.begin(), order.end(), random);
    for (Row* row : order) {
      absl::SleepFor(absl::Milliseconds(arguments.pause_ms));
      start.Wait();
      if (round == 0) {
        Times warm_up;
        Time(*row->calls, row->keys, neighbour, warm_up);
        if (!arguments.backward && !row->reference.empty()) {
          row->difference = Difference(outputs[row->reference], row->calls->Output());
        }
      } else {
        Time(*row->calls, row->keys, neighbour, row->times);
      }
    }
  }
  const double products = arguments.backward ? 10.0 : 4.0;
  for (const Row& row : rows) {
    const double flops = row.pairs * products * 128 * static_cast<double>(arguments.heads);
    const double ms = Median(row.times.all);
    std::printf("card %d %7ld  %-40s %8.3f ms  %6.1f TFLOP/s ", arguments.card,
                static_cast<long>(tokens), row.name.c_str(), ms, flops / ms / 1e9);
    for (const std::vector<double>& each : row.times.each) std::printf(" %.3f", Median(each));
    if (!row.reference.empty() && !arguments.backward)
      std::printf("  differs %.2g", row.difference);
    std::printf("\n");
  }
}

int Main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::vector<std::string> parts = absl::StrSplit(argument, absl::MaxSplits('=', 1));
    const std::string value = parts.size() > 1 ? parts[1] : "";
    bool ok = true;
    if (parts[0] == "--tokens") {
      arguments.tokens.clear();
      for (const auto each : absl::StrSplit(value, ',')) {
        ok = absl::SimpleAtoi(each, &arguments.tokens.emplace_back()) && ok;
      }
    } else if (parts[0] == "--world") {
      ok = absl::SimpleAtoi(value, &arguments.world);
    } else if (parts[0] == "--rounds") {
      ok = absl::SimpleAtoi(value, &arguments.rounds);
    } else if (parts[0] == "--pause_ms") {
      ok = absl::SimpleAtoi(value, &arguments.pause_ms);
    } else if (parts[0] == "--heads") {
      const std::vector<std::string> heads = absl::StrSplit(value, '/');
      ok = heads.size() == 2 && absl::SimpleAtoi(heads[0], &arguments.heads) &&
           absl::SimpleAtoi(heads[1], &arguments.kv_heads);
    } else if (parts[0] == "--long_keys") {
      ok = absl::SimpleAtoi(value, &arguments.tuning.long_keys);
    } else if (parts[0] == "--devices") {
      ok = absl::SimpleAtoi(value, &arguments.devices) && arguments.devices > 0 &&
           arguments.devices <= Neighbour::kMostCards;
    } else if (parts[0] == "--late_us") {
      arguments.late_us.clear();
      for (const auto each : absl::StrSplit(value, ',')) {
        ok = absl::SimpleAtoi(each, &arguments.late_us.emplace_back()) && ok;
      }
    } else if (argument == "--fetch") {
      arguments.fetch = true;
    } else if (argument == "--backward") {
      arguments.backward = true;
    } else {
      ok = false;
    }
    if (!ok) {
      std::fprintf(stderr, "ring_steps: %s: see the head of ring_steps.cc\n", argument.c_str());
      return 2;
    }
  }
  // A process a card, made before CUDA is: a failed one leaves the others waiting, so it ends all.
  const Start start(arguments.devices);
  Neighbour neighbour;
  own_group = arguments.devices > 1 && setpgid(0, 0) == 0;
  for (int card = 1; card < arguments.devices; ++card) {
    const pid_t child = fork();
    if (child < 0) return 2;
    if (child == 0) {
      arguments.card = card;
      break;
    }
  }
  Check(cudaSetDevice(arguments.card), "cudaSetDevice");
  const auto device = cuda::QueryDevice(arguments.card);
  Check(device.status());
  Check(cuda::LoadKernels(*device));
  if (arguments.fetch) {
    const int64_t most = *std::max_element(arguments.tokens.begin(), arguments.tokens.end());
    neighbour.Meet(start, arguments.card, arguments.devices,
                   most * arguments.kv_heads * 128 * 2 * 2);  // all_gather's K and V
  }
  for (const int64_t tokens : arguments.tokens) {
    Measure(arguments, tokens, *device, start, neighbour);
  }
  std::fflush(stdout);
  if (arguments.card == 0) {
    while (wait(nullptr) > 0) continue;
  }
  return 0;
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) { return ringattn::worker::Main(argc, argv); }
