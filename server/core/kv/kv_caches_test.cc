#include "server/core/kv/kv_caches.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kBytes = 1000;

KvCacheSpec SmallSpec() {
  KvCacheSpec spec;
  spec.groups.resize(1);
  spec.groups[0].layers = {0, 1};
  spec.groups[0].num_heads = 8;
  spec.groups[0].num_kv_heads = 2;
  spec.groups[0].head_dim = 16;
  spec.groups[0].head_dim_v = 16;
  spec.groups[0].softmax_scale = 0.25;
  spec.blocks = 4;
  return spec;
}

class KvCachesTest : public testing::Test {
 protected:
  KvCachesTest() {
    config_.limits.max_kv_caches = 3;
    batch_.Begin(now_);
  }

  KvCacheRequested Request(const std::string& id) {
    KvCacheRequested event;
    event.call = ++last_call_;
    event.principal = "p";
    event.client = "p";
    event.id = id;
    event.spec = std::make_shared<const KvCacheSpec>(SmallSpec());
    event.ttl = absl::Seconds(60);
    return event;
  }

  // Reserves a cache on workers 1 and 2.
  void Reserve(const KvCacheRequested& event) {
    KvReservation reservation;
    reservation.placement = PlaceKvCache(*event.spec, 2);
    reservation.members = {{1, "a"}, {2, "b"}};
    reservation.bytes_per_worker = kBytes;
    reservation.block_tokens = block_tokens_;
    reservation.reason = "for the test";
    caches_.Reserve(event, reservation);
  }

  void Reserved(ConnectionId worker, const std::string& id, bool ok = true) {
    v1::KvReserved reserved;
    reserved.set_cache_id(id);
    reserved.set_ok(ok);
    reserved.set_reason(ok ? "" : "full");
    reserved.set_bytes(ok ? kBytes : 0);
    caches_.OnReserved(worker, reserved);
  }

  void Create(const std::string& id) {
    Reserve(Request(id));
    Reserved(1, id);
    Reserved(2, id);
    batch_.Take();
  }

  uint64_t Open(const std::string& id, uint64_t answered_step = 0) {
    KvWriterRequested event;
    event.call = ++last_call_;
    event.principal = "p";
    event.id = id;
    event.token_seed = std::string(32, 's');
    event.answered_step = answered_step;
    caches_.Open(event, {v1::TRANSPORT_RELAY, "test", {}});
    return event.call;
  }

  void Opened(ConnectionId worker, const std::string& id, uint64_t epoch, uint64_t committed,
              uint64_t complete) {
    v1::KvOpened opened;
    opened.set_cache_id(id);
    opened.set_epoch(epoch);
    opened.set_committed_step(committed);
    opened.set_complete_step(complete);
    caches_.OnOpened(worker, opened);
  }

  void Settled(ConnectionId worker, const std::string& id, uint64_t epoch, bool ok = true) {
    v1::KvSettled settled;
    settled.set_cache_id(id);
    settled.set_epoch(epoch);
    settled.set_ok(ok);
    caches_.OnSettled(worker, settled);
  }

  void Wait(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
    caches_.CheckTimers();
  }

  template <typename T>
  std::vector<T> Taken() {
    std::vector<T> found;
    for (Action& action : batch_.Take()) {
      if (auto* one = std::get_if<T>(&action)) found.push_back(std::move(*one));
    }
    return found;
  }

  // The reasons of all failures in the answers to OpenCache.
  std::string OpenFailure() {
    const auto answers = Taken<KvWriterAnswered>();
    if (answers.size() != 1) return absl::StrCat(answers.size(), " answers");
    return answers[0].failure ? answers[0].failure->reason : "OK";
  }

  CoordinatorConfig config_;
  ActionBatch batch_;
  KvCaches caches_{&config_, &batch_};
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  uint64_t last_call_ = 0;
  int64_t block_tokens_ = SmallSpec().block_tokens;  // of reservations
};

