// Checks CudaDevice on the first GPU. Also built with fakes.
#include "worker/device/cuda/cuda_device.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/layout/shard_plan.h"
#include "common/oracle/comparator.h"
#include "common/oracle/generator.h"
#include "common/oracle/oracle.h"
#include "common/schedule/schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_status.h"
#include "worker/device/cuda/test_device.h"
#include "worker/device/host_event.h"
#include "worker/executor/run_in_process.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

TEST(CudaDeviceTest, DescribesItself) {
  auto device = MakeDevice();
  EXPECT_THAT(device->description(), HasSubstr("cuda:0 ("));
  EXPECT_GT(*CudaFreeBytes(0), 1 << 30);
  std::printf("%s\n", device->description().c_str());
}

// Every kind of call has exactly one family, which computes it.
TEST(CudaDeviceTest, ReportsServedCalls) {
  auto device = MakeDevice();
  std::vector<KernelRate> rates;
  for (const ServedCalls& served : device->served_calls()) {
    rates.push_back({served.family, served.dtypes,
                     served.backward ? Direction::kBackward : Direction::kForward, 1.0,
                     served.kind});
  }
  AttentionSpec spec;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      for (const int bits : {0, 1, 2, 3}) {
        spec.dtype = dtype;
        spec.options.segment_ids = bits & 1;
        spec.options.deterministic = bits & 2;
        for (const int64_t head_dim : {1, 64, 100, 128, 132, 136, 256}) {
          spec.shape.head_dim = spec.shape.head_dim_v = head_dim;
          EXPECT_NE(RateOf(rates, spec, direction), nullptr) << head_dim;
        }
      }
    }
  }
  // And compute_dtype, where a kernel has it.
  EXPECT_GE(device->served_options().size(), 8u);
  for (const int64_t head_dim : {1, 100, 128, 256}) {
    const AttentionProblem problem{
        .dtype = DType::kBFloat16, .head_dim = head_dim, .head_dim_v = head_dim, .bands = {Band{}}};
    ForwardCall call;
    call.problem = &problem;
    PreparedCalls calls = Ready(*device, {call, ZeroCall{}, GatherCall{}, ScatterCall{}});
    spec = {};
    spec.dtype = problem.dtype;
    spec.shape.head_dim = spec.shape.head_dim_v = head_dim;
    EXPECT_EQ(calls[0]->kernel().family, RateOf(rates, spec, Direction::kForward)->family);
    EXPECT_EQ(calls[0]->kernel().kernel_class, "plain");
    EXPECT_TRUE(calls[1]->kernel().empty());
    EXPECT_TRUE(calls[2]->kernel().empty());
    EXPECT_TRUE(calls[3]->kernel().empty());
  }
}

// Options that a forced family does not compute are not offered.
TEST(CudaDeviceTest, ForcedFamilyWithoutScoreTermsOffersNone) {
  const auto device = CudaDevice::Create({.device = 0, .kernel_family = "sm80"});
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->served_options(),
            (std::vector<std::string>{"dilation_levels", "reply.probability_rows"}));
  for (const ServedCalls& served : (*device)->served_calls()) EXPECT_FALSE(served.kind.score_terms);
}

TEST(CudaDeviceTest, RejectsUnknownKernelFamilyByName) {
  const auto device = CudaDevice::Create({.device = 0, .kernel_family = "sm1"});
  EXPECT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("\"sm1\" is none of"));
}

TEST(CudaDeviceTest, SetsMaxConnectionsInEnvironment) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", /*overwrite=*/1);
  ASSERT_TRUE(CudaDeviceCount().ok());
  EXPECT_STREQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), "32");
}

TEST(CudaDeviceTest, RejectsUnknownDeviceByName) {
  const auto device = CudaDevice::Create({.device = 99});
  EXPECT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("no CUDA device 99"));
}

