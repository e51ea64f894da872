#include "client/call_split.h"

#include <algorithm>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/call.h"
#include "client/error.h"

namespace ringattn {
namespace {

// More than memory holds; sums of a few such numbers stay far from overflowing.
constexpr uint64_t kMaxTokens = uint64_t{1} << 40;
// Longer windows have no edge in any sequence.
constexpr int64_t kMaxWindow = 2 * static_cast<int64_t>(kMaxTokens);

absl::Status Refused(absl::string_view reason) {
  return MakeError(absl::StatusCode::kInvalidArgument, absl::StrCat("streams: ", reason),
                   {{"streams", std::string(reason)}});
}

// The first option that may tell rows apart by where they lie in the request.
std::optional<std::string> UnknownOption(const v1::AttentionOptions& options) {
  std::vector<const google::protobuf::FieldDescriptor*> set;
  options.GetReflection()->ListFields(options, &set);
  for (const google::protobuf::FieldDescriptor* field : set) {
    switch (field->number()) {
      case v1::AttentionOptions::kSoftmaxScaleFieldNumber:
      case v1::AttentionOptions::kSoftcapFieldNumber:
      case v1::AttentionOptions::kCausalFieldNumber:
      case v1::AttentionOptions::kWindowFieldNumber:
        break;
      default:
        return absl::StrCat("options.", std::string(field->name()));
    }
  }
  return std::nullopt;
}

absl::Status CheckSplittable(const v1::AttentionShape& shape, const v1::AttentionOptions& options,
                             int streams) {
  if (streams < 1 || streams > kMaxStreams) {
    return Refused(absl::StrCat("is ", streams, ", must be in 1..", kMaxStreams));
  }
  if (streams == 1) return absl::OkStatus();
  if (shape.has_packed()) return Refused("packed documents cannot be split, only 1 is possible");
  if (const auto option = UnknownOption(options)) {
    return Refused(absl::StrCat(*option, " cannot be split, only 1 is possible"));
  }
  if (shape.seq_len_q() > kMaxTokens || shape.seq_len_kv() > kMaxTokens) {
    return Refused(absl::StrCat("more than ", kMaxTokens, " tokens cannot be split"));
  }
  return absl::OkStatus();
}

CallPart Whole(const v1::AttentionShape& shape, const v1::AttentionOptions& options) {
  return {.batch = {0, shape.batch()},
          .q = {0, shape.seq_len_q()},
          .kv = {0, shape.seq_len_kv()},
          .shape = shape,
          .options = options};
}

std::vector<CallPart> BatchParts(const v1::AttentionShape& shape,
                                 const v1::AttentionOptions& options, uint64_t streams) {
  const uint64_t rows = shape.batch();
  const uint64_t count = std::min(streams, rows);
  std::vector<CallPart> parts(count, Whole(shape, options));
  uint64_t begin = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t end = begin + rows / count + (i < rows % count ? 1 : 0);
    parts[i].batch = {begin, end};
    parts[i].shape.set_batch(end - begin);
    begin = end;
  }
  return parts;
}

// Blocks of the queries of one batch row.
class QueryBlocks {
 public:
  QueryBlocks(const v1::AttentionShape& shape, const v1::AttentionOptions& options)
      : shape_(shape), options_(options) {
    const double kv_heads = shape.num_kv_heads() != 0 ? shape.num_kv_heads() : shape.num_heads();
    const double dim_v = shape.head_dim_v() != 0 ? shape.head_dim_v() : shape.head_dim();
    q_row_size_ = static_cast<double>(shape.num_heads()) * shape.head_dim();
    kv_row_size_ = kv_heads * (shape.head_dim() + dim_v);
  }

  std::vector<CallPart> Split(uint64_t streams) const {
    const uint64_t rows = shape_.seq_len_q();
    const uint64_t count = std::min(streams, rows);
    std::vector<CallPart> parts;
    uint64_t begin = 0;
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t end = FirstEnd(begin, count - i);
      parts.push_back(Part({begin, end}));
      begin = end;
    }
    return parts;
  }

 private:
  int64_t offset() const {
    return static_cast<int64_t>(shape_.seq_len_kv()) - static_cast<int64_t>(shape_.seq_len_q());
  }

