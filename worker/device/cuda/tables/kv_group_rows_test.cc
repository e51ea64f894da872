#include "worker/device/cuda/tables/kv_group_rows.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using cuda::paged::PagedRow;

std::vector<PagedRow> RowsOf(const KvGroupRows& group) {
  std::vector<PagedRow> rows(group.rows);
  std::memcpy(rows.data(), group.staging.data(), rows.size() * sizeof(PagedRow));
  return rows;
}

TEST(KvGroupRows, WritesRowsAndTablesThatTravel) {
  KvGroupRows group(1000);
  const std::vector<uint32_t> first = {7, 8, 9}, second = {4};
  const std::vector<DeviceKvRow> step = {
      {40, 2, 3, 97, first}, {5, 0, 1, -1, second}, {0, 4, 0, 0, {}}};
  ASSERT_TRUE(group.Set(step, kInlineTableBytes).ok());
  EXPECT_FALSE(group.resident());
  EXPECT_EQ(group.rows, 4);
  EXPECT_EQ(group.num_rows, 3);
  EXPECT_EQ(group.max_q, 3);
  EXPECT_EQ(group.total_q, 4);
  EXPECT_EQ(group.max_append, 4);
  EXPECT_EQ(group.total_append, 6);
  const std::vector<PagedRow> rows = RowsOf(group);
  EXPECT_EQ(rows[0].keep_length, 40);
  EXPECT_EQ(rows[0].append_tokens, 2);
  EXPECT_EQ(rows[0].first_position, 97);
  EXPECT_EQ(rows[1].first_q, 3);
  EXPECT_EQ(rows[1].first_append, 2);
  EXPECT_EQ(rows[1].first_position, -1);
  EXPECT_EQ(rows[1].table, 3);
  EXPECT_EQ(rows[2].first_append, 2);
  std::vector<int32_t> elements(4);
  ASSERT_EQ(group.staging.size(), 4 * sizeof(PagedRow) + 4 * sizeof(int32_t));
  std::memcpy(elements.data(), group.staging.data() + 4 * sizeof(PagedRow), 16);
  EXPECT_EQ(elements, (std::vector<int32_t>{7, 8, 9, 4}));
}

TEST(KvGroupRows, KeepsLongTablesResident) {
  KvGroupRows group(1000);
  const std::vector<uint32_t> table = {1, 2};
  const std::vector<DeviceKvRow> step = {{20, 0, 1, 19, table}};
  ASSERT_TRUE(group.Set(step, /*inline_bytes=*/0).ok());
  EXPECT_TRUE(group.resident());
  EXPECT_EQ(group.staging.size(), sizeof(PagedRow));
  EXPECT_EQ(RowsOf(group)[0].table, group.resident_tables.first_element(0));
}

// A part holds few entries of a long sequence, whose positions must still fit.
TEST(KvGroupRows, NamesWhatIsTooLarge) {
  KvGroupRows group(3);
  const auto error = [&](const std::vector<DeviceKvRow>& step) {
    const absl::Status status = group.Set(step, kInlineTableBytes);
    EXPECT_TRUE(absl::IsResourceExhausted(status));
    return std::string(status.message());
  };
  EXPECT_EQ(error({{100, 0, 1, kMaxKvEntries, {}}}),
            "the call has 1073741825 entries in a row; the maximum on this device is 1073741824");
  EXPECT_EQ(error(std::vector<DeviceKvRow>(kMaxKvRows + 1)),
            "the call has 4097 rows; the maximum on this device is 4096");
  const std::vector<uint32_t> table(4);
  EXPECT_EQ(error({{0, 1, 1, 0, table}}),
            "the call has 4 block table elements; the maximum on this device is 3");
  EXPECT_TRUE(group.Set({}, kInlineTableBytes).ok());
}

}  // namespace
}  // namespace ringattn::worker
