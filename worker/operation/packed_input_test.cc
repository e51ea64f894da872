#include "worker/operation/packed_input.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

// Checks every byte range of a shard with fragments of every length: each part receives its bytes,
// at the right offsets.
TEST(PackedInput, EveryRangeReachesItsParts) {
  constexpr int64_t kRows = 4, kPartBytes = 3;
  const PackedInput packed(TensorId::kQkv, PartsOf(TensorId::kQkv), kPartBytes);
  ASSERT_EQ(packed.parts().size(), 3u);
  std::string whole;
  std::map<size_t, std::string> parts;
  for (int64_t row = 0; row < kRows; ++row) {
    for (size_t part = 0; part < 3; ++part) {
      for (int64_t e = 0; e < kPartBytes; ++e) {
        whole.push_back(static_cast<char>('A' + whole.size()));
        parts[part].push_back(whole.back());
      }
    }
  }
  const auto total = static_cast<int64_t>(whole.size());
  for (int64_t offset = 0; offset <= total; ++offset) {
    for (int64_t bytes = 0; offset + bytes <= total; ++bytes) {
      for (int64_t step = 1; step <= 11; ++step) {
        std::vector<wire::Fragment> payload;
        for (int64_t at = 0; at < bytes; at += step) {
          payload.push_back({reinterpret_cast<const uint8_t*>(whole.data()) + offset + at,
                             static_cast<size_t>(std::min(step, bytes - at))});
        }
        int64_t covered = 0;
        for (size_t part = 0; part < 3; ++part) {
          const PackedInput::Range range = packed.RangeOf(part, offset, bytes);
          std::string got;
          ASSERT_TRUE(packed
                          .ForEachRun(part, offset, payload,
                                      [&](const uint8_t* data, int64_t run) {
                                        got.append(reinterpret_cast<const char*>(data), run);
                                        return absl::OkStatus();
                                      })
                          .ok());
          ASSERT_EQ(got, parts[part].substr(range.begin, range.bytes)) << offset << " " << bytes;
          covered += range.bytes;
        }
        ASSERT_EQ(covered, bytes);
      }
    }
  }
}

TEST(PackedInput, StopsAtTheFirstError) {
  const PackedInput packed(TensorId::kKv, PartsOf(TensorId::kKv), 2);
  const uint8_t bytes[16] = {};
  const wire::Fragment payload[] = {{bytes, 16}};
  int visits = 0;
  EXPECT_TRUE(absl::IsAborted(packed.ForEachRun(1, 0, payload, [&](const uint8_t*, int64_t) {
    return ++visits == 2 ? absl::AbortedError("") : absl::OkStatus();
  })));
  EXPECT_EQ(visits, 2);
}

}  // namespace
}  // namespace ringattn::worker
