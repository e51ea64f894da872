#include "server/core/requests/regions.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr char kId[] = "0123456789abcdef";

// Two workers with host memory (connections 1 and 2), of which the first also takes CUDA memory,
// and one worker without (3).
class RegionsTest : public testing::Test {
 protected:
  RegionsTest() {
    batch_.Begin(now_);
    for (ConnectionId connection : {1, 2, 3}) {
      v1::Register registration;
      registration.set_name(std::string(1, static_cast<char>('a' + connection - 1)));
      if (connection < 3) registration.set_local_socket("/run/" + registration.name());
      if (connection < 3) registration.set_client_data_address(registration.name() + ":2");
      registration.set_takes_cuda_memory(connection == 1);
      roster_.Add(connection, registration, now_);
    }
  }

  AttachCompleted Attach(bool is_new = true, const std::string& principal = "me",
                         int64_t bytes = 1000, v1::RegionKind kind = v1::REGION_KIND_HOST) {
    AttachRequested event;
    event.kind = kind;
    event.call = 7;
    event.principal = event.client = principal;
    event.bytes = bytes;
    event.region_id = id_;
    event.is_new = is_new;
    event.tokens = {"token-1", "token-2", "token-3"};
    regions_.OnAttach(event);
    expected_.clear();
    AttachCompleted completed;
    for (Action& action : batch_.Take()) {
      if (auto* sent = std::get_if<SendToWorker>(&action)) {
        if (sent->message.has_forget_region()) {
          forgotten_[sent->connection] = sent->message.forget_region().region_id();
        } else {
          expected_[sent->connection] = sent->message.expect_region();
        }
      } else {
        completed = std::get<AttachCompleted>(action);
      }
    }
    return completed;
  }

  void Say(ConnectionId connection, bool attached) {
    v1::RegionChanged changed;
    changed.set_region_id(kId);
    changed.set_attached(attached);
    regions_.OnChanged(connection, changed);
  }

  void Wait(absl::Duration duration) {
    now_ += duration;
    batch_.Begin(now_);
    regions_.Sweep();
  }

  static TransportChoice QAt(int64_t offset, int64_t bytes = 100) {
    TransportChoice choice;
    choice.accept = {TransportKind::kHostMemory};
    choice.places = {{TensorId::kQ, kId, offset, bytes}};
    return choice;
  }

  absl::Time now_ = absl::UnixEpoch();
  CoordinatorConfig config_;
  ActionBatch batch_;
  Roster roster_;
  Regions regions_{&config_, &batch_, &roster_};
  int64_t spans_ = 2;     // of the plan
  std::string id_ = kId;  // of Attach
  std::map<ConnectionId, v1::ExpectRegion> expected_;
  std::map<ConnectionId, std::string> forgotten_;
};

TEST_F(RegionsTest, EachWorkerWithLocalMemoryGetsItsOwnToken) {
  const AttachCompleted completed = Attach();
  EXPECT_EQ(completed.call, 7u);
  ASSERT_FALSE(completed.failure.has_value());
  ASSERT_EQ(completed.response.points_size(), 2);
  EXPECT_EQ(completed.response.points(1).worker(), "b");
  EXPECT_EQ(completed.response.points(1).socket_path(), "/run/b");
  EXPECT_EQ(completed.response.points(1).token(), "token-2");
  EXPECT_EQ(expected_.at(2).token(), "token-2");
  EXPECT_EQ(expected_.at(2).bytes(), 1000u);
  ASSERT_EQ(completed.response.unavailable_size(), 1);
  EXPECT_EQ(completed.response.unavailable(0), "c: takes no host memory");
}

TEST_F(RegionsTest, ARegionIsUsableOnceAllMembersAttachedIt) {
  Attach();
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1, 2}), "a has not attached the region of q");
  Say(1, true);
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1, 2}), "b has not attached the region of q");
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1}), "");
  Say(2, true);
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1, 2}), "");
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1, 2, 3}), "c takes no host memory");
  Say(2, false);
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1, 2}), "b has not attached the region of q");
  regions_.OnWorkerLost(1);
  EXPECT_EQ(regions_.CheckAttached(QAt(0), {1}), "a has not attached the region of q");
}

TEST_F(RegionsTest, AnAttachedRegionIsAnnouncedToTheOthersOnly) {
  Attach();
  Say(1, true);
  const AttachCompleted again = Attach(/*is_new=*/false);
  ASSERT_EQ(again.response.points_size(), 1);
  EXPECT_EQ(again.response.points(0).worker(), "b");
  ASSERT_EQ(again.response.attached_size(), 1);
  EXPECT_EQ(again.response.attached(0), "a");
}

