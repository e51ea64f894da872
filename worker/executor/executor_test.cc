// The executor with a device that only sleeps and moves markers: ordering, overlap, cancellation
// and failure. The sweep (tests/) checks computed values.
#include "worker/executor/executor.h"
#include "worker/comm/communicator_wrapper.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/device/host_call.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {
namespace {

constexpr absl::Duration kCall = absl::Milliseconds(40);
constexpr absl::Duration kTransfer = absl::Milliseconds(30);

class Memory : public DeviceBuffer {
 public:
  explicit Memory(int64_t bytes) : data_(bytes) {}
  void* data() override { return data_.data(); }
  int64_t bytes() const override { return data_.size(); }

 private:
  std::vector<char> data_;
};

// Every call sleeps for kCall. A zero call instead fills its target with ones, so that the test can
// trace the data.
class SleepingDevice : public Device {
 public:
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    if (bytes > allocatable) return absl::ResourceExhaustedError("no memory");
    allocatable -= bytes;
    return std::make_unique<Memory>(bytes);
  }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    return PrepareHostCalls(
        std::move(calls), [](DType) { return KernelName{.family = "sleeping"}; },
        [this](const KernelCall& call, std::vector<EventRef> after, RunControl* control) {
          if (log != nullptr) log->push_back("call");
          return queue_.Start(
              [&call, control]() -> absl::Status {
                if (control->stop) return absl::OkStatus();
                absl::SleepFor(kCall);
                if (const auto* zero = std::get_if<ZeroCall>(&call)) {
                  std::memset(zero->target, 1, zero->bytes);
                }
                return absl::OkStatus();
              },
              std::move(after), HostQueue::OnFailure::kSkip);
        });
  }
  bool waits_for_transfer() const override { return queue_.waiting(); }
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override {
    std::memcpy(device, host, bytes);
    return absl::OkStatus();
  }
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override {
    std::memcpy(host, device, bytes);
    return absl::OkStatus();
  }
  std::string description() const override { return "sleeping"; }

  int64_t allocatable = 1 << 20;
  std::vector<std::string>* log = nullptr;  // names of the items in the order in which they start

 private:
  HostQueue queue_{"sleeping"};
};

// Two events in sequence, as one event.
class JoinedEvent : public Event {
 public:
  JoinedEvent(EventRef first, EventRef last) : first_(std::move(first)), last_(std::move(last)) {}
  bool Done() const override { return last_->Done(); }
  absl::Status Wait(absl::Time deadline) const override { return last_->Wait(deadline); }
  absl::Time begin_time() const override { return first_->begin_time(); }
  absl::Time end_time() const override { return last_->end_time(); }

 private:
  const EventRef first_, last_;
};

// Adds kTransfer to every group of another communicator.
class SlowCommunicator : public CommunicatorWrapper {
 public:
  explicit SlowCommunicator(std::unique_ptr<Communicator> inner)
      : CommunicatorWrapper(std::move(inner)) {}
  std::string transport(int peer) const override { return peer == rank() ? "itself" : "fast"; }
  bool takes_compute_units(int peer) const override { return takes_units && peer != rank(); }
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    if (log != nullptr) log->push_back("exchange");
    EventRef delay = queue_.Start(
        [this] {
          if (!aborted_) absl::SleepFor(kTransfer);
          return absl::OkStatus();
        },
        std::move(after), HostQueue::OnFailure::kRun);
    EventRef moved = CommunicatorWrapper::StartInLane(lane, std::move(group), {delay}, control);
    return std::make_shared<JoinedEvent>(std::move(delay), std::move(moved));
  }
  void Abort(const std::string& reason) override {
    aborted_ = true;
    CommunicatorWrapper::Abort(reason);
  }

  bool takes_units = true;
  std::vector<std::string>* log = nullptr;  // names of the items in the order in which they start

 private:
  std::atomic<bool> aborted_{false};
  HostQueue queue_{"slow"};
};

