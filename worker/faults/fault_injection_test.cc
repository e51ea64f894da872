#include "worker/faults/fault_injection.h"

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/tcp/tcp_ring_transport.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(10); }

std::shared_ptr<FaultState> StateOf(const std::string& text) {
  auto plan = ParseFaultPlan(text);
  EXPECT_TRUE(plan.ok()) << plan.status();
  auto state = std::make_shared<FaultState>();
  state->plan = *plan;
  return state;
}

// A ring of one over the faulty transport. Its groups are empty, but they count once an operation
// is prepared.
std::unique_ptr<Communicator> RingOfOne(RingTransport& transport) {
  auto blob = transport.Prepare(1, 0, 1);
  return *transport.Connect(1, {*blob}, Soon());
}

void PrepareAnOperation(std::shared_ptr<FaultState> state) {
  EXPECT_TRUE(
      MakeFaultyDevice(std::make_unique<ScalarDevice>(), std::move(state))->Prepare({}).ok());
}

TEST(FaultInjection, ParsesFaultsAndRejectsOthers) {
  EXPECT_EQ(ParseFaultPlan("stall_step:0")->stall_step, 0);
  EXPECT_EQ(ParseFaultPlan("skip_send:12")->skip_send, 12);
  EXPECT_EQ(ParseFaultPlan("fail_send:3")->fail_send, 3);
  EXPECT_EQ(ParseFaultPlan("stop_reading:0")->stop_reading, 0);
  EXPECT_EQ(ParseFaultPlan("stop_sending:7")->stop_sending, 7);
  EXPECT_EQ(ParseFaultPlan("slow_step_ms:5")->slow_step_ms, 5);
  for (const char* bad :
       {"", "stall_step", "stall_step:", "stall_step:-1", "stall_step:x", "slow_step_ms:0",
        "workspace:0", "stop_reading", "stop_sending:-1", "boom:1", ":1", "skip_send:1:2"}) {
    EXPECT_EQ(ParseFaultPlan(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(FaultInjection, SkippedGroupEndsWithRing) {
  auto state = StateOf("skip_send:1");
  auto transport =
      MakeFaultyTransport(std::make_unique<TcpRingTransport>(TcpTransportOptions{}), state);
  auto ring = RingOfOne(*transport);
  RunControl control;
  // Groups do not count while the ring forms.
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(ring->Start({}, {}, &control)->Wait(Soon()).ok());
  PrepareAnOperation(state);
  EXPECT_TRUE(ring->Start({}, {}, &control)->Wait(Soon()).ok());
  EventRef skipped = ring->Start({}, {}, &control);
  EXPECT_TRUE(ring->Start({}, {}, &control)->Wait(Soon()).ok());
  EXPECT_FALSE(skipped->Done());
  ring->Abort("enough");
  EXPECT_EQ(skipped->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST(FaultInjection, FailedGroupEndsRing) {
  auto state = StateOf("fail_send:1");
  auto transport =
      MakeFaultyTransport(std::make_unique<TcpRingTransport>(TcpTransportOptions{}), state);
  auto ring = RingOfOne(*transport);
  PrepareAnOperation(state);
  RunControl control;
  EXPECT_TRUE(ring->Start({}, {}, &control)->Wait(Soon()).ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ring->Start({}, {}, &control)->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  }
  // The next ring works.
  ring = RingOfOne(*transport);
  PrepareAnOperation(state);
  EXPECT_TRUE(ring->Start({}, {}, &control)->Wait(Soon()).ok());
}

TEST(FaultInjection, OneCallStallsUntilRingEnds) {
  auto state = StateOf("stall_step:0");
  auto transport =
      MakeFaultyTransport(std::make_unique<TcpRingTransport>(TcpTransportOptions{}), state);
  auto device = MakeFaultyDevice(std::make_unique<ScalarDevice>(), state);
  auto ring = RingOfOne(*transport);
  RunControl control;
  char byte = 1;
  const PreparedCalls calls = *device->Prepare({ZeroCall{&byte, 1}});
  const PreparedCall& zero = *calls.front();
  PrepareAnOperation(state);
  EXPECT_TRUE(device->Start(zero, {}, &control)->Wait(Soon()).ok());
  ring->Start({}, {}, &control);
  EventRef stalled = device->Start(zero, {}, &control);
  control.stop = true;
  EXPECT_EQ(stalled->Wait(absl::Now() + absl::Milliseconds(100)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(device->waits_for_transfer()) << "from outside it appears to compute";
  ring->Abort("enough");
  EXPECT_TRUE(stalled->Wait(Soon()).ok());
  EXPECT_TRUE(device->Start(zero, {}, &control)->Wait(Soon()).ok());
}

TEST(FaultInjection, OneChunkIsNotReadUntilRingEnds) {
  auto state = StateOf("stop_reading:1");
  auto transport =
      MakeFaultyTransport(std::make_unique<TcpRingTransport>(TcpTransportOptions{}), state);
  auto device = MakeFaultyDevice(std::make_unique<ScalarDevice>(), state);
  auto ring = RingOfOne(*transport);
  char target = 0;
  const auto take = [&] { return device->BeginUpload({{&target, 1}}).status(); };
  EXPECT_TRUE(take().ok());
  std::atomic<bool> taken{false};
  std::thread reader([&] {
    EXPECT_TRUE(take().ok());
    taken = true;
  });
  while (state->chunks_read < 2) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(take().ok()) << "another stream's";
  EXPECT_FALSE(taken);
  ring->Abort("enough");
  reader.join();
  ring = RingOfOne(*transport);
  EXPECT_TRUE(take().ok());
}

TEST(FaultInjection, DownloadWithWithheldOutputsIsNotFinished) {
  auto device = MakeFaultyDevice(std::make_unique<ScalarDevice>(), StateOf("stop_sending:1"));
  const char outputs[] = "12";
  for (bool stops : {true, false}) {
    const std::unique_ptr<Download> download =
        device->BeginDownload({{const_cast<char*>(outputs), 2}}, [] {});
    EXPECT_TRUE((*download->Next(1)).has_value());
    EXPECT_FALSE(download->finished());
    EXPECT_EQ((*download->Next(1)).has_value(), !stops);
    EXPECT_EQ(download->finished(), !stops);
    EXPECT_FALSE((*download->Next(1)).has_value());
  }
}

TEST(FaultInjection, AddsWorkspaceToDevices) {
  auto inner = std::make_unique<ScalarDevice>();
  inner->SetStaged(absl::ZeroDuration(), 20);
  EXPECT_EQ(*MakeFaultyDevice(std::move(inner), StateOf("workspace:300"))->WorkspaceBytes({}), 320);
}

TEST(FaultInjection, SlowCallMakesProgress) {
  auto device = MakeFaultyDevice(std::make_unique<ScalarDevice>(), StateOf("slow_step_ms:80"));
  RunControl control;
  char byte = 1;
  const PreparedCalls calls = *device->Prepare({ZeroCall{&byte, 1}});
  const PreparedCall& zero = *calls.front();
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(device->Start(zero, {}, &control)->Wait(Soon()).ok());
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(80));
  EXPECT_GT(control.progress.load(), 3);
  EXPECT_EQ(byte, 0);
}

}  // namespace
}  // namespace ringattn::worker
