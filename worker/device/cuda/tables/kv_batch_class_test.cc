#include "worker/device/cuda/tables/kv_batch_class.h"

#include <gtest/gtest.h>

namespace ringattn::worker {
namespace {

TEST(KvBatchClassTest, SizesArePowersOfTwoAndThenEighths) {
  EXPECT_EQ(KvClassSize(1), 1);
  EXPECT_EQ(KvClassSize(3), 4);
  EXPECT_EQ(KvClassSize(1024), 1024);
  EXPECT_EQ(KvClassSize(1025), 1152);
  EXPECT_EQ(KvClassSize(5000), 5120);
}

TEST(KvBatchClassTest, SmallTablesTravelWithTheCall) {
  EXPECT_EQ(KvTableClass(1, 0), 1024);
  EXPECT_EQ(KvTableClass(1, 192), 1024);  // 256 bytes of rows, 768 of elements
  EXPECT_EQ(KvTableClass(1, 193), 2048);
  EXPECT_EQ(KvTableClass(64, 64 * 32), 16384);
  EXPECT_EQ(KvTableClass(1, (kInlineTableBytes - 256) / 4), kInlineTableBytes);
  EXPECT_EQ(KvTableClass(1, (kInlineTableBytes - 256) / 4 + 1), 0);
  EXPECT_EQ(KvTableClass(1024, 1), 0);
}

// Every region has room for what is copied into it, and none overlaps the next one.
TEST(KvBatchClassTest, RegionsOfALayoutFollowOneAnother) {
  DeviceKvGroup group;
  group.num_heads = 5;
  group.num_kv_heads = 5;
  group.head_dim = 40;
  group.head_dim_v = 24;
  for (const int64_t rows : {1, 2, 64, 512}) {
    for (const int64_t elements : {0, 1, 100, 3000}) {
      KvBatchClass batch;
      batch.rows = rows;
      batch.max_q = batch.max_append = 1;
      batch.total_q = batch.total_append = rows;
      batch.table_bytes = KvTableClass(rows, elements);
      const KvCallLayout layout(batch, group, DType::kBFloat16);
      EXPECT_GE(layout.rows, layout.sinks + group.num_heads * 4);
      EXPECT_EQ(layout.tables, layout.rows + rows * kPagedRowBytes);
      EXPECT_EQ(layout.tables % 256, 0);
      if (batch.table_bytes > 0) {
        EXPECT_GE(layout.q, layout.tables + elements * 4);
      }
      EXPECT_GE(layout.k, layout.q + rows * 5 * 40 * 2);
      EXPECT_GE(layout.v, layout.k + rows * 5 * 40 * 2);
      EXPECT_GE(layout.input_bytes, layout.v + rows * 5 * 24 * 2);
      EXPECT_GE(layout.output_bytes, layout.out + rows * 5 * 24 * 2);
    }
  }
}

TEST(KvBatchClassTest, KernelsFetchTheInputOfSmallCalls) {
  DeviceKvGroup group;
  group.num_heads = 32;
  group.num_kv_heads = 8;
  group.head_dim = group.head_dim_v = 128;
  const auto layout = [&](int64_t rows) {
    KvBatchClass batch;
    batch.rows = batch.total_q = batch.total_append = rows;
    batch.max_q = batch.max_append = 1;
    batch.table_bytes = KvTableClass(rows, rows);
    return KvCallLayout(batch, group, DType::kBFloat16);
  };
  EXPECT_TRUE(layout(4).fetched());
  EXPECT_FALSE(layout(8).fetched());  // 12 KiB of q, k and v for each row
  EXPECT_TRUE(layout(8).small());
  EXPECT_EQ(layout(4).input_bytes % 16, 0);
}

}  // namespace
}  // namespace ringattn::worker