TEST_F(RegionsTest, ARegionBelongsToItsPrincipal) {
  Attach();
  EXPECT_EQ(regions_.CheckLocations(QAt(0), "me"), std::nullopt);
  const std::optional<Failure> foreign = regions_.CheckLocations(QAt(0), "you");
  ASSERT_TRUE(foreign.has_value());
  EXPECT_EQ(foreign->code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(foreign->reason, "REGION_UNKNOWN");
  EXPECT_EQ(foreign->field, "transport.places[0].region_id");
  EXPECT_EQ(foreign->message.find(kId), std::string::npos);
  EXPECT_EQ(Attach(/*is_new=*/false, "you").failure->code, absl::StatusCode::kNotFound);
  EXPECT_EQ(Attach(/*is_new=*/false, "me", 999).failure->field, "bytes");
}

TEST_F(RegionsTest, TensorsMustLieInsideTheirRegion) {
  Attach();
  EXPECT_EQ(regions_.CheckLocations(QAt(900), "me"), std::nullopt);
  const std::optional<Failure> outside = regions_.CheckLocations(QAt(901), "me");
  ASSERT_TRUE(outside.has_value());
  EXPECT_EQ(outside->field, "transport.places[0].offset");
  EXPECT_TRUE(regions_.CheckLocations(QAt(0, 1001), "me").has_value());
}

TEST_F(RegionsTest, AnUnattachedRegionIsForgotten) {
  Attach();
  Wait(absl::Seconds(14));
  EXPECT_EQ(regions_.size(), 1u);
  Say(1, true);
  Wait(absl::Hours(1));
  EXPECT_EQ(regions_.size(), 1u);
  Say(1, false);
  EXPECT_EQ(regions_.size(), 0u);
  // A worker may reconnect while the token is valid.
  Attach();
  Say(1, true);
  regions_.OnWorkerLost(1);
  EXPECT_EQ(regions_.size(), 1u);
  Wait(absl::Seconds(16));
  EXPECT_EQ(regions_.size(), 0u);
  // Too late: the worker must forget the region.
  Say(2, true);
  const std::vector<Action> actions = batch_.Take();
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<SendToWorker>(actions[0]).message.forget_region().region_id(), kId);
}

TEST_F(RegionsTest, RegionsAreCounted) {
  config_.limits.max_regions_per_client = 1;
  EXPECT_FALSE(Attach().failure.has_value());
  const AttachCompleted second = Attach();
  ASSERT_TRUE(second.failure.has_value());
  EXPECT_EQ(second.failure->reason, "TOO_MANY_REGIONS");
  EXPECT_TRUE(second.failure->retry_after.has_value());
}

// Clients that announce regions and show no memory cannot keep others from sharing theirs.
TEST_F(RegionsTest, AtTheLimitAnUnattachedRegionMakesRoom) {
  config_.limits.max_regions = 4;
  config_.limits.max_regions_per_client = 3;
  const auto announce = [&](const std::string& client, const std::string& id) {
    id_ = id;
    now_ += absl::Milliseconds(1);
    batch_.Begin(now_);
    return Attach(true, client);
  };
  EXPECT_FALSE(announce("honest", "first").failure.has_value());
  for (const char* id : {"x1", "x2", "x3"}) {
    EXPECT_FALSE(announce("silent", id).failure.has_value());
  }
  EXPECT_TRUE(forgotten_.empty());
  // The oldest of the client with the most unattached regions, although another one is older.
  EXPECT_FALSE(announce("other", "second").failure.has_value());
  EXPECT_EQ(forgotten_, (std::map<ConnectionId, std::string>{{1, "x1"}, {2, "x1"}}));
  EXPECT_EQ(regions_.size(), 4u);
  // Attached regions stay.
  for (const char* id : {"first", "second", "x2", "x3"}) {
    v1::RegionChanged changed;
    changed.set_region_id(id);
    changed.set_attached(true);
    regions_.OnChanged(1, changed);
  }
  const AttachCompleted late = announce("late", "third");
  ASSERT_TRUE(late.failure.has_value());
  EXPECT_EQ(late.failure->reason, "TOO_MANY_REGIONS");
  EXPECT_EQ(regions_.size(), 4u);
}

TEST_F(RegionsTest, SizesAreChecked) {
  EXPECT_EQ(Attach(true, "me", 0).failure->field, "bytes");
  EXPECT_EQ(Attach(true, "me", -1).failure->field, "bytes");
  EXPECT_EQ(regions_.size(), 0u);
}

TEST_F(RegionsTest, TheFirstAvailableTransportIsChosen) {
  Attach();
  Say(1, true);
  const auto decide = [&](const TransportChoice& choice, std::vector<ConnectionId> members) {
    return DecideTransport(choice, regions_, roster_, {members, spans_, 4096});
  };
  TransportChoice choice = QAt(0);
  EXPECT_EQ(std::get<TransportDecision>(decide(choice, {1})).transport, v1::TRANSPORT_HOST_MEMORY);
  const auto relay = std::get<TransportDecision>(decide(choice, {1, 2}));
  EXPECT_EQ(relay.transport, v1::TRANSPORT_RELAY);
  EXPECT_EQ(relay.reason, "no host memory: b has not attached the region of q");
  choice.required = true;
  const auto refused = std::get<Failure>(decide(choice, {1, 2}));
  EXPECT_EQ(refused.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.reason, "TRANSPORT_UNAVAILABLE");
  choice.accept.push_back(TransportKind::kCoordinatorStream);
  EXPECT_EQ(std::get<TransportDecision>(decide(choice, {1, 2})).transport, v1::TRANSPORT_RELAY);
  EXPECT_EQ(std::get<TransportDecision>(decide({}, {1})).reason, "");
}

