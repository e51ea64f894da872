#include "server/edge/kv/kv_requests.h"

#include "absl/strings/str_cat.h"
#include "common/kv/kv_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using ::testing::HasSubstr;

v1::CreateCacheRequest GoodCreate() {
  v1::CreateCacheRequest request;
  v1::KvLayerGroup* group = request.mutable_spec()->add_groups();
  group->add_layers(0);
  group->set_num_heads(8);
  group->set_num_kv_heads(2);
  group->set_head_dim(16);
  request.mutable_spec()->set_dtype(v1::DATA_TYPE_FLOAT32);
  request.mutable_spec()->set_blocks(4);
  return request;
}

Caller TestCaller() {
  Caller caller;
  caller.principal = caller.client = "p";
  caller.terms.max_kv_caches = 5;
  return caller;
}

// The code, reason and field of a refused request; "OK" otherwise.
std::string Refusal(const v1::CreateCacheRequest& request) {
  const auto read = ReadCreateCache(request, TestCaller(), Limits());
  const auto* failure = std::get_if<Failure>(&read);
  if (failure == nullptr) return "OK";
  return absl::StrCat(absl::StatusCodeToString(failure->code), " ", failure->reason, " ",
                      failure->field);
}

TEST(KvRequests, DefaultsAreResolved) {
  const auto read = ReadCreateCache(GoodCreate(), TestCaller(), Limits());
  const auto& event = std::get<KvCacheRequested>(read);
  EXPECT_EQ(event.ttl, absl::Seconds(60));
  EXPECT_EQ(event.spec->block_tokens, 64);
  EXPECT_EQ(event.id.size(), kKvCacheIdBytes);
  EXPECT_EQ(event.principal, "p");
  EXPECT_EQ(event.terms.max_kv_caches, 5);
  EXPECT_FALSE(event.world_size.has_value());
}

TEST(KvRequests, EveryBadFieldIsNamed) {
  v1::CreateCacheRequest request = GoodCreate();
  EXPECT_EQ(Refusal(request), "OK");
  request.mutable_spec()->mutable_groups(0)->set_num_kv_heads(3);
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST spec.groups[0].num_kv_heads");
  request = GoodCreate();
  request.mutable_spec()->mutable_groups(0)->set_latent_rank(512);
  EXPECT_EQ(Refusal(request), "UNIMPLEMENTED NOT_SERVED spec.groups[0].latent_rank");
  request = GoodCreate();
  request.mutable_spec()->set_blocks(uint64_t{1} << 40);
  EXPECT_EQ(Refusal(request), "RESOURCE_EXHAUSTED OVER_LIMIT spec.blocks");
  request = GoodCreate();
  request.mutable_ttl()->set_seconds(-1);
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST ttl");
  request.mutable_ttl()->set_seconds(6 * 3600 + 1);
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST ttl");
  request.mutable_ttl()->set_seconds(6 * 3600);
  EXPECT_EQ(Refusal(request), "OK");
  request.set_world_size(0);
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST world_size");
  request.set_world_size(65);
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST world_size");
  request.set_world_size(2);
  request.add_members("a");
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST world_size");
  request.add_members("a");
  EXPECT_EQ(Refusal(request), "INVALID_ARGUMENT INVALID_REQUEST members");
  request.set_members(1, "b");
  EXPECT_EQ(Refusal(request), "OK");
  request.set_request_id(std::string(129, 'r'));
  EXPECT_EQ(Refusal(request), "RESOURCE_EXHAUSTED OVER_LIMIT request_id");
}

TEST(KvRequests, BlocksAreDividedOnlyOnRequest) {
  v1::CreateCacheRequest request = GoodCreate();
  const auto read = [&] {
    return std::get<KvCacheRequested>(ReadCreateCache(request, TestCaller(), Limits()));
  };
  const KvCacheRequested before = read();
  EXPECT_FALSE(before.divide_blocks);
  request.set_divide_blocks(true);
  EXPECT_TRUE(read().divide_blocks);
  EXPECT_NE(read().fingerprint, before.fingerprint);
}

