#include "common/wire/token_spans.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ringattn {

void ToProto(const Shard& shard, TokenSpans* spans) {
  for (const Span& span : shard) {
    v1::TokenSpan* added = spans->Add();
    added->set_begin(span.begin);
    added->set_count(span.length);
    added->set_stride(span.stride);
  }
}

absl::StatusOr<Shard> FromProto(const TokenSpans& spans) {
  constexpr uint64_t kMost = uint64_t{1} << 40;  // small enough that sums do not overflow
  Shard shard;
  for (const v1::TokenSpan& span : spans) {
    const uint64_t stride = span.stride() == 0 ? 1 : span.stride();
    if (span.begin() >= kMost || span.count() == 0 || span.count() >= kMost || stride >= kMost ||
        stride > kMost / span.count()) {
      return absl::InvalidArgumentError(absl::StrCat("the span at token ", span.begin(), " with ",
                                                     span.count(), " tokens of stride ", stride,
                                                     " is out of range"));
    }
    shard.push_back({static_cast<int64_t>(span.begin()), static_cast<int64_t>(span.count()),
                     static_cast<int64_t>(stride)});
  }
  return shard;
}

}  // namespace ringattn