TEST_F(RegionsTest, CudaMemoryNeedsWorkersThatTakeIt) {
  const AttachCompleted completed = Attach(true, "me", 1000, v1::REGION_KIND_CUDA);
  ASSERT_FALSE(completed.failure.has_value());
  ASSERT_EQ(completed.response.points_size(), 1);
  EXPECT_EQ(completed.response.points(0).worker(), "a");
  EXPECT_EQ(expected_.at(1).kind(), v1::REGION_KIND_CUDA);
  ASSERT_EQ(completed.response.unavailable_size(), 2);
  EXPECT_EQ(completed.response.unavailable(0), "b: takes no CUDA memory");
  EXPECT_EQ(completed.response.unavailable(1), "c: takes no CUDA memory");
  EXPECT_EQ(Attach(/*is_new=*/false).failure->field, "kind");
  roster_.Remove(1);
  const AttachCompleted none = Attach(true, "me", 1000, v1::REGION_KIND_CUDA);
  ASSERT_TRUE(none.failure.has_value());
  EXPECT_EQ(none.failure->reason, "TRANSPORT_UNAVAILABLE");
  EXPECT_EQ(none.failure->message, "no connected worker takes CUDA memory (--local_memory)");
}

TEST_F(RegionsTest, ATensorsMemoryKindMatchesTheTransport) {
  Attach(true, "me", 1000, v1::REGION_KIND_CUDA);
  Say(1, true);
  const auto decide = [&](const TransportChoice& choice, std::vector<ConnectionId> members) {
    return DecideTransport(choice, regions_, roster_, {members, spans_, 4096});
  };
  TransportChoice choice = QAt(0);
  EXPECT_EQ(std::get<TransportDecision>(decide(choice, {1})).reason,
            "no host memory: q lies in CUDA memory");
  choice.accept = {TransportKind::kCudaMemory};
  const auto taken = std::get<TransportDecision>(decide(choice, {1}));
  EXPECT_EQ(taken.transport, v1::TRANSPORT_CUDA_MEMORY);
  EXPECT_EQ(taken.reason, "CUDA memory: all members have the regions of all tensors");
  EXPECT_EQ(std::get<TransportDecision>(decide(choice, {1, 2})).reason,
            "no CUDA memory: b takes no CUDA memory");
  choice.required = true;
  const auto refused = std::get<Failure>(decide(choice, {1, 2}));
  EXPECT_EQ(refused.reason, "TRANSPORT_UNAVAILABLE");
  EXPECT_EQ(refused.message, "transport.required: no CUDA memory: b takes no CUDA memory");
}

// Clients reach a and b, but not c.
TEST_F(RegionsTest, DirectStreamsNeedReachableMembers) {
  const auto decide = [&](const TransportChoice& choice, std::vector<ConnectionId> members) {
    return DecideTransport(choice, regions_, roster_, {members, spans_, 4096});
  };
  TransportChoice choice;
  choice.accept = {TransportKind::kHostMemory, TransportKind::kDirectStream};
  choice.why_not_places = "q has no location in a region";
  EXPECT_EQ(std::get<TransportDecision>(decide(choice, {1, 2})).transport, v1::TRANSPORT_DIRECT);
  const auto relay = std::get<TransportDecision>(decide(choice, {1, 3}));
  EXPECT_EQ(relay.transport, v1::TRANSPORT_RELAY);
  EXPECT_EQ(relay.reason,
            "no host memory: q has no location in a region; no direct stream: c has no client data "
            "address");
  spans_ = 4097;
  EXPECT_EQ(std::get<TransportDecision>(decide(choice, {1})).reason,
            "no host memory: q has no location in a region; no direct stream: the layout cuts the "
            "tensors into 4097 spans, more than 4096");
  spans_ = 4096;
  choice.why_not_direct = "some of its tensors are inline";
  choice.required = true;
  EXPECT_EQ(std::get<Failure>(decide(choice, {1})).message,
            "transport.required: no host memory: q has no location in a region; no direct stream: "
            "some of its tensors are inline");
}

TEST_F(RegionsTest, AttachIsRetriedWhileWorkersAreAway) {
  for (ConnectionId connection : {1, 2, 3}) roster_.Remove(connection);
  const AttachCompleted completed = Attach();
  ASSERT_TRUE(completed.failure.has_value());
  EXPECT_EQ(completed.failure->code, absl::StatusCode::kUnavailable);
  EXPECT_EQ(completed.failure->reason, "NO_RING");
  EXPECT_TRUE(completed.failure->retry_after.has_value());
}

}  // namespace
}  // namespace ringattn::server
