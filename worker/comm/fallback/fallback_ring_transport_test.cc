// The choice between transports. The contract (worker/comm/contract) covers the rings themselves.
#include "worker/comm/fallback/fallback_ring_transport.h"

#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/host_ranks.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/inproc/inproc_ring_transport.h"

namespace ringattn::worker {

// In-process rings that report which transport formed them.
std::vector<RingUnderTest> RingsUnderTest() {
  const auto with = [](const std::string& name, bool suits) {
    RingUnderTest ring;
    ring.name = name;
    ring.has_step_timeout = false;
    ring.sends_to_itself = true;
    ring.make_ranks = [suits](const TestRankOptions& options) {
      auto primaries = MakeInProcessTransports(options.world_size);
      auto fallbacks = MakeInProcessTransports(options.world_size);
      FallbackRingTransport::Hooks hooks;
      hooks.primary_suits = [suits](const std::vector<std::string>&) {
        return suits ? absl::OkStatus() : absl::FailedPreconditionError("it does not suit");
      };
      return MakeHostRanks(options, [&](int rank) {
        return std::make_unique<FallbackRingTransport>(std::move(primaries[rank]),
                                                       std::move(fallbacks[rank]), hooks);
      });
    };
    return ring;
  };
  return {with("primary", true), with("fallback", false)};
}

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FakeCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string transport(int) const override { return "fake"; }
  bool takes_compute_units(int) const override { return true; }
  EventRef Start(std::vector<PeerTransfer>, std::vector<EventRef>, RunControl*) override {
    return nullptr;
  }
  void Abort(const std::string&) override {}
};

struct Record {
  absl::Status prepare, connect;
  std::vector<std::string> blobs;  // of the last Connect
  int connects = 0, cancels = 0;
};

class FakeTransport : public RingTransport {
 public:
  FakeTransport(std::string name, Record* record) : name_(std::move(name)), record_(record) {}
  absl::StatusOr<std::string> Prepare(uint64_t, int rank, int) override {
    if (!record_->prepare.ok()) return record_->prepare;
    return name_ + std::to_string(rank);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time) override {
    record_->blobs = blobs;
    ++record_->connects;
    if (!record_->connect.ok()) return record_->connect;
    return std::make_unique<FakeCommunicator>();
  }
  void Cancel() override { ++record_->cancels; }

 private:
  const std::string name_;
  Record* const record_;
};

class FallbackRingTransportTest : public ::testing::Test {
 protected:
  std::unique_ptr<FallbackRingTransport> Make() {
    FallbackRingTransport::Hooks hooks;
    hooks.primary_suits = [](const std::vector<std::string>& blobs) {
      for (const std::string& blob : blobs) {
        if (blob.empty()) return absl::FailedPreconditionError("somebody cannot");
      }
      return absl::OkStatus();
    };
    hooks.on_choice = [this](bool primary, const absl::Status&) {
      choices_ += primary ? '1' : '2';
    };
    return std::make_unique<FallbackRingTransport>(
        std::make_unique<FakeTransport>("a:,", &primary_),
        std::make_unique<FakeTransport>("b:,", &fallback_), std::move(hooks));
  }

  Record primary_, fallback_;
  std::string choices_;
};

TEST_F(FallbackRingTransportTest, UsesPrimaryIfAllRanksCan) {
  auto transport = Make();
  const std::string blob0 = *transport->Prepare(1, 0, 2), blob1 = *transport->Prepare(1, 1, 2);
  EXPECT_TRUE(transport->Connect(1, {blob0, blob1}, absl::InfiniteFuture()).ok());
  EXPECT_THAT(primary_.blobs, ElementsAre("a:,0", "a:,1"));
  EXPECT_EQ(fallback_.connects, 0);
  EXPECT_EQ(fallback_.cancels, 1);
  EXPECT_EQ(choices_, "1");
}