// Two ranks swap `steps` times. Each step receives into one of two buffers while a zero call marks
// the other one, which the next step sends.
Program SwapProgram(int rank, int steps) {
  Program program;
  program.rank = rank;
  program.buffers = {{"a", 8}, {"b", 8}};
  for (int step = 0; step < steps; ++step) {
    const BufferId mine = step % 2, theirs = 1 - mine;
    Step now;
    now.transfers = {{Transfer::Kind::kSend, 1 - rank, {mine, 0, 8}},
                     {Transfer::Kind::kReceive, 1 - rank, {theirs, 0, 8}}};
    // Only the transfer reads `mine`. The call uses a third buffer.
    ComputeCall call;
    call.op = ComputeCall::Op::kZero;
    call.target = {2, 0, 8};
    now.calls.push_back(call);
    program.steps.push_back(now);
  }
  program.buffers.push_back({"work", 8});
  return program;
}

AttentionSpec TinySpec() {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 2;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 2};
  return spec;
}

struct Pair {
  SleepingDevice devices[2];
  std::unique_ptr<Operation> operations[2];
  std::unique_ptr<Communicator> ring[2];
  absl::StatusOr<ExecutionReport> reports[2] = {absl::UnknownError(""), absl::UnknownError("")};

  explicit Pair(int steps) {
    auto plain = MakeInProcessRing(2);
    for (int rank : {0, 1}) {
      ring[rank] = std::make_unique<SlowCommunicator>(std::move(plain[rank]));
      operations[rank] =
          *Operation::Create(TinySpec(), MakeShardPlan(TinySpec(), Layout::kContiguous, 2),
                             SwapProgram(rank, steps), {0, 1}, &devices[rank]);
    }
  }
  void Run() {
    std::thread other([this] { RunRank(1); });
    RunRank(0);
    other.join();
  }
  void RunRank(int rank) {
    reports[rank] = Execute(*operations[rank], devices[rank], ring[rank].get(),
                            {.with_timeline = true}, nullptr);
  }
};

TEST(Executor, TransfersOverlapIndependentCalls) {
  constexpr int kSteps = 6;
  Pair pair(kSteps);
  pair.Run();
  for (int rank : {0, 1}) {
    ASSERT_TRUE(pair.reports[rank].ok()) << pair.reports[rank].status();
    const ExecutionReport& report = *pair.reports[rank];
    EXPECT_GE(report.compute_time, kSteps * kCall);
    // Without overlap nothing would be hidden.
    EXPECT_GT(report.hidden_exchange_time, kSteps * kTransfer / 2);
    EXPECT_EQ(report.sent_bytes, kSteps * 8);
    EXPECT_EQ(report.sent_by_transport, (std::map<std::string, int64_t>{{"fast", kSteps * 8}}));
    int calls = 0, exchanges = 0;
    for (const TimelineBar& bar : report.timeline) {
      calls += bar.kind == TimelineBar::Kind::kCompute;
      exchanges += bar.kind == TimelineBar::Kind::kExchange;
    }
    EXPECT_EQ(calls, kSteps);
    EXPECT_EQ(exchanges, kSteps);
  }
}