TEST(CudaDeviceTest, AllocatesAndFreesMemory) {
  auto device = MakeDevice();
  const int64_t before = device->usage().allocated_bytes;
  for (int i = 0; i < 50; ++i) {
    auto buffer = device->Allocate(256 * kMiB);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % 256, 0u);
    EXPECT_GE(device->usage().allocated_bytes, before + 256 * kMiB);
  }
  ASSERT_TRUE(device->Allocate(1).ok());
  const auto none = device->Allocate(int64_t{1} << 50);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("are free"));
  EXPECT_TRUE(device->Allocate(kMiB).ok()) << "and the device still works";
  EXPECT_EQ(times_broken, 0);
}

// A call that preempts does not wait for the calls that were enqueued before it.
TEST(CudaDeviceTest, PreemptingCallsOvertakeOthers) {
  constexpr int64_t kBytes = 256 * kMiB;
  auto device = MakeDevice();
  auto large = *device->Allocate(kBytes);
  auto small = *device->Allocate(kMiB);
  const std::vector<float> ones(kMiB / 4, 1.0f);
  ASSERT_TRUE(device->CopyFromHost(small->data(), ones.data(), kMiB).ok());
  PreparedCalls calls =
      Ready(*device, {ZeroCall{large->data(), kBytes}, ZeroCall{small->data(), kMiB}});
  RunControl ordinary, preempting;
  preempting.preempts = true;
  EventRef first = device->Start(*calls[0], {}, &ordinary);
  ASSERT_TRUE(first->Wait(Soon()).ok());
  // About half a second of work.
  const absl::Duration each = first->end_time() - first->begin_time();
  const int64_t count = std::clamp<int64_t>(
      absl::Milliseconds(500) / std::max(each, absl::Microseconds(1)), 10, 5000);
  std::vector<EventRef> events;
  for (int64_t i = 0; i < count; ++i) events.push_back(device->Start(*calls[0], {}, &ordinary));
  const EventRef overtakes = device->Start(*calls[1], {}, &preempting);
  ASSERT_TRUE(overtakes->Wait(Soon()).ok());
  EXPECT_FALSE(events.back()->Done());
  EXPECT_EQ(preempting.progress.load(), 1);
  ASSERT_TRUE(events.back()->Wait(Soon()).ok());
  EXPECT_LT(overtakes->end_time(), events.back()->begin_time());
  std::vector<float> result(kMiB / 4);
  ASSERT_TRUE(device->CopyToHost(result.data(), small->data(), kMiB).ok());
  EXPECT_EQ(result, std::vector<float>(kMiB / 4, 0.0f));
}

TEST(CudaDeviceTest, CallsRunInOrderAndCountAsProgress) {
  auto device = MakeDevice();
  auto buffer = *device->Allocate(kMiB);
  std::vector<float> ones(kMiB / 8, 1.0f), result(kMiB / 8);
  float* const low = static_cast<float*>(buffer->data());
  float* const high = low + ones.size();
  ASSERT_TRUE(device->CopyFromHost(high, ones.data(), kMiB / 2).ok());
  PreparedCalls calls = Ready(*device, {ZeroCall{low, kMiB / 2}, AddCall{low, high, kMiB / 8}});
  RunControl control;
  const absl::Time begin = absl::Now();
  std::vector<EventRef> events = {device->Start(*calls[0], {}, &control)};
  for (int i = 0; i < 100; ++i) events.push_back(device->Start(*calls[1], {}, &control));
  ASSERT_TRUE(events.back()->Wait(Soon()).ok());
  const absl::Time end = absl::Now();
  for (const EventRef& event : events) {
    EXPECT_TRUE(event->Done());
    EXPECT_LE(event->begin_time(), event->end_time());
    // Device times agree with the host clock, as far as a busy machine allows.
    EXPECT_GT(event->begin_time(), begin - absl::Milliseconds(100));
    EXPECT_LT(event->end_time(), end + absl::Milliseconds(100));
  }
  EXPECT_EQ(control.progress.load(), 101);
  EXPECT_FALSE(device->waits_for_transfer());
  ASSERT_TRUE(device->CopyToHost(result.data(), low, kMiB / 2).ok());
  for (float value : result) ASSERT_EQ(value, 100.0f);
}

