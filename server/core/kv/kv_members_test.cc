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

// 32 query heads of 128 elements in bf16, and blocks of 64 entries.
KvCacheSpec FewHeads(int64_t kv_heads, int64_t tokens) {
  KvCacheSpec spec = EightHeads(tokens / 64);
  spec.dtype = DType::kBFloat16;
  spec.groups[0].num_heads = 32;
  spec.groups[0].num_kv_heads = kv_heads;
  spec.groups[0].head_dim = spec.groups[0].head_dim_v = 128;
  return spec;
}

std::vector<KvSite> Gpus(int count, int64_t memory) {
  std::vector<KvSite> sites = Sites(count, memory);
  for (KvSite& site : sites) site.rates = {kGpuMemoryBytesPerSecond, 600e12};
  return sites;
}

KvMembersRequest Dividing() {
  KvMembersRequest request = Any();
  request.divide_blocks = true;
  return request;
}

constexpr int64_t kRoom = int64_t{1} << 40;

KvReservation Chosen(const KvCacheSpec& spec, const KvMembersRequest& request,
                     const std::vector<KvSite>& sites) {
  return std::get<KvReservation>(ChooseKvMembers(spec, request, sites));
}

TEST(KvMembers, ALongCacheOfOneHeadTakesPositionParts) {
  const KvReservation four = Chosen(FewHeads(1, 1 << 20), Dividing(), Gpus(4, kRoom));
  EXPECT_THAT(four.members, SizeIs(4));
  EXPECT_EQ(four.placement, (KvPlacement{1, 4}));
  // The parts divide the blocks, and so the memory.
  EXPECT_EQ(four.block_tokens, 16);
  EXPECT_EQ(four.bytes_per_worker, (1 << 18) * 512);
  EXPECT_THAT(four.reason, HasSubstr("with 4 workers (predicted); "));
  EXPECT_THAT(four.reason, HasSubstr(" with 1"));
  // Blocks of 64 have no more than four parts of 16.
  EXPECT_EQ(Chosen(FewHeads(1, 1 << 20), Dividing(), Gpus(8, kRoom)).placement.position_parts, 4);
  KvCacheSpec larger = FewHeads(1, 1 << 22);
  larger.block_tokens = 128;
  larger.blocks /= 2;
  EXPECT_EQ(Chosen(larger, Dividing(), Gpus(8, kRoom)).placement.position_parts, 8);
  EXPECT_EQ(Chosen(larger, Dividing(), Gpus(8, kRoom)).block_tokens, 16);
}

TEST(KvMembers, TwoHeadsAreDividedBeforePositions) {
  const KvReservation four = Chosen(FewHeads(2, 1 << 20), Dividing(), Gpus(4, kRoom));
  EXPECT_EQ(four.placement, (KvPlacement{2, 2}));
  EXPECT_EQ(four.block_tokens, 32);
  // Three workers would be three position parts, which cannot divide blocks of 64.
  EXPECT_EQ(Chosen(FewHeads(2, 1 << 20), Dividing(), Gpus(3, kRoom)).placement,
            (KvPlacement{2, 1}));
}

TEST(KvMembers, AShortCacheStaysOnOneWorker) {
  const KvReservation one = Chosen(FewHeads(1, 8192), Dividing(), Gpus(4, kRoom));
  EXPECT_THAT(one.members, SizeIs(1));
  EXPECT_EQ(one.block_tokens, 64);
  EXPECT_THAT(one.reason, HasSubstr("the fewest workers"));
}

TEST(KvMembers, AWindowMakesALongCacheShort) {
  KvCacheSpec spec = FewHeads(1, 1 << 20);
  spec.groups[0].window_left = 4095;
  EXPECT_THAT(Chosen(spec, Dividing(), Gpus(4, kRoom)).members, SizeIs(1));
}

TEST(KvMembers, PartsAreChosenOnlyIfBlocksMayBeDividedAndHeadsAreFew) {
  EXPECT_THAT(Chosen(FewHeads(1, 1 << 20), Any(), Gpus(4, kRoom)).members, SizeIs(1));
  EXPECT_THAT(Chosen(FewHeads(4, 1 << 20), Dividing(), Gpus(4, kRoom)).members, SizeIs(1));
  EXPECT_THAT(Chosen(FewHeads(4, 1 << 20), Dividing(), Gpus(5, kRoom)).members, SizeIs(4));
}

TEST(KvMembers, SlowKernelsMakePartsPayEarlier) {
  std::vector<KvSite> sites = Sites(4, kRoom);
  for (KvSite& site : sites) site.rates = {kCpuMemoryBytesPerSecond, 50e9};
  EXPECT_EQ(Chosen(FewHeads(1, 8192), Dividing(), sites).placement.position_parts, 4);
  EXPECT_THAT(Chosen(FewHeads(1, 64), Dividing(), sites).members, SizeIs(1));
}

TEST(KvMembers, PartsHoldACacheThatOneWorkerCannot) {
  const KvCacheSpec spec = FewHeads(1, 1 << 20);
  const int64_t half = (int64_t{1} << 20) * 512 / 2;
  EXPECT_EQ(Chosen(spec, Dividing(), Gpus(2, half)).placement.position_parts, 2);
  EXPECT_THAT(NamesOf(ChooseKvMembers(spec, Any(), Gpus(2, half))), ElementsAre("KV_MEMORY"));
  const auto too_large = ChooseKvMembers(spec, Dividing(), Gpus(2, half - 1));
  EXPECT_THAT(std::get<Failure>(too_large).message, HasSubstr("on each of 2 workers"));
}

TEST(KvMembers, ANamedWorldSizeDividesBlocksOrIsRefused) {
  KvMembersRequest request = Dividing();
  request.world_size = 4;
  EXPECT_EQ(Chosen(FewHeads(1, 8192), request, Gpus(8, kRoom)).block_tokens, 16);
  request.world_size = 8;
  const auto refused = ChooseKvMembers(FewHeads(1, 8192), request, Gpus(8, kRoom));
  EXPECT_EQ(std::get<Failure>(refused).code, absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::get<Failure>(refused).message,
              HasSubstr("spec.block_tokens: is 64; 8 position parts"));
  request.divide_blocks = false;
  EXPECT_EQ(Chosen(FewHeads(1, 8192), request, Gpus(8, kRoom)).block_tokens, 64);
  request.world_size.reset();
  request.divide_blocks = true;
  request.members = {"a", "b", "c"};
  EXPECT_THAT(NamesOf(ChooseKvMembers(FewHeads(1, 8192), request, Gpus(8, kRoom))),
              ElementsAre("INVALID_REQUEST"));
}

}  // namespace
}  // namespace ringattn::server