TEST(KvRequests, TheFingerprintLeavesOutTheRequestId) {
  v1::CreateCacheRequest request = GoodCreate();
  const auto fingerprint = [&] {
    return std::get<KvCacheRequested>(ReadCreateCache(request, TestCaller(), Limits())).fingerprint;
  };
  const uint64_t first = fingerprint();
  request.set_request_id("r");
  EXPECT_EQ(fingerprint(), first);
  request.mutable_spec()->set_label("other");
  EXPECT_NE(fingerprint(), first);
}

TEST(KvRequests, TransportsAreTakenInTheirOrder) {
  std::string region;
  const auto read = [&](const std::vector<v1::Transport>& accept) {
    v1::OpenCacheRequest request;
    request.set_region_id(region);
    for (const v1::Transport transport : accept) request.add_accept(transport);
    return ReadOpenCache(request, TestCaller());
  };
  const auto accepts = [&](const std::vector<v1::Transport>& accept) {
    const auto result = read(accept);
    if (const auto* failure = std::get_if<Failure>(&result)) return failure->reason;
    const auto& event = std::get<KvWriterRequested>(result);
    return absl::StrCat(event.accepts_host_memory ? "host " : "",
                        event.accepts_direct ? "direct " : "", event.accepts_relay ? "relay" : "");
  };
  EXPECT_EQ(accepts({}), "relay");
  EXPECT_EQ(accepts({v1::TRANSPORT_DIRECT}), "direct ");
  EXPECT_EQ(accepts({v1::TRANSPORT_DIRECT, v1::TRANSPORT_RELAY}), "direct relay");
  EXPECT_EQ(accepts({v1::TRANSPORT_RELAY, v1::TRANSPORT_DIRECT}), "relay");
  EXPECT_EQ(accepts({v1::TRANSPORT_CUDA_MEMORY}), "NOT_SERVED");
  EXPECT_EQ(accepts({v1::TRANSPORT_CUDA_MEMORY, v1::TRANSPORT_RELAY}), "relay");
  EXPECT_EQ(accepts({v1::TRANSPORT_HOST_MEMORY}), "INVALID_REQUEST");  // without a region
  region = "a region";
  EXPECT_EQ(accepts({v1::TRANSPORT_HOST_MEMORY}), "host ");
  EXPECT_EQ(accepts({v1::TRANSPORT_HOST_MEMORY, v1::TRANSPORT_DIRECT, v1::TRANSPORT_RELAY}),
            "host direct relay");
  // What host memory needs, direct streams need too.
  EXPECT_EQ(accepts({v1::TRANSPORT_DIRECT, v1::TRANSPORT_HOST_MEMORY}), "direct ");
  EXPECT_EQ(accepts({v1::TRANSPORT_UNSPECIFIED}), "INVALID_REQUEST");
  EXPECT_EQ(std::get<Failure>(read({static_cast<v1::Transport>(9)})).message,
            "accept: is 9, must be TRANSPORT_RELAY, TRANSPORT_DIRECT, TRANSPORT_HOST_MEMORY or "
            "TRANSPORT_CUDA_MEMORY");
}

TEST(KvRequests, PageTokensAreThoseOfTheServer) {
  v1::ListCachesRequest request;
  EXPECT_EQ(std::get<KvPage>(ReadListCaches(request)).size, 100);
  request.set_page_size(1001);
  EXPECT_EQ(std::get<Failure>(ReadListCaches(request)).field, "page_size");
  request.set_page_size(7);
  request.set_page_token("zz");
  EXPECT_EQ(std::get<Failure>(ReadListCaches(request)).field, "page_token");
  request.set_page_token("000102030405060708090a0b0c0d0e0f");
  EXPECT_EQ(std::get<KvPage>(ReadListCaches(request)).after.size(), kKvCacheIdBytes);
}

TEST(KvRequests, ReasonsOfStatusesAreKept) {
  const Failure failure =
      KvRequestFailure(KvError(absl::StatusCode::kFailedPrecondition, "STEP_ORDER", "step is 4"));
  EXPECT_EQ(failure.reason, "STEP_ORDER");
  EXPECT_EQ(failure.field, "");
  EXPECT_THAT(failure.message, HasSubstr("step is 4"));
}

}  // namespace
}  // namespace ringattn::server