TEST_F(KvCachesTest, WorkersAndClientsGetThePartsBlocksAndTheReason) {
  block_tokens_ = 16;
  Reserve(Request("c"));
  const auto sent = Taken<SendToWorker>();
  ASSERT_THAT(sent, SizeIs(2));
  const v1::KvReserve& reserve = sent[1].message.kv_reserve();
  EXPECT_EQ(reserve.spec().block_tokens(), 16u);
  EXPECT_EQ(reserve.placement().reason(), "for the test");
  Reserved(1, "c");
  Reserved(2, "c");
  const v1::CreateCacheResponse response = Taken<KvCacheAnswered>()[0].response;
  EXPECT_EQ(response.placement().block_tokens(), 16u);
  EXPECT_EQ(response.placement().reason(), "for the test");
  EXPECT_EQ(caches_.Find("c", "p").info.spec().block_tokens(), 16u);
  // Another coordinator takes them over.
  KvCaches next(&config_, &batch_);
  for (const auto& [connection, message] : sent) {
    v1::Register registration;
    registration.set_name(connection == 1 ? "a" : "b");
    *registration.add_kv_caches()->mutable_reserve() = message.kv_reserve();
    next.Adopt(connection, registration);
  }
  EXPECT_EQ(next.Find("c", "p").info.placement().reason(), "for the test");
  EXPECT_EQ(next.Find("c", "p").info.placement().block_tokens(), 16u);
}

TEST_F(KvCachesTest, IsCreatedOnceAllRanksHaveReserved) {
  Reserve(Request("c"));
  EXPECT_THAT(Taken<SendToWorker>(), SizeIs(2));
  Reserved(1, "c");
  EXPECT_THAT(Taken<KvCacheAnswered>(), IsEmpty());
  Reserved(2, "c");
  const auto answers = Taken<KvCacheAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_FALSE(answers[0].failure.has_value());
  EXPECT_EQ(answers[0].response.bytes_per_worker(), kBytes);
  EXPECT_THAT(answers[0].response.placement().members(), ElementsAre("a", "b"));
  EXPECT_EQ(caches_.BytesOn(1), kBytes);
  EXPECT_EQ(caches_.counts().caches, 1);
}

TEST_F(KvCachesTest, ARefusedReservationIsTakenBack) {
  Reserve(Request("c"));
  Reserved(1, "c");
  batch_.Take();
  Reserved(2, "c", /*ok=*/false);
  std::vector<Action> actions = batch_.Take();
  ASSERT_THAT(actions, SizeIs(2));
  const auto& answer = std::get<KvCacheAnswered>(actions[0]);
  EXPECT_EQ(answer.failure->reason, "KV_MEMORY");
  EXPECT_TRUE(answer.failure->retry_after.has_value());
  const auto& free = std::get<SendToWorker>(actions[1]);
  EXPECT_EQ(free.connection, 1u);
  EXPECT_THAT(free.message.kv_free().cache_ids(), ElementsAre("c"));
  EXPECT_EQ(caches_.BytesOn(1), 0);
  EXPECT_EQ(caches_.BytesOn(2), 0);
  // The client never learned the id.
  EXPECT_EQ(caches_.Find("c", "p").failure->reason, "KV_NOT_FOUND");
}

TEST_F(KvCachesTest, EqualRequestsGetOneCache) {
  KvCacheRequested event = Request("c");
  event.request_id = "r";
  event.fingerprint = 7;
  Reserve(event);
  KvCacheRequested again = event;
  again.call = ++last_call_;
  again.id = "other";
  EXPECT_TRUE(caches_.AnswerRepeated(again));
  batch_.Take();
  Reserved(1, "c");
  Reserved(2, "c");
  auto answers = Taken<KvCacheAnswered>();
  ASSERT_THAT(answers, SizeIs(2));
  EXPECT_EQ(answers[1].response.cache_id(), "c");
  again.fingerprint = 8;
  EXPECT_TRUE(caches_.AnswerRepeated(again));
  answers = Taken<KvCacheAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(answers[0].failure->field, "request_id");
  again.principal = "q";
  EXPECT_FALSE(caches_.AnswerRepeated(again));
  caches_.Delete("c", "p");
  EXPECT_FALSE(caches_.AnswerRepeated(event));
}

