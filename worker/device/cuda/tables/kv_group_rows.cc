#include "worker/device/cuda/tables/kv_group_rows.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {

using cuda::paged::PagedRow;

absl::Status KvCallTooLarge(const char* what, int64_t value, int64_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the call has ", value, " ", what, "; the maximum on this device is ", limit));
}

absl::Status KvGroupRows::Set(absl::Span<const DeviceKvRow> step_rows, int64_t inline_bytes) {
  int64_t elements = 0;
  for (const DeviceKvRow& row : step_rows) {
    elements += static_cast<int64_t>(row.table.size());
    const int64_t entries = row.first_position + row.q_tokens;
    if (entries > kMaxKvEntries) {
      return KvCallTooLarge("entries in a row", entries, kMaxKvEntries);
    }
  }
  const int64_t count = static_cast<int64_t>(step_rows.size());
  if (count > kMaxKvRows) return KvCallTooLarge("rows", count, kMaxKvRows);
  if (elements > max_elements) {
    return KvCallTooLarge("block table elements", elements, max_elements);
  }
  rows = KvClassSize(std::max<int64_t>(count, 1));
  num_rows = count;
  table_bytes = KvTableClass(rows, elements, inline_bytes);
  if (resident()) resident_tables.Place(step_rows);
  max_q = total_q = max_append = total_append = 0;
  const int64_t row_bytes = rows * kPagedRowBytes;
  staging.assign(row_bytes + (resident() ? 0 : elements * 4), 0);
  PagedRow* const paged = reinterpret_cast<PagedRow*>(staging.data());
  int32_t* const table = reinterpret_cast<int32_t*>(staging.data() + row_bytes);
  int64_t at = 0;
  for (size_t i = 0; i < step_rows.size(); ++i) {
    const DeviceKvRow& row = step_rows[i];
    PagedRow& to = paged[i];
    to.first_q = static_cast<int32_t>(total_q);
    to.q_tokens = static_cast<int32_t>(row.q_tokens);
    to.first_append = static_cast<int32_t>(total_append);
    to.append_tokens = static_cast<int32_t>(row.append_tokens);
    to.keep_length = static_cast<int32_t>(row.keep_length);
    to.first_position = static_cast<int32_t>(row.first_position);
    if (resident()) {
      to.table = static_cast<int32_t>(resident_tables.first_element(i));
    } else {
      to.table = static_cast<int32_t>(at);
      std::memcpy(table + at, row.table.data(), row.table.size() * 4);
      at += static_cast<int64_t>(row.table.size());
    }
    total_q += row.q_tokens;
    max_q = std::max(max_q, row.q_tokens);
    total_append += row.append_tokens;
    max_append = std::max(max_append, row.append_tokens);
  }
  uploaded = false;
  return absl::OkStatus();
}

}  // namespace ringattn::worker
