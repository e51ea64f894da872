#include "server/core/kv/kv_members.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// One layer of 8 heads of 16 elements in fp32.
KvCacheSpec EightHeads(int64_t blocks) {
  KvCacheSpec spec;
  spec.groups.resize(1);
  spec.groups[0].layers = {0};
  spec.groups[0].num_heads = 8;
  spec.groups[0].num_kv_heads = 8;
  spec.groups[0].head_dim = 16;
  spec.groups[0].head_dim_v = 16;
  spec.blocks = blocks;
  return spec;
}

int64_t BytesOf(const KvCacheSpec& spec, int world_size) {
  return KvBytesOfRank(spec, PlaceKvCache(spec, world_size), 0);
}

std::vector<KvSite> Sites(int count, int64_t memory) {
  std::vector<KvSite> sites;
  for (int i = 0; i < count; ++i) {
    KvSite& site = sites.emplace_back();
    site.connection = static_cast<ConnectionId>(i + 1);
    site.worker = std::string(1, static_cast<char>('a' + i));
    site.memory_bytes = memory;
    site.max_kv_cache_bytes = memory;
  }
  return sites;
}

std::vector<std::string> NamesOf(const std::variant<KvReservation, Failure>& chosen) {
  std::vector<std::string> names;
  if (const auto* failure = std::get_if<Failure>(&chosen)) return {failure->reason};
  for (const auto& [connection, name] : std::get<KvReservation>(chosen).members) {
    names.push_back(name);
  }
  return names;
}

KvMembersRequest Any() {
  KvMembersRequest request;
  request.max_world_size = 64;
  request.retry_after = absl::Seconds(1);
  return request;
}

TEST(KvMembers, TakesTheFewestWorkersThatHaveRoom) {
  const KvCacheSpec spec = EightHeads(16);
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), Sites(4, BytesOf(spec, 1)))), ElementsAre("a"));
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), Sites(4, BytesOf(spec, 2)))),
              ElementsAre("a", "b"));
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), Sites(4, BytesOf(spec, 4)))), SizeIs(4));
}

TEST(KvMembers, NeverTakesPositionPartsUnasked) {
  const KvCacheSpec spec = EightHeads(16);
  // Three workers would have three position parts of all heads.
  const auto chosen = ChooseKvMembers(spec, Any(), Sites(3, BytesOf(spec, 4)));
  EXPECT_THAT(NamesOf(chosen), ElementsAre("KV_MEMORY"));
  EXPECT_THAT(std::get<Failure>(chosen).message, HasSubstr("on each of 2 workers"));
}

TEST(KvMembers, SpreadsCachesOverWorkers) {
  const KvCacheSpec spec = EightHeads(1);
  std::vector<KvSite> sites = Sites(3, 100 * BytesOf(spec, 1));
  sites[0].kv_cache_bytes = 10;
  sites[1].residual_bytes = 5;
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), sites)), ElementsAre("c"));
  sites[2].request_bytes = 20;
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), sites)), ElementsAre("b"));
}

TEST(KvMembers, ResidualsGiveWayAndRequestsDoNot) {
  const KvCacheSpec spec = EightHeads(1);
  const int64_t bytes = BytesOf(spec, 1);
  std::vector<KvSite> sites = Sites(1, bytes);
  sites[0].residual_bytes = bytes;
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), sites)), ElementsAre("a"));
  sites[0].request_bytes = 1;
  const auto chosen = ChooseKvMembers(spec, Any(), sites);
  EXPECT_THAT(NamesOf(chosen), ElementsAre("KV_MEMORY"));
  EXPECT_TRUE(std::get<Failure>(chosen).retry_after.has_value());
}

TEST(KvMembers, TheLimitOfCachesBindsBeforeMemory) {
  const KvCacheSpec spec = EightHeads(1);
  const int64_t bytes = BytesOf(spec, 1);
  std::vector<KvSite> sites = Sites(1, 100 * bytes);
  sites[0].max_kv_cache_bytes = 2 * bytes;
  sites[0].kv_cache_bytes = bytes;
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), sites)), ElementsAre("a"));
  sites[0].kv_cache_bytes = bytes + 1;
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), sites)), ElementsAre("KV_MEMORY"));
}

TEST(KvMembers, ACacheThatNeverFitsIsNotRetried) {
  const KvCacheSpec spec = EightHeads(16);
  const auto chosen = ChooseKvMembers(spec, Any(), Sites(2, BytesOf(spec, 2) - 1));
  EXPECT_THAT(NamesOf(chosen), ElementsAre("KV_MEMORY"));
  EXPECT_FALSE(std::get<Failure>(chosen).retry_after.has_value());
}

TEST(KvMembers, NamedMembersKeepTheirOrder) {
  const KvCacheSpec spec = EightHeads(1);
  KvMembersRequest request = Any();
  request.members = {"c", "a"};
  const auto sites = Sites(3, BytesOf(spec, 1));
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, request, sites)), ElementsAre("c", "a"));
  request.members = {"c", "x"};
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, request, sites)), ElementsAre("MEMBER_NOT_READY"));
}

TEST(KvMembers, ANamedWorldSizeIsTakenOrRefused) {
  const KvCacheSpec spec = EightHeads(1);
  KvMembersRequest request = Any();
  request.world_size = 3;
  const auto chosen = ChooseKvMembers(spec, request, Sites(3, BytesOf(spec, 1)));
  EXPECT_THAT(NamesOf(chosen), SizeIs(3));
  EXPECT_EQ(std::get<KvReservation>(chosen).placement.position_parts, 3);
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, request, Sites(2, BytesOf(spec, 1)))),
              ElementsAre("WORKERS_MISSING"));
}

}  // namespace
}  // namespace ringattn::server