// Calls that may overlap the one before them need not wait for its end, but end after it. Others
// wait for both.
TEST(CudaDeviceTest, OverlappingCallsEndInOrder) {
  auto device = MakeDevice();
  auto buffer = *device->Allocate(kMiB);
  const PreparedCalls calls = Ready(*device, {ZeroCall{buffer->data(), kMiB}});
  RunControl control;
  const auto start = [&](std::vector<EventRef> events, bool beside) {
    StartAfter after(std::move(events));
    after.overlaps_previous = beside;
    return device->Start(*calls[0], std::move(after), &control);
  };
  const auto is_held = [](const EventRef& event) {
    return event->Wait(absl::Now() + absl::Milliseconds(50)).code() ==
           absl::StatusCode::kDeadlineExceeded;
  };
  Gate first(*CudaEventPool::ForDevice(0)), third(*CudaEventPool::ForDevice(0));
  std::vector<EventRef> events = {start({first.event()}, false), start({}, true)};
  events.push_back(start({third.event()}, true));
  events.push_back(start({}, true));
  events.push_back(start({}, false));
  EXPECT_TRUE(is_held(events[1])) << "began before the one before it";
  first.Open();
  ASSERT_TRUE(events[1]->Wait(Soon()).ok());
  EXPECT_TRUE(events[0]->Done());
  EXPECT_TRUE(is_held(events[3]));
  EXPECT_FALSE(events[4]->Done());
  third.Open();
  ASSERT_TRUE(events[4]->Wait(Soon()).ok());
  for (size_t i = 1; i < events.size(); ++i) {
    EXPECT_TRUE(events[i]->Done());
    EXPECT_GE(events[i]->end_time() + absl::Microseconds(50), events[i - 1]->end_time()) << i;
  }
  EXPECT_GE(events[4]->begin_time() + absl::Microseconds(50), events[3]->end_time());
}