TEST_F(FallbackRingTransportTest, UsesFallbackIfOneRankCannot) {
  auto transport = Make();
  const std::string blob0 = *transport->Prepare(1, 0, 2);
  primary_.prepare = absl::FailedPreconditionError("no");
  const std::string blob1 = *transport->Prepare(1, 1, 2);
  EXPECT_TRUE(transport->Connect(1, {blob0, blob1}, absl::InfiniteFuture()).ok());
  EXPECT_THAT(fallback_.blobs, ElementsAre("b:,0", "b:,1"));
  EXPECT_EQ(primary_.connects, 0);
  EXPECT_EQ(choices_, "2");
}

// Machines with one worker and machines with several, in one ring.
TEST_F(FallbackRingTransportTest, RankWithoutPrimaryJoinsOthers) {
  auto with = Make();
  FallbackRingTransport::Hooks hooks;
  hooks.primary_suits = [](const std::vector<std::string>& blobs) {
    return blobs[1].empty() ? absl::FailedPreconditionError("rank 1 cannot") : absl::OkStatus();
  };
  FallbackRingTransport without(nullptr, std::make_unique<FakeTransport>("b:,", &fallback_),
                                std::move(hooks));
  const std::string blob0 = *with->Prepare(1, 0, 2), blob1 = *without.Prepare(1, 1, 2);
  EXPECT_TRUE(with->Connect(1, {blob0, blob1}, absl::InfiniteFuture()).ok());
  EXPECT_TRUE(without.Connect(1, {blob0, blob1}, absl::InfiniteFuture()).ok());
  EXPECT_THAT(fallback_.blobs, ElementsAre("b:,0", "b:,1"));
  EXPECT_EQ(fallback_.connects, 2);
  without.Cancel();
  // A blob that this rank did not produce.
  EXPECT_EQ(without.Connect(1, {blob0, blob0}, absl::InfiniteFuture()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(FallbackRingTransportTest, ReportsMissingTransport) {
  auto transport = Make();
  const std::string blob0 = *transport->Prepare(1, 0, 2);
  primary_.prepare = absl::FailedPreconditionError("no");
  fallback_.prepare = absl::FailedPreconditionError("no library");
  const absl::Status neither = transport->Prepare(1, 1, 2).status();
  EXPECT_THAT(std::string(neither.message()), HasSubstr("no library"));
  primary_.prepare = absl::OkStatus();
  const std::string only_primary = *transport->Prepare(1, 1, 2);
  primary_.prepare = absl::FailedPreconditionError("no");
  fallback_.prepare = absl::OkStatus();
  const std::string only_fallback = *transport->Prepare(1, 0, 2);
  const absl::Status none =
      transport->Connect(1, {only_fallback, only_primary}, absl::InfiniteFuture()).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.message()), HasSubstr("rank 1 has no other transport"));
}

TEST_F(FallbackRingTransportTest, DisablesPrimaryAfterRepeatedFailures) {
  auto transport = Make();
  const auto form = [&] {
    const std::string blob = *transport->Prepare(1, 0, 1);
    return transport->Connect(1, {blob}, absl::InfiniteFuture()).status();
  };
  // The death of a peer does not disable the primary.
  primary_.connect = absl::UnavailableError("peer");
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(form().ok());
  primary_.connect = absl::FailedPreconditionError("cannot map");
  for (int i = 1; i < FallbackRingTransport::kGiveUpAfter; ++i) EXPECT_FALSE(form().ok());
  primary_.connect = absl::OkStatus();
  EXPECT_TRUE(form().ok());
  primary_.connect = absl::FailedPreconditionError("cannot map");
  for (int i = 0; i < FallbackRingTransport::kGiveUpAfter; ++i) EXPECT_FALSE(form().ok());
  EXPECT_EQ(fallback_.connects, 0);
  EXPECT_TRUE(form().ok());
  EXPECT_EQ(fallback_.connects, 1);
}

TEST_F(FallbackRingTransportTest, RejectsMalformedBlobs) {
  auto transport = Make();
  for (const char* blob : {"", "3", "1,2", "1:2,", "1,1:a", "1,1:abc", "-1,2:a", "x,y:ab"}) {
    EXPECT_EQ(transport->Connect(1, {blob}, absl::InfiniteFuture()).status().code(),
              absl::StatusCode::kInvalidArgument)
        << blob;
  }
}

}  // namespace
}  // namespace ringattn::worker