absl::Duration Overlap(const TimelineBar& a, const TimelineBar& b) {
  return std::max(absl::ZeroDuration(), std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

TEST(Executor, ReportsHiddenExchangeTime) {
  constexpr int kSteps = 4;
  Pair pair(kSteps);
  pair.Run();
  for (int rank : {0, 1}) {
    ASSERT_TRUE(pair.reports[rank].ok()) << pair.reports[rank].status();
    const ExecutionReport& report = *pair.reports[rank];
    absl::Duration exchange, hidden;
    for (const TimelineBar& bar : report.timeline) {
      if (bar.kind != TimelineBar::Kind::kExchange) continue;
      exchange += bar.end - bar.begin;
      for (const TimelineBar& other : report.timeline) {
        if (other.kind == TimelineBar::Kind::kCompute) hidden += Overlap(bar, other);
      }
    }
    EXPECT_EQ(report.exchange_time, exchange);
    EXPECT_EQ(report.hidden_exchange_time, hidden);
    EXPECT_GE(report.exchange_time, kSteps * kTransfer);
    EXPECT_GT(report.hidden_exchange_time, kTransfer);
    EXPECT_LE(report.hidden_exchange_time, report.exchange_time);
  }
}

// Returns what rank 0 starts, in order, in a step of two calls, the first of which writes `target`.
std::vector<std::string> StartedInAStep(bool takes_units, BufferId target) {
  SleepingDevice devices[2];
  auto plain = MakeInProcessRing(2);
  std::vector<std::string> log;
  std::vector<std::thread> ranks;
  for (int rank : {0, 1}) {
    ranks.emplace_back([&, rank] {
      SlowCommunicator ring(std::move(plain[rank]));
      Program program = SwapProgram(rank, 1);
      program.steps[0].calls.push_back(program.steps[0].calls[0]);
      program.steps[0].calls[0].target.buffer = target;
      ring.takes_units = takes_units;
      if (rank == 0) devices[rank].log = ring.log = &log;
      auto operation =
          *Operation::Create(TinySpec(), MakeShardPlan(TinySpec(), Layout::kContiguous, 2),
                             std::move(program), {0, 1}, &devices[rank]);
      EXPECT_TRUE(Execute(*operation, devices[rank], &ring, {}, nullptr).ok());
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return log;
}

TEST(Executor, CallStartsBeforeExchangeWithoutComputeUnits) {
  constexpr BufferId kSent = 0, kReceived = 1, kWork = 2;
  using ::testing::ElementsAre;
  EXPECT_THAT(StartedInAStep(false, kWork), ElementsAre("call", "exchange", "call"));
  EXPECT_THAT(StartedInAStep(true, kWork), ElementsAre("exchange", "call", "call"));
  // Conflicting items keep the program's order.
  EXPECT_THAT(StartedInAStep(false, kSent), ElementsAre("exchange", "call", "call"));
  EXPECT_THAT(StartedInAStep(false, kReceived), ElementsAre("exchange", "call", "call"));
}

TEST(Executor, StopEndsCallsButNotExchanges) {
  constexpr int kSteps = 50;
  Pair pair(kSteps);
  // Only rank 0 is stopped. Rank 1 must still complete its exchanges.
  pair.operations[0]->control().stop = true;
  const absl::Time begin = absl::Now();
  std::thread other([&] { pair.RunRank(1); });
  pair.RunRank(0);
  EXPECT_EQ(pair.reports[0].status().code(), absl::StatusCode::kCancelled);
  pair.operations[1]->control().stop = true;
  other.join();
  EXPECT_EQ(pair.reports[1].status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(absl::Now() - begin, kSteps * (kCall + kTransfer));
  // The ring is intact, so the next operation runs.
  for (int rank : {0, 1}) {
    pair.operations[rank] =
        *Operation::Create(TinySpec(), MakeShardPlan(TinySpec(), Layout::kContiguous, 2),
                           SwapProgram(rank, 3), {0, 1}, &pair.devices[rank]);
  }
  pair.Run();
  EXPECT_TRUE(pair.reports[0].ok());
  EXPECT_TRUE(pair.reports[1].ok());
}

TEST(Executor, AbortFailsBothRanksWithReason) {
  Pair pair(200);
  std::thread killer([&] {
    absl::SleepFor(3 * kCall);
    for (auto& communicator : pair.ring) communicator->Abort("rank 1 was lost");
  });
  const absl::Time begin = absl::Now();
  pair.Run();
  killer.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  for (int rank : {0, 1}) {
    EXPECT_EQ(pair.reports[rank].status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(pair.reports[rank].status().message(), testing::HasSubstr("rank 1 was lost"));
  }
}

// Ranks 0 and 1 are on one host, rank 2 is on another one. Counts rank 0's groups.
class CountingRing : public CommunicatorWrapper {
 public:
  explicit CountingRing(std::unique_ptr<Communicator> inner)
      : CommunicatorWrapper(std::move(inner)) {}
  bool has_lanes() const override { return lanes; }
  bool takes_compute_units(int peer) const override { return peer == 2; }
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    ++groups[IndexOf(lane)];
    if (log != nullptr) log->push_back(lane == Lane::kInside ? "inside" : "between");
    return CommunicatorWrapper::StartInLane(lane, std::move(group), std::move(after), control);
  }

  bool lanes = true;
  std::atomic<int> groups[kLanes] = {};
  std::vector<std::string>* log = nullptr;
};

constexpr BufferId kOuter = 3;

// Runs rank 0's program of `steps` swaps with rank 1 and one transfer with rank 2, for which rank 2
// waits until the test lets it.
struct TwoHosts {
  SleepingDevice devices[2];
  std::unique_ptr<CountingRing> ring[3];
  std::unique_ptr<Operation> operations[2];
  absl::StatusOr<ExecutionReport> report = absl::UnknownError("");
  RunControl far_control;  // rank 2's
  char far_data[8] = {7, 7, 7, 7, 7, 7, 7, 7};

  TwoHosts(int steps, const std::function<void(Program&)>& change) {
    auto plain = MakeInProcessRing(3);
    for (int rank = 0; rank < 3; ++rank) {
      ring[rank] = std::make_unique<CountingRing>(std::move(plain[rank]));
    }
    for (int rank : {0, 1}) {
      Program program = SwapProgram(rank, steps);
      program.buffers.push_back({"outer", 8});
      if (rank == 0) change(program);
      AssignLanes({0, 0, 1}, program);
      operations[rank] =
          *Operation::Create(TinySpec(), MakeShardPlan(TinySpec(), Layout::kContiguous, 3),
                             std::move(program), {0, 1, 2}, &devices[rank]);
    }
  }
  void Run(const std::function<void()>& meanwhile) {
    std::thread near([this] {
      EXPECT_TRUE(Execute(*operations[1], devices[1], ring[1].get(), {}, nullptr).ok());
    });
    std::thread self([this] {
      report = Execute(*operations[0], devices[0], ring[0].get(), {.with_timeline = true}, nullptr);
    });
    meanwhile();
    self.join();
    near.join();
  }
  EventRef StartFar(PeerTransfer::Kind kind) {
    return ring[2]->StartInLane(Lane::kBetween, {{kind, 0, far_data, 8}}, {}, &far_control);
  }
  // Returns true once rank 0 has finished so many calls; false after ten seconds.
  bool Computes(int64_t calls) {
    const absl::Time end = absl::Now() + absl::Seconds(10);
    while (operations[0]->control().calls_done.load() < calls) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }
  // Returns the bars of rank 0 whose names end so.
  std::vector<TimelineBar> Bars(const std::string& end) const {
    std::vector<TimelineBar> bars;
    for (const TimelineBar& bar : report->timeline) {
      if (absl::EndsWith(bar.name, end)) bars.push_back(bar);
    }
    return bars;
  }
};

// A transfer between hosts takes many steps. Later exchanges inside the host and calls proceed,
// more than steps_ahead of them, and only the call that reads what it brings waits.
TEST(Executor, SlowTransferBetweenHostsHoldsUpOnlyItsReader) {
  constexpr int kSteps = 12;
  TwoHosts hosts(kSteps, [](Program& program) {
    program.steps[0].transfers.push_back({Transfer::Kind::kReceive, 2, {kOuter, 0, 8}});
    program.steps[kSteps - 1].calls[0].target = {kOuter, 0, 8};
  });
  hosts.Run([&] {
    EXPECT_TRUE(hosts.Computes(kSteps - 5)) << "rank 0 waits for the other host";
    EXPECT_TRUE(hosts.StartFar(PeerTransfer::Kind::kSend)->Wait(absl::InfiniteFuture()).ok());
  });
  ASSERT_TRUE(hosts.report.ok()) << hosts.report.status();
  EXPECT_EQ(hosts.ring[0]->groups[IndexOf(Lane::kInside)], kSteps);
  EXPECT_EQ(hosts.ring[0]->groups[IndexOf(Lane::kBetween)], 1);
  const std::vector<TimelineBar> between = hosts.Bars("exchange between hosts");
  const std::vector<TimelineBar> inside = hosts.Bars(" exchange");
  const std::vector<TimelineBar> calls = hosts.Bars(" zero");
  ASSERT_EQ(between.size(), 1u);
  ASSERT_EQ(inside.size(), static_cast<size_t>(kSteps));
  ASSERT_EQ(calls.size(), static_cast<size_t>(kSteps));
  EXPECT_LT(inside[kSteps - 5].end, between[0].end);
  EXPECT_LT(calls[kSteps - 6].end, between[0].end);
  EXPECT_GE(calls[kSteps - 1].begin, between[0].end) << "the reader starts too early";
}

TEST(Executor, LaneInsideWaitsForBytesThatOtherLaneStillSends) {
  constexpr int kSteps = 4;
  TwoHosts hosts(kSteps, [](Program& program) {
    // What step 0 sends to the other host, step 1 overwrites with what rank 1 sends.
    program.steps[0].transfers.push_back({Transfer::Kind::kSend, 2, {0, 0, 8}});
  });
  hosts.Run([&] {
    absl::SleepFor(3 * kCall);
    EXPECT_TRUE(hosts.StartFar(PeerTransfer::Kind::kReceive)->Wait(absl::InfiniteFuture()).ok());
  });
  ASSERT_TRUE(hosts.report.ok()) << hosts.report.status();
  const std::vector<TimelineBar> between = hosts.Bars("exchange between hosts");
  const std::vector<TimelineBar> inside = hosts.Bars(" exchange");
  ASSERT_EQ(between.size(), 1u);
  ASSERT_EQ(inside.size(), static_cast<size_t>(kSteps));
  EXPECT_LT(inside[0].end, between[0].end);
  EXPECT_GE(inside[1].begin, between[0].end);
}

TEST(Executor, EachLaneDecidesWhetherFirstCallPrecedesIt) {
  std::vector<std::string> log;
  TwoHosts hosts(1, [](Program& program) {
    program.steps[0].transfers.insert(program.steps[0].transfers.begin(),
                                      {Transfer::Kind::kReceive, 2, {kOuter, 0, 8}});
    program.steps[0].calls.push_back(program.steps[0].calls[0]);
  });
  hosts.devices[0].log = hosts.ring[0]->log = &log;
  hosts.Run([&] { hosts.StartFar(PeerTransfer::Kind::kSend); });
  ASSERT_TRUE(hosts.report.ok()) << hosts.report.status();
  // Transfers with rank 2 use compute units, those with rank 1 do not.
  EXPECT_THAT(log, ::testing::ElementsAre("between", "call", "inside", "call"));
}

// A call that begins in step 0 waits for keys that step 1 brings. Meanwhile this thread enqueues as
// many steps after those as usual.
TEST(Executor, CallWithKeysOfLaterStepsHoldsUpNoExchange) {
  constexpr int kSteps = 8;
  TwoHosts hosts(kSteps, [](Program& program) {
    ComputeCall call;
    call.op = ComputeCall::Op::kForward;
    call.initial = call.final = true;
    KvOperand keys;
    keys.k = {kOuter, 0, 4};
    keys.v = {kOuter, 4, 4};
    keys.late = 2;
    call.kv = {keys};
    program.steps[0].calls = {call};
    program.steps[1].calls.clear();
    program.steps[1].transfers.push_back({Transfer::Kind::kReceive, 2, {kOuter, 0, 8}});
  });
  hosts.Run([&] {
    // Three steps ahead of step 2, the last that the call concerns.
    const absl::Time end = absl::Now() + absl::Seconds(10);
    while (hosts.ring[0]->groups[IndexOf(Lane::kInside)] < 6 && absl::Now() < end) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    EXPECT_GE(hosts.ring[0]->groups[IndexOf(Lane::kInside)], 6);
    EXPECT_EQ(hosts.operations[0]->control().calls_done.load(), 0);
    EXPECT_TRUE(hosts.StartFar(PeerTransfer::Kind::kSend)->Wait(absl::InfiniteFuture()).ok());
  });
  ASSERT_TRUE(hosts.report.ok()) << hosts.report.status();
  EXPECT_EQ(hosts.ring[0]->groups[IndexOf(Lane::kInside)], kSteps);
  EXPECT_EQ(hosts.ring[0]->groups[IndexOf(Lane::kBetween)], 1);
}

TEST(Executor, StepIsOneGroupWithoutLanes) {
  TwoHosts hosts(2, [](Program& program) {
    program.steps[0].transfers.push_back({Transfer::Kind::kReceive, 2, {kOuter, 0, 8}});
  });
  hosts.ring[0]->lanes = false;
  hosts.Run([&] { hosts.StartFar(PeerTransfer::Kind::kSend); });
  ASSERT_TRUE(hosts.report.ok()) << hosts.report.status();
  EXPECT_EQ(hosts.ring[0]->groups[IndexOf(Lane::kInside)], 2);
  EXPECT_EQ(hosts.ring[0]->groups[IndexOf(Lane::kBetween)], 0);
}

TEST(Operation, FailedAllocationNamesTheBuffer) {
  SleepingDevice device;
  device.allocatable = 20;
  auto operation = Operation::Create(TinySpec(), MakeShardPlan(TinySpec(), Layout::kContiguous, 2),
                                     SwapProgram(0, 1), {0, 1}, &device);
  EXPECT_EQ(operation.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(operation.status().message(), testing::HasSubstr("work"));
}

}  // namespace
}  // namespace ringattn::worker