TEST(CudaDeviceTest, WaitsForOtherStreamsAndReportsIt) {
  auto device = MakeDevice();
  auto buffer = *device->Allocate(64);
  PreparedCalls calls = Ready(*device, {ZeroCall{buffer->data(), 64}});
  RunControl control;
  Gate gate(*CudaEventPool::ForDevice(0));
  EventRef zeroed = device->Start(*calls[0], {gate.event()}, &control);
  EXPECT_EQ(zeroed->Wait(absl::Now() + absl::Milliseconds(50)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(device->waits_for_transfer());
  EXPECT_EQ(control.progress.load(), 0);
  gate.Open();
  ASSERT_TRUE(zeroed->Wait(Soon()).ok());
  EXPECT_GE(zeroed->begin_time(), gate.event()->end_time() - absl::Microseconds(50));
  EXPECT_FALSE(device->waits_for_transfer());
  EXPECT_EQ(control.progress.load(), 1);
}

TEST(CudaDeviceTest, PropagatesKnownFailure) {
  auto device = MakeDevice();
  const uint32_t seven = 7;
  auto buffer = *device->Allocate(4);
  ASSERT_TRUE(device->CopyFromHost(buffer->data(), &seven, 4).ok());
  PreparedCalls calls = Ready(*device, {ZeroCall{buffer->data(), 4}});
  RunControl control;
  auto failed = std::make_shared<CudaEvent>(*CudaEventPool::ForDevice(0), nullptr, 0);
  failed->Fail(absl::UnavailableError("the peer is gone"));
  EventRef first = device->Start(*calls[0], {failed}, &control);
  EventRef second = device->Start(*calls[0], {first}, &control);
  for (const EventRef& event : {first, second}) {
    EXPECT_EQ(event->Wait(Soon()), absl::UnavailableError("the peer is gone"));
  }
  uint32_t value = 0;
  ASSERT_TRUE(device->CopyToHost(&value, buffer->data(), 4).ok());
  EXPECT_EQ(value, 7u) << "the call did not run";
  EXPECT_EQ(control.progress.load(), 0);

  auto foreign = std::make_shared<HostEvent>();
  EXPECT_EQ(device->Start(*calls[0], {foreign}, &control)->Wait(Soon()).code(),
            absl::StatusCode::kInternal);
  EXPECT_TRUE(device->Start(*calls[0], {}, &control)->Wait(Soon()).ok());
  EXPECT_EQ(times_broken, 0);
}

AttentionProblem SmallProblem() {
  AttentionProblem problem;
  problem.dtype = DType::kFloat32;
  problem.head_dim = problem.head_dim_v = 32;
  problem.bands = {Band{}};
  return problem;
}

// A stop reaches kernels that are queued after a transfer, and only those of its own operation.
TEST(CudaDeviceTest, KernelsOfStoppedOperationDoNothing) {
  auto device = MakeDevice();
  constexpr int64_t kRows = 64, kBytes = kRows * 32 * 4;
  const AttentionProblem problem = SmallProblem();
  auto memory = *device->Allocate(2 * kBytes + kRows * 4);
  char* const base = static_cast<char*>(memory->data());
  ForwardCall call;
  call.problem = &problem;
  call.q_rows = kRows;
  call.q_pieces = {Piece{.length = kRows}};
  call.q = base;
  call.blocks = {{kRows, {Piece{.length = kRows}}, base, base}};
  call.out = base + kBytes;
  call.lse = reinterpret_cast<float*>(base + 2 * kBytes);
  call.initial = call.final = true;
  const std::vector<float> ones(kBytes / 4, 1.0f), marks(kBytes / 4, 7.0f);
  ASSERT_TRUE(device->CopyFromHost(base, ones.data(), kBytes).ok());
  const auto out = [&] {
    std::vector<float> values(kBytes / 4);
    EXPECT_TRUE(device->CopyToHost(values.data(), base + kBytes, kBytes).ok());
    return values;
  };
  PreparedCalls stopped_calls = Ready(*device, {call, call});
  PreparedCalls other_calls = Ready(*device, {call});
  for (const bool other : {false, true}) {
    ASSERT_TRUE(device->CopyFromHost(base + kBytes, marks.data(), kBytes).ok());
    RunControl stopped, running;
    Gate gate(*CudaEventPool::ForDevice(0));
    EventRef first = device->Start(*stopped_calls[0], {gate.event()}, &stopped);
    EventRef second = device->Start(*stopped_calls[1], {}, &stopped);
    EventRef third = other ? device->Start(*other_calls[0], {}, &running) : second;
    stopped.stop = true;
    const auto& workspace = static_cast<const PreparedCudaCall&>(*stopped_calls[0]).workspace();
    uint32_t word = 0;
    for (const absl::Time patience = Soon(); word == 0 && absl::Now() < patience;) {
      ASSERT_TRUE(device->CopyToHost(&word, workspace->stop_word(), 4).ok());
    }
    ASSERT_EQ(word, 1u);
    gate.Open();
    for (const EventRef& event : {first, second, third}) ASSERT_TRUE(event->Wait(Soon()).ok());
    EXPECT_EQ(out().front(), other ? 1.0f : 7.0f);
  }
}

// A stop ends seconds of queued work within milliseconds and leaves no trace.
TEST(CudaDeviceTest, StopEndsSecondsOfWorkAtOnce) {
  auto device = MakeDevice();
  constexpr int64_t kRows = 131072, kHeads = 32, kDim = 128;
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.num_heads = kHeads;
  problem.num_kv_heads = 8;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.softmax_scale = 0.1f;
  problem.bands = {Band{}};
  auto q = *device->Allocate(kRows * kHeads * kDim * 2);
  auto k = *device->Allocate(kRows * 8 * kDim * 2);
  auto out = *device->Allocate(kRows * kHeads * kDim * 2);
  auto lse = *device->Allocate(kRows * kHeads * 4);
  const Piece piece{.length = kRows};
  ForwardCall call;
  call.problem = &problem;
  call.q_rows = kRows;
  call.q_pieces = {piece};
  call.q = q->data();
  call.blocks = {{kRows, {piece}, k->data(), k->data()}};
  call.out = out->data();
  call.lse = static_cast<float*>(lse->data());
  call.initial = call.final = true;
  PreparedCalls calls =
      Ready(*device, {call, ZeroCall{q->data(), q->bytes()}, ZeroCall{k->data(), k->bytes()}});
  RunControl control;
  device->Start(*calls[1], {}, &control);
  ASSERT_TRUE(device->Start(*calls[2], {}, &control)->Wait(Soon()).ok());
  std::vector<EventRef> events;
  for (int i = 0; i < 8; ++i) events.push_back(device->Start(*calls[0], {}, &control));
  EXPECT_EQ(events.front()->Wait(absl::Now() + absl::Milliseconds(100)).code(),
            absl::StatusCode::kDeadlineExceeded)
      << "too little work to be stopped";
  const absl::Time stopped = absl::Now();
  control.stop = true;
  for (const EventRef& event : events) EXPECT_TRUE(event->Wait(Soon()).ok());
  EXPECT_LT(absl::Now() - stopped, absl::Seconds(1));
  std::printf("stopped after %.1f ms\n", absl::ToDoubleMilliseconds(absl::Now() - stopped));
  EXPECT_TRUE(device->Start(*calls[0], {}, &control)->Wait(absl::Now() + absl::Seconds(1)).ok())
      << "a stopped operation has no further effect";

  RunControl next;
  PreparedCalls again = Ready(*device, {call});
  EventRef whole = device->Start(*again[0], {}, &next);
  ASSERT_TRUE(whole->Wait(Soon()).ok());
  const double seconds = absl::ToDoubleSeconds(whole->end_time() - whole->begin_time());
  EXPECT_GT(seconds, 0.05) << "the next operation is not stopped";
  std::printf("forward, 128K x 128K, 32/8 heads, on zeros: %.0f TFLOP/s\n",
              4.0 * kRows * kRows * kDim * kHeads / seconds / 1e12);
}

TEST(CudaDeviceTest, WorkspaceIsPredictedExactly) {
  auto device = MakeDevice();
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.num_heads = 32;
  problem.num_kv_heads = 8;
  problem.head_dim = problem.head_dim_v = 128;
  problem.bands = {Band{}};
  const Piece queries{.length = 3}, keys{.length = 100000};
  ForwardCall call;  // few queries: the keys are split, and partial results need scratch
  call.problem = &problem;
  call.q_rows = 3;
  call.q_pieces = {queries};
  call.blocks = {{keys.length, {keys}}};
  call.initial = call.final = true;
  const auto predicted = device->WorkspaceBytes({call, call});
  ASSERT_TRUE(predicted.ok()) << predicted.status();
  EXPECT_GT(*predicted, 100000);
  const int64_t before = device->usage().allocated_bytes;
  PreparedCalls calls = Ready(*device, {call, call});
  EXPECT_EQ(device->usage().allocated_bytes - before, *predicted);
}

struct Problem {
  const char* name;
  DType dtype;
  int64_t batch, sq, sk, heads, kv_heads, dim, dim_v;
  bool causal;
  double softcap;
  int64_t window_left;
};

// Runs plan, schedule, executor and kernels on one GPU and compares the result with the oracle.
void ExpectOracle(const AttentionSpec& spec) {
  const oracle::InputTensors inputs =
      oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 5, /*with_dout=*/true);
  const oracle::Result expected = oracle::EvaluateAll(spec, inputs.view());
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
  TensorMap tensors = {{TensorId::kQ, inputs.q},
                       {TensorId::kK, inputs.k},
                       {TensorId::kV, inputs.v},
                       {TensorId::kDout, inputs.dout}};
  const auto add_ids = [&](TensorId id, const std::vector<int32_t>& ids) {
    const auto* first = reinterpret_cast<const uint8_t*>(ids.data());
    tensors[id] = std::vector<uint8_t>(first, first + ids.size() * sizeof(int32_t));
  };
  if (spec.options.bias.has_value()) tensors[TensorId::kBias] = inputs.bias;
  if (spec.options.mask.has_value()) tensors[TensorId::kMask] = inputs.mask;
  if (spec.options.segment_ids) {
    add_ids(TensorId::kQSegmentIds, inputs.q_segment_ids);
    add_ids(TensorId::kKvSegmentIds, inputs.kv_segment_ids);
  }
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Schedule schedule = MakeSchedule(
        spec, plan,
        RecipeOn(plan, ScheduleKind::kSingle, direction, direction == Direction::kBackward));
    const auto result = RunInProcess(spec, plan, schedule, tensors, [] { return MakeDevice(); });
    ASSERT_TRUE(result.ok()) << result.status();
    const auto find = [&](TensorId id) -> const void* {
      const auto found = result->outputs.find(id);
      return found == result->outputs.end() ? nullptr : found->second.data();
    };
    const oracle::Report report = oracle::Compare(
        spec, expected,
        {find(TensorId::kOut), static_cast<const float*>(find(TensorId::kLse)), find(TensorId::kDq),
         find(TensorId::kDk), find(TensorId::kDv), nullptr, find(TensorId::kDbias),
         static_cast<const float*>(find(TensorId::kProbabilities))});
    EXPECT_TRUE(report.passed()) << report.ToString();
    EXPECT_EQ(report.tensors.size(), OutputsOf(spec, direction).size());
  }
}

