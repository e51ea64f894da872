// Tests of Requests without operations.
#include "server/core/requests/requests.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {
namespace {

class RequestsTest : public testing::Test {
 protected:
  RequestsTest() { batch_.Begin(now_); }

  Request& Add(StreamId stream, const std::string& id, const std::string& principal = "") {
    RequestArrived arrived;
    arrived.stream = stream;
    arrived.request_id = id;
    arrived.principal = principal;
    arrived.deadline = now_ + absl::Seconds(10);
    arrived.spec.shape.seq_len_q = arrived.spec.shape.seq_len_kv = 8;
    arrived.spec.shape.cu_seqlens_q = arrived.spec.shape.cu_seqlens_k = {0, 8};
    return requests_.Add(std::move(arrived));
  }

  void Pass(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
  }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  ActionBatch batch_;
  Requests requests_{&config_, &batch_};
};

TEST_F(RequestsTest, EndsOnceAndIsRemembered) {
  Request& request = Add(1, "job");
  EXPECT_EQ(request.spec->shape.seq_len_q, 8);
  EXPECT_EQ(request.bytes, 3 * 8 * 4);
  EXPECT_EQ(requests_.FindById("job", ""), &request);
  batch_.Take();
  requests_.Fail(request, CancelledByCall());
  const std::vector<Action> actions = batch_.Take();
  ASSERT_EQ(actions.size(), 2u);
  EXPECT_EQ(std::get<StateChanged>(actions[0]).state, v1::REQUEST_STATE_FAILED);
  EXPECT_EQ(std::get<FailRequest>(actions[1]).failure.reason, "CANCELLED");
  EXPECT_EQ(requests_.Find(1), nullptr);
  EXPECT_EQ(requests_.FindById("job", ""), nullptr);
  EXPECT_EQ(requests_.FindView("job", "")->failure->reason, "CANCELLED");
}

TEST_F(RequestsTest, IdsAreUniquePerPrincipal) {
  Add(1, "job", "alice");
  Add(2, "job", "bob");
  EXPECT_EQ(requests_.FindById("job", "alice")->stream(), 1u);
  EXPECT_EQ(requests_.FindById("job", "bob")->stream(), 2u);
  EXPECT_EQ(requests_.FindById("job", ""), nullptr);
  requests_.Fail(*requests_.Find(1), CancelledByCall());
  EXPECT_TRUE(requests_.FindView("job", "alice")->failure.has_value());
  EXPECT_FALSE(requests_.FindView("job", "bob")->failure.has_value());
  EXPECT_FALSE(requests_.FindView("job", "mallory").has_value());
}

TEST_F(RequestsTest, TimersReportPassedDeadlines) {
  Add(1, "job");
  Pass(absl::Seconds(9));
  EXPECT_TRUE(requests_.CheckTimers(std::nullopt).empty());
  Pass(absl::Seconds(1));
  ASSERT_EQ(requests_.CheckTimers(std::nullopt).size(), 1u);
  EXPECT_EQ(requests_.CheckTimers(std::nullopt)[0].second.reason, "DEADLINE_EXCEEDED");
}

// The view of a ring of 64 workers with long names.
TEST_F(RequestsTest, EndedRequestsAreBoundedInBytes) {
  Plan plan;
  plan.shards.q.assign(64, {{0, 1, 1}});
  plan.shards.kv.assign(64, {{0, 1, 1}});
  for (std::vector<int64_t>* list :
       {&plan.buffer_bytes, &plan.workspace_bytes, &plan.tiles, &plan.sent_bytes}) {
    list->assign(64, 1);
  }
  const auto shared = std::make_shared<const Plan>(plan);
  int64_t largest = 0;
  for (StreamId stream = 1; stream <= 3000; ++stream) {
    Request& request = Add(stream, absl::StrCat("job-", stream));
    request.plan = shared;
    request.member_names.assign(64, std::string(100, 'n'));
    const int64_t before = requests_.finished_bytes();
    requests_.Fail(request, CancelledByCall());
    batch_.Take();
    if (stream == 1) largest = requests_.finished_bytes() - before;
    ASSERT_LE(requests_.finished_bytes(), config_.limits.finished_operation_bytes);
  }
  EXPECT_GT(requests_.finished_bytes(), config_.limits.finished_operation_bytes - 2 * largest);
  EXPECT_FALSE(requests_.FindView("job-1", "").has_value());
  EXPECT_TRUE(requests_.FindView("job-3000", "").has_value());
}

TEST_F(RequestsTest, EndedRequestsAreBoundedInNumber) {
  config_.limits.finished_operations_kept = 3;
  for (StreamId stream = 1; stream <= 5; ++stream) {
    requests_.Fail(Add(stream, absl::StrCat("job-", stream)), CancelledByCall());
  }
  EXPECT_FALSE(requests_.FindView("job-2", "").has_value());
  EXPECT_TRUE(requests_.FindView("job-3", "").has_value());
}

}  // namespace
}  // namespace ringattn::server