TEST_F(KvCachesTest, LimitsCountCachesAndBytesOfTheClient) {
  Create("c");
  KvCacheRequested event = Request("d");
  EXPECT_FALSE(caches_.CheckLimits(event, kBytes).has_value());
  event.terms.max_kv_cache_bytes = 2 * kBytes + 10;
  EXPECT_FALSE(caches_.CheckLimits(event, 10).has_value());
  EXPECT_EQ(caches_.CheckLimits(event, 11)->reason, "KV_QUOTA");
  EXPECT_EQ(caches_.CheckLimits(event, 11)->quota->subject, "client:p");
  event.terms.max_kv_caches = 1;
  EXPECT_EQ(caches_.CheckLimits(event, 1)->reason, "TOO_MANY_CACHES");
  event.client = "q";
  EXPECT_FALSE(caches_.CheckLimits(event, 11).has_value());
  Create("d");
  Create("e");
  EXPECT_EQ(caches_.CheckLimits(event, 1)->reason, "TOO_MANY_CACHES");
  EXPECT_FALSE(caches_.CheckLimits(event, 1)->quota.has_value());
}

TEST_F(KvCachesTest, AWriterGetsTheLogsLargestCommittedStep) {
  Create("c");
  Open("c");
  const auto opens = Taken<SendToWorker>();
  ASSERT_THAT(opens, SizeIs(2));
  EXPECT_NE(opens[0].message.kv_open().token(), opens[1].message.kv_open().token());
  EXPECT_EQ(opens[0].message.kv_open().epoch(), 1u);
  Opened(1, "c", 1, /*committed=*/4, /*complete=*/5);
  Opened(2, "c", 1, /*committed=*/5, /*complete=*/5);
  const auto settles = Taken<SendToWorker>();
  ASSERT_THAT(settles, SizeIs(2));
  EXPECT_EQ(settles[0].message.kv_settle().step(), 5u);
  Settled(1, "c", 1);
  Settled(2, "c", 1);
  const auto answers = Taken<KvWriterAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(answers[0].response.next_step(), 6u);
  EXPECT_TRUE(caches_.HasWriterOn(1));
  const KvWriterView view = caches_.FindWriter("c", "p", 1, answers[0].response.token());
  ASSERT_FALSE(view.failure.has_value());
  EXPECT_EQ(view.shards[1].token, opens[1].message.kv_open().token());
  EXPECT_EQ(caches_.FindWriter("c", "p", 1, std::string(32, 'x')).failure->reason, "BAD_TOKEN");
  EXPECT_EQ(caches_.FindWriter("c", "p", 0, answers[0].response.token()).failure->reason,
            "KV_FENCED");
  EXPECT_EQ(caches_.FindWriter("c", "q", 1, answers[0].response.token()).failure->reason,
            "KV_NOT_FOUND");
}

TEST_F(KvCachesTest, AClaimKeepsAStepThatEveryRankHasCompleted) {
  Create("c");
  Open("c", /*answered_step=*/5);
  Opened(1, "c", 1, 4, 5);
  Opened(2, "c", 1, 4, 5);
  EXPECT_EQ(Taken<SendToWorker>().back().message.kv_settle().step(), 5u);
}