TEST(CudaExecutorTest, OneDeviceAgreesWithTheOracle) {
  const Problem problems[] = {
      {"bf16 causal gqa", DType::kBFloat16, 1, 300, 300, 8, 2, 128, 128, true, 0, -1},
      {"fp16 full batch", DType::kFloat16, 3, 130, 257, 4, 4, 64, 64, false, 0, -1},
      {"fp32 window", DType::kFloat32, 1, 200, 200, 2, 1, 40, 24, true, 0, 33},
      {"bf16 softcap dv", DType::kBFloat16, 1, 140, 300, 4, 2, 96, 160, true, 30.0, -1},
      {"fp16 d256", DType::kFloat16, 1, 129, 129, 2, 2, 256, 256, true, 0, -1},
      {"bf16 few queries", DType::kBFloat16, 1, 2, 3000, 8, 1, 128, 128, false, 0, -1},
  };
  for (const Problem& p : problems) {
    SCOPED_TRACE(p.name);
    AttentionSpec spec;
    spec.dtype = p.dtype;
    spec.shape.batch = p.batch;
    spec.shape.seq_len_q = p.sq;
    spec.shape.seq_len_kv = p.sk;
    spec.shape.num_heads = p.heads;
    spec.shape.num_kv_heads = p.kv_heads;
    spec.shape.head_dim = p.dim;
    spec.shape.head_dim_v = p.dim_v;
    spec.shape.cu_seqlens_q = {0, p.sq};
    spec.shape.cu_seqlens_k = {0, p.sk};
    spec.options.softmax_scale = 1.0 / std::sqrt(static_cast<double>(p.dim));
    spec.options.causal = p.causal;
    spec.options.softcap = p.softcap;
    spec.options.window_left = p.window_left;
    spec.probability_rows = {{p.batch - 1, p.sq - 1}, {0, 0}, {0, p.sq / 2}};
    ExpectOracle(spec);
    spec.options.deterministic = true;
    ExpectOracle(spec);
    spec.options.bias = BiasForm{.per_head = true, .gradient = true};
    spec.options.mask = MaskForm{.per_batch = true, .bits = true};
    spec.options.segment_ids = true;
    spec.options.alibi_slopes.assign(p.heads, 0.0625f);
    spec.options.dropout = {.threshold = 6554, .seed = 7};
    ExpectOracle(spec);
  }
  EXPECT_EQ(times_broken, 0);
}

// Last: the context does not survive this test.
TEST(CudaDeviceTestOfTheEnd, ABrokenContextIsReportedOnceAndNamesTheError) {
  auto device = MakeDevice();
  float* const nowhere = reinterpret_cast<float*>(uintptr_t{0x10000});
  PreparedCalls calls = Ready(*device, {AddCall{nowhere, nowhere, 1024}});
  RunControl control;
  EventRef broken = device->Start(*calls[0], {}, &control);
  const absl::Status status = broken->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaError"));
  EXPECT_FALSE(device->Start(*calls[0], {}, &control)->Wait(Soon()).ok());
  EXPECT_EQ(times_broken, 1);
}

}  // namespace
}  // namespace ringattn::worker