  // From the first key that the first query sees to the last that the last one sees;
  // no keys if that is none.
  RowSpan Keys(const RowSpan& q) const {
    const auto keys = static_cast<int64_t>(shape_.seq_len_kv());
    const int64_t left = options_.has_window() ? options_.window().left() : -1;
    const int64_t right = options_.has_window() ? options_.window().right() : -1;
    int64_t begin = 0, end = keys;
    if (left >= 0) {
      begin = static_cast<int64_t>(q.begin) + offset() - std::min(left, kMaxWindow);
    }
    if (right >= 0) {
      end = std::min(end, static_cast<int64_t>(q.end) + offset() + std::min(right, kMaxWindow));
    }
    if (options_.causal()) end = std::min(end, static_cast<int64_t>(q.end) + offset());
    begin = std::max<int64_t>(begin, 0);
    if (begin >= end) return {};
    return {static_cast<uint64_t>(begin), static_cast<uint64_t>(end)};
  }

  CallPart Part(const RowSpan& q) const {
    CallPart part = Whole(shape_, options_);
    part.q = q;
    part.kv = Keys(q);
    part.shape.set_seq_len_q(q.size());
    part.shape.set_seq_len_kv(part.kv.size());
    if (part.kv.size() == 0 || !options_.has_window()) return part;
    // The masks' corner is where the last query meets the last key. Keys beyond the last
    // query's place in the diagonal move it to the right, never when causal, and the
    // window's sides are counted from there.
    const int64_t moved = static_cast<int64_t>(part.kv.end) -
                          (static_cast<int64_t>(q.end) + offset());
    const auto shift = [](int64_t side, int64_t by) {
      return side < 0 || side > kMaxWindow ? side : side + by;
    };
    v1::Window* window = part.options.mutable_window();
    window->set_left(shift(window->left(), moved));
    window->set_right(shift(window->right(), -moved));
    return part;
  }

  // Of the request's inputs, in elements.
  double Size(const RowSpan& q) const {
    return q_row_size_ * static_cast<double>(q.size()) +
           kv_row_size_ * static_cast<double>(Keys(q).size());
  }

  // The end of the longest block from `begin` of at most `size`, but at least one query
  // and at most up to `limit`.
  uint64_t LongestEnd(uint64_t begin, double size, uint64_t limit) const {
    uint64_t end = begin + 1;
    for (uint64_t too_far = limit + 1; end + 1 < too_far;) {
      const uint64_t middle = end + (too_far - end) / 2;
      (Size({begin, middle}) <= size ? end : too_far) = middle;
    }
    return end;
  }

  bool Covers(uint64_t begin, uint64_t count, double size) const {
    for (; count > 0 && begin < shape_.seq_len_q(); --count) {
      const uint64_t end = LongestEnd(begin, size, shape_.seq_len_q());
      if (Size({begin, end}) > size) return false;
      begin = end;
    }
    return begin >= shape_.seq_len_q();
  }

  // The end of the first of `count` blocks over [begin, all) whose largest is smallest.
  uint64_t FirstEnd(uint64_t begin, uint64_t count) const {
    double too_small = 0, enough = Size({begin, shape_.seq_len_q()});
    for (int i = 0; i < 60; ++i) {  // down to a double's own precision
      const double middle = (too_small + enough) / 2;
      (Covers(begin, count, middle) ? enough : too_small) = middle;
    }
    return LongestEnd(begin, enough, shape_.seq_len_q() - (count - 1));
  }

  const v1::AttentionShape& shape_;
  const v1::AttentionOptions& options_;
  double q_row_size_ = 0, kv_row_size_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<CallPart>> SplitForward(const v1::AttentionShape& shape,
                                                   const v1::AttentionOptions& options,
                                                   int streams) {
  if (absl::Status status = CheckSplittable(shape, options, streams); !status.ok()) return status;
  // What has no rows is the server's to judge, as one request.
  if (streams == 1 || shape.batch() == 0 || shape.seq_len_q() == 0) {
    return std::vector<CallPart>{Whole(shape, options)};
  }
  const auto count = static_cast<uint64_t>(streams);
  if (shape.batch() > 1) return BatchParts(shape, options, count);
  return QueryBlocks(shape, options).Split(count);
}

absl::StatusOr<std::vector<CallPart>> SplitBackward(const v1::AttentionShape& shape,
                                                    const v1::AttentionOptions& options,
                                                    int streams) {
  if (absl::Status status = CheckSplittable(shape, options, streams); !status.ok()) return status;
  if (streams == 1 || shape.batch() == 0) return std::vector<CallPart>{Whole(shape, options)};
  if (shape.batch() == 1) {
    return Refused(
        "backward of one batch row cannot be split (dk and dv are sums over all queries), "
        "only 1 is possible");
  }
  return BatchParts(shape, options, static_cast<uint64_t>(streams));
}

}  // namespace ringattn