TEST_F(KvCachesTest, AClaimBeyondTheLogIsTheCallersFault) {
  Create("c");
  Open("c", /*answered_step=*/6);
  Opened(1, "c", 1, 4, 5);
  Opened(2, "c", 1, 4, 5);
  const auto answers = Taken<KvWriterAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(answers[0].failure->code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(answers[0].failure->field, "answered_step");
  // The cache exists and can be opened.
  Open("c", 5);
  Opened(1, "c", 2, 4, 5);
  Opened(2, "c", 2, 4, 5);
  EXPECT_EQ(Taken<SendToWorker>().back().message.kv_settle().step(), 5u);
}

TEST_F(KvCachesTest, LogsThatCannotBeSettledEndTheCache) {
  Create("c");
  Open("c");
  Opened(1, "c", 1, 3, 3);
  Opened(2, "c", 1, 5, 5);
  EXPECT_EQ(OpenFailure(), "KV_INCONSISTENT");
  EXPECT_EQ(caches_.Find("c", "p").ended->code, absl::StatusCode::kDataLoss);
  Create("d");
  Open("d");
  Opened(1, "d", 1, 3, 3);
  Opened(2, "d", 1, 3, 3);
  batch_.Take();
  Settled(1, "d", 1, /*ok=*/false);
  EXPECT_EQ(OpenFailure(), "KV_INCONSISTENT");
}

TEST_F(KvCachesTest, ANewWriterFencesTheOlderOne) {
  Create("c");
  Open("c");
  batch_.Take();
  Opened(1, "c", 1, 0, 0);
  const uint64_t second = Open("c");
  auto answers = Taken<KvWriterAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(answers[0].failure->reason, "KV_FENCED");
  // Answers of the older epoch come late.
  Opened(2, "c", 1, 0, 0);
  Settled(1, "c", 1);
  Opened(1, "c", 2, 0, 0);
  Opened(2, "c", 2, 0, 0);
  Settled(1, "c", 2);
  Settled(2, "c", 2);
  answers = Taken<KvWriterAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(answers[0].call, second);
  EXPECT_EQ(answers[0].response.epoch(), 2u);
  Open("c");
  const auto ended = Taken<KvWriterEnded>();
  ASSERT_THAT(ended, SizeIs(1));
  EXPECT_EQ(ended[0].epoch, 2u);
  EXPECT_EQ(ended[0].failure.reason, "KV_FENCED");
}

TEST_F(KvCachesTest, AWorkerThatDoesNotAnswerInTimeFailsTheCallOnly) {
  Create("c");
  Open("c");
  Opened(1, "c", 1, 0, 0);
  batch_.Take();
  Wait(config_.control_timeout);
  const auto answers = Taken<KvWriterAnswered>();
  ASSERT_THAT(answers, SizeIs(1));
  EXPECT_EQ(answers[0].failure->reason, "KV_BUSY");
  EXPECT_THAT(answers[0].failure->message, HasSubstr("worker b"));
  EXPECT_FALSE(caches_.HasWriterOn(1));
  EXPECT_NE(caches_.Get("c"), nullptr);
}

TEST_F(KvCachesTest, LeasesEndInOrderOfTimeWhicheverCacheIsOlder) {
  Create("old");
  Wait(absl::Seconds(1));
  Create("young");
  v1::KvTouched touched;
  touched.set_cache_id("old");
  Wait(absl::Seconds(50));
  caches_.OnTouched(1, touched);
  Wait(absl::Seconds(10));
  EXPECT_EQ(caches_.Find("young", "p").ended->reason, "KV_EXPIRED");
  EXPECT_FALSE(caches_.Find("old", "p").ended.has_value());
  Wait(absl::Seconds(50));
  EXPECT_EQ(caches_.Find("old", "p").ended->reason, "KV_EXPIRED");
  EXPECT_EQ(caches_.counts().ended[0], 2);
  EXPECT_EQ(caches_.BytesOn(1), 0);
}

TEST_F(KvCachesTest, TheEndOfAHoldDoesNotShortenTheLeaseOfTheLastStep) {
  Create("c");
  caches_.Renew("c", "p", absl::Seconds(300));
  caches_.Renew("c", "q", absl::Seconds(1));  // another principal's has no effect
  Wait(absl::Seconds(100));
  EXPECT_NE(caches_.Get("c"), nullptr);
  caches_.Renew("c", "p", absl::Seconds(10));
  Wait(absl::Seconds(9));
  EXPECT_NE(caches_.Get("c"), nullptr);
  Wait(absl::Seconds(1));
  EXPECT_EQ(caches_.Get("c"), nullptr);
  Create("d");
  caches_.Renew("d", "p", absl::Seconds(10));
  Wait(absl::Seconds(59));
  EXPECT_NE(caches_.Get("d"), nullptr);
}

TEST_F(KvCachesTest, APauseOfTheProcessExtendsLeases) {
  Create("c");
  now_ += absl::Seconds(100);
  caches_.Forgive(absl::Seconds(100));
  Wait(absl::ZeroDuration());
  EXPECT_NE(caches_.Get("c"), nullptr);
  Wait(absl::Seconds(60));
  EXPECT_EQ(caches_.Get("c"), nullptr);
}

TEST_F(KvCachesTest, ALeavingWorkerIsNamedUntilItsCachesEnd) {
  Create("c");
  Open("c");
  Create("idle");
  EXPECT_EQ(caches_.Find("c", "p").info.leaving_workers_size(), 0);
  caches_.OnWorkerLeaving(2, "b");
  EXPECT_THAT(caches_.Find("c", "p").info.leaving_workers(), ElementsAre("b"));
  EXPECT_FALSE(caches_.Find("c", "p").ended.has_value());
  ASSERT_TRUE(caches_.Find("idle", "p").ended.has_value());
  EXPECT_EQ(caches_.Find("idle", "p").ended->reason, "KV_LOST");
  caches_.OnWorkerLost(2, "b");
  ASSERT_TRUE(caches_.Find("c", "p").ended.has_value());
  EXPECT_EQ(caches_.Find("c", "p").ended->reason, "KV_LOST");
  EXPECT_THAT(caches_.Find("c", "p").ended->message, HasSubstr("was ordered to end"));
}

TEST_F(KvCachesTest, ALostWorkerEndsItsCachesAtOnce) {
  Create("c");
  Open("c");
  Create("d");
  Reserve(Request("e"));
  batch_.Take();
  caches_.OnWorkerLost(2, "b");
  std::vector<Action> actions = batch_.Take();
  std::vector<std::string> reasons, freed;
  for (const Action& action : actions) {
    if (const auto* open = std::get_if<KvWriterAnswered>(&action)) {
      reasons.push_back(open->failure->reason);
    }
    if (const auto* create = std::get_if<KvCacheAnswered>(&action)) {
      reasons.push_back(create->failure->reason);
    }
    if (const auto* send = std::get_if<SendToWorker>(&action)) {
      EXPECT_EQ(send->connection, 1u);
      for (const std::string& id : send->message.kv_free().cache_ids()) freed.push_back(id);
    }
  }
  EXPECT_THAT(reasons, ElementsAre("KV_LOST", "WORKER_LOST"));
  EXPECT_THAT(freed, ElementsAre("c", "d", "e"));
  EXPECT_EQ(caches_.Find("d", "p").ended->reason, "KV_LOST");
  EXPECT_EQ(caches_.Find("d", "q").failure->reason, "KV_NOT_FOUND");
  EXPECT_THAT(caches_.bytes_by_worker(), IsEmpty());
  EXPECT_EQ(caches_.counts().open, 0);
}

TEST_F(KvCachesTest, ARankThatCannotGoOnEndsTheCache) {
  Create("c");
  v1::KvTouched touched;
  touched.set_cache_id("c");
  touched.set_failure("KV_RANKS_DIFFER");
  caches_.OnTouched(1, touched);
  EXPECT_EQ(caches_.Find("c", "p").ended->reason, "KV_RANKS_DIFFER");
}

TEST_F(KvCachesTest, ALeavingWorkerKeepsOnlyCachesWithAWriter) {
  Create("idle");
  Create("open");
  Open("open");
  batch_.Take();
  caches_.OnWorkerLeaving(1, "a");
  EXPECT_EQ(caches_.Find("idle", "p").ended->reason, "KV_LOST");
  EXPECT_NE(caches_.Get("open"), nullptr);
}

TEST_F(KvCachesTest, ListsTheCallersOwnCachesPageByPage) {
  Create("c");
  Create("a");
  Create("b");
  const auto first = caches_.List("p", "p", "", 2);
  ASSERT_THAT(first, SizeIs(2));
  EXPECT_EQ(first[1].cache_id(), "b");
  const auto second = caches_.List("p", "p", "b", 2);
  ASSERT_THAT(second, SizeIs(1));
  EXPECT_EQ(second[0].cache_id(), "c");
  EXPECT_THAT(caches_.List("q", "q", "", 2), IsEmpty());
}

// ------------------------------------------------------------- restarts

v1::Register Registration(const std::string& worker, uint32_t rank, uint64_t epoch,
                          const std::string& id = "c") {
  v1::Register registration;
  registration.set_name(worker);
  v1::KvHeldCache* held = registration.add_kv_caches();
  held->set_epoch(epoch);
  held->set_committed_step(3);
  held->mutable_lease_left()->set_seconds(30);
  v1::KvReserve* reserve = held->mutable_reserve();
  reserve->set_cache_id(id);
  *reserve->mutable_spec() = ToProto(SmallSpec());
  reserve->mutable_placement()->add_members("a");
  reserve->mutable_placement()->add_members("b");
  reserve->mutable_placement()->set_head_parts(2);
  reserve->mutable_placement()->set_position_parts(1);
  reserve->set_rank(rank);
  reserve->set_principal("p");
  reserve->set_client("p");
  reserve->mutable_ttl()->set_seconds(60);
  return registration;
}

TEST_F(KvCachesTest, ANewCoordinatorTakesOverACacheOnceAllItsRanksHaveRegistered) {
  caches_.Adopt(1, Registration("a", 0, 7));
  EXPECT_EQ(std::get<Failure>(caches_.FindToOpen("c", "p")).reason, "KV_ADOPTING");
  EXPECT_EQ(caches_.BytesOn(2), 0);
  caches_.Adopt(2, Registration("b", 1, 7));
  EXPECT_THAT(Taken<SendToWorker>(), IsEmpty());
  EXPECT_EQ(caches_.counts().adopted, 1);
  EXPECT_EQ(caches_.BytesOn(1), KvBytesOfRank(SmallSpec(), PlaceKvCache(SmallSpec(), 2), 0));
  const KvCacheView view = caches_.Find("c", "p");
  EXPECT_TRUE(view.info.open());
  EXPECT_EQ(view.info.epoch(), 7u);
  EXPECT_EQ(view.info.expires_in().seconds(), 30);
  Open("c");
  EXPECT_EQ(Taken<SendToWorker>()[0].message.kv_open().epoch(), 8u);
}

TEST_F(KvCachesTest, ACacheWhoseRanksDoNotAllRegisterIsLost) {
  caches_.Adopt(1, Registration("a", 0, 7));
  for (int i = 0; i < 3; ++i) {
    Wait(config_.kv_orphan_time / 4);
    caches_.Renew("c", "p", absl::Seconds(60));
    EXPECT_THAT(batch_.Take(), IsEmpty());
  }
  Wait(config_.kv_orphan_time / 4);
  const auto sent = Taken<SendToWorker>();
  ASSERT_THAT(sent, SizeIs(1));
  EXPECT_EQ(sent[0].message.kv_free().reason(), "KV_LOST");
  EXPECT_EQ(caches_.Find("c", "p").ended->reason, "KV_LOST");
}

TEST_F(KvCachesTest, RanksOfDifferentEpochsAreTakenOverWithoutAWriter) {
  caches_.Adopt(1, Registration("a", 0, 0));
  caches_.Adopt(2, Registration("b", 1, 1));
  EXPECT_FALSE(caches_.Find("c", "p").info.open());
  EXPECT_EQ(caches_.Find("c", "p").info.epoch(), 1u);
}

TEST_F(KvCachesTest, AWorkerFreesCachesThatHaveEnded) {
  Create("c");
  caches_.Delete("c", "p");
  batch_.Take();
  caches_.Adopt(3, Registration("a", 0, 1));
  const auto sent = Taken<SendToWorker>();
  ASSERT_THAT(sent, SizeIs(1));
  EXPECT_EQ(sent[0].connection, 3u);
  EXPECT_EQ(sent[0].message.kv_free().reason(), "KV_DELETED");
}

TEST_F(KvCachesTest, ContradictoryRanksAreFreed) {
  caches_.Adopt(1, Registration("a", 0, 1));
  v1::Register other = Registration("b", 1, 1);
  other.mutable_kv_caches(0)->mutable_reserve()->set_principal("q");
  caches_.Adopt(2, other);
  EXPECT_THAT(Taken<SendToWorker>(), SizeIs(1));
  other = Registration("b", 0, 1);  // a's rank
  caches_.Adopt(2, other);
  EXPECT_THAT(Taken<SendToWorker>(), SizeIs(1));
  other = Registration("b", 1, 1);
  other.mutable_kv_caches(0)->mutable_reserve()->mutable_spec()->set_blocks(5);
  caches_.Adopt(2, other);
  EXPECT_THAT(Taken<SendToWorker>(), SizeIs(1));
  other = Registration("b", 1, 1);
  other.mutable_kv_caches(0)->mutable_reserve()->mutable_placement()->set_head_parts(1);
  caches_.Adopt(2, other);
  EXPECT_THAT(Taken<SendToWorker>(), SizeIs(1));
  caches_.Adopt(2, Registration("b", 1, 1));
  EXPECT_THAT(Taken<SendToWorker>(), IsEmpty());
  EXPECT_TRUE(caches_.Find("c", "p").info.open());
}

}  // namespace
}  // namespace ringattn::server
