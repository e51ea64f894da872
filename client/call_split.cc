#include "client/call_split.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/api/call.h"
#include "client/api/error.h"
#include "client/transfer/tensor_bytes.h"

namespace ringattn::client {
namespace {

// More than memory holds; sums of a few such numbers stay far from overflowing.
constexpr uint64_t kMaxTokens = uint64_t{1} << 40;
// Longer windows have no edge in any sequence.
constexpr int64_t kMaxWindow = 2 * static_cast<int64_t>(kMaxTokens);

absl::Status Refused(absl::string_view reason) {
  return MakeError(absl::StatusCode::kInvalidArgument, absl::StrCat("streams: ", reason),
                   {{"streams", std::string(reason)}});
}

// The first option that may tell rows or heads apart by where they lie in the request.
std::optional<std::string> UnknownOption(const v1::AttentionOptions& options) {
  std::vector<const google::protobuf::FieldDescriptor*> set;
  options.GetReflection()->ListFields(options, &set);
  for (const google::protobuf::FieldDescriptor* field : set) {
    switch (field->number()) {
      case v1::AttentionOptions::kSoftmaxScaleFieldNumber:
      case v1::AttentionOptions::kSoftcapFieldNumber:
      case v1::AttentionOptions::kCausalFieldNumber:
      case v1::AttentionOptions::kWindowFieldNumber:
      case v1::AttentionOptions::kComputeDtypeFieldNumber:
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
  if (!shape.packed().options().empty()) {
    return Refused("shape.packed.options cannot be split, only 1 is possible");
  }
  if (shape.packing() != v1::PACKING_UNSPECIFIED) {
    return Refused("shape.packing cannot be split, only 1 is possible");
  }
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
          .heads = {0, shape.num_heads()},
          .kv_heads = {0, KvHeads(shape)},
          .shape = shape,
          .options = options};
}

// 0 .. items - 1 in at most `count` consecutive spans, none empty, whose lengths differ by
// one at the most.
std::vector<RowSpan> EvenSpans(uint64_t items, uint64_t count) {
  std::vector<RowSpan> spans(std::min(count, items));
  uint64_t begin = 0;
  for (uint64_t i = 0; i < spans.size(); ++i) {
    const uint64_t end = begin + items / spans.size() + (i < items % spans.size() ? 1 : 0);
    spans[i] = {begin, end};
    begin = end;
  }
  return spans;
}

std::vector<CallPart> BatchParts(const v1::AttentionShape& shape,
                                 const v1::AttentionOptions& options, uint64_t streams) {
  std::vector<CallPart> parts;
  for (const RowSpan& rows : EvenSpans(shape.batch(), streams)) {
    CallPart& part = parts.emplace_back(Whole(shape, options));
    part.batch = rows;
    part.shape.set_batch(rows.size());
  }
  return parts;
}

absl::StatusOr<std::vector<CallPart>> HeadParts(const v1::AttentionShape& shape,
                                                const v1::AttentionOptions& options,
                                                uint64_t streams) {
  const uint64_t all = KvHeads(shape);
  // For the server to refuse.
  if (all == 0 || shape.num_heads() % all != 0) {
    return std::vector<CallPart>{Whole(shape, options)};
  }
  if (all == 1) {
    return Refused(
        "backward of one batch row with one key/value head cannot be split (dk and dv are sums "
        "over all queries and heads of a group), only 1 is possible");
  }
  const uint64_t group = shape.num_heads() / all;
  std::vector<CallPart> parts;
  for (const RowSpan& kv_heads : EvenSpans(all, streams)) {
    CallPart& part = parts.emplace_back(Whole(shape, options));
    part.kv_heads = kv_heads;
    part.heads = {kv_heads.begin * group, kv_heads.end * group};
    part.shape.set_num_heads(part.heads.size());
    part.shape.set_num_kv_heads(kv_heads.size());
  }
  return parts;
}

// Cuts rows 0 .. rows - 1 into consecutive spans whose largest is as small as can be.
class EvenCutter {
 public:
  // `size` of a span: never less for a longer one.
  using SizeOf = std::function<double(const RowSpan&)>;

  EvenCutter(uint64_t rows, SizeOf size) : rows_(rows), size_(std::move(size)) {}

  // As many spans as `count`, or as there are rows, none empty.
  std::vector<RowSpan> Cut(uint64_t count) const {
    std::vector<RowSpan> spans;
    uint64_t begin = 0;
    for (count = std::min(count, rows_); count > 0; --count) {
      const uint64_t end = FirstEnd(begin, count);
      spans.push_back({begin, end});
      begin = end;
    }
    return spans;
  }

 private:
  // The end of the longest span from `begin` of at most `size`, but at least one row and
  // at most up to `limit`.
  uint64_t LongestEnd(uint64_t begin, double size, uint64_t limit) const {
    uint64_t end = begin + 1;
    for (uint64_t too_far = limit + 1; end + 1 < too_far;) {
      const uint64_t middle = end + (too_far - end) / 2;
      (size_({begin, middle}) <= size ? end : too_far) = middle;
    }
    return end;
  }

  bool Covers(uint64_t begin, uint64_t count, double size) const {
    for (; count > 0 && begin < rows_; --count) {
      const uint64_t end = LongestEnd(begin, size, rows_);
      if (size_({begin, end}) > size) return false;
      begin = end;
    }
    return begin >= rows_;
  }

  // The end of the first of `count` spans over [begin, rows) whose largest is smallest.
  uint64_t FirstEnd(uint64_t begin, uint64_t count) const {
    double too_small = 0, enough = size_({begin, rows_});
    for (int i = 0; i < 60; ++i) {  // down to a double's own precision
      const double middle = (too_small + enough) / 2;
      (Covers(begin, count, middle) ? enough : too_small) = middle;
    }
    return LongestEnd(begin, enough, rows_ - (count - 1));
  }

  const uint64_t rows_;
  const SizeOf size_;
};

// Of one row of q and of k and v together, in elements.
struct RowSizes {
  explicit RowSizes(const v1::AttentionShape& shape) {
    q = static_cast<double>(shape.num_heads()) * shape.head_dim();
    kv = static_cast<double>(KvHeads(shape)) *
         static_cast<double>(shape.head_dim() + HeadDimV(shape));
  }
  double Of(const RowSpan& queries, const RowSpan& keys) const {
    return q * static_cast<double>(queries.size()) + kv * static_cast<double>(keys.size());
  }

  double q = 0, kv = 0;
};

using CuSeqlens = google::protobuf::RepeatedField<uint64_t>;

bool IsCumulative(const CuSeqlens& list, uint64_t total) {
  return !list.empty() && list[0] == 0 && std::is_sorted(list.begin(), list.end()) &&
         list[list.size() - 1] == total;
}

bool DocumentsMakeSense(const v1::AttentionShape& shape) {
  const v1::PackedDocuments& packed = shape.packed();
  return shape.batch() == 1 && packed.cu_seqlens_q_size() == packed.cu_seqlens_k_size() &&
         packed.cu_seqlens_q_size() > 1 && IsCumulative(packed.cu_seqlens_q(), shape.seq_len_q()) &&
         IsCumulative(packed.cu_seqlens_k(), shape.seq_len_kv());
}

// The rows of documents.
RowSpan RowsOf(const CuSeqlens& list, const RowSpan& documents) {
  return {list[static_cast<int>(documents.begin)], list[static_cast<int>(documents.end)]};
}

// The list of these documents alone.
CuSeqlens CutList(const CuSeqlens& list, const RowSpan& documents) {
  CuSeqlens cut;
  for (uint64_t i = documents.begin; i <= documents.end; ++i) {
    cut.Add(list[static_cast<int>(i)] - list[static_cast<int>(documents.begin)]);
  }
  return cut;
}

// REQUIRES: DocumentsMakeSense.
std::vector<CallPart> DocumentParts(const v1::AttentionShape& shape,
                                    const v1::AttentionOptions& options, uint64_t streams) {
  const CuSeqlens& queries = shape.packed().cu_seqlens_q();
  const CuSeqlens& keys = shape.packed().cu_seqlens_k();
  const RowSizes sizes(shape);
  const EvenCutter cutter(queries.size() - 1, [&](const RowSpan& documents) {
    return sizes.Of(RowsOf(queries, documents), RowsOf(keys, documents));
  });
  std::vector<CallPart> parts;
  for (const RowSpan& documents : cutter.Cut(streams)) {
    CallPart& part = parts.emplace_back(Whole(shape, options));
    part.q = RowsOf(queries, documents);
    part.kv = RowsOf(keys, documents);
    part.shape.set_seq_len_q(part.q.size());
    part.shape.set_seq_len_kv(part.kv.size());
    *part.shape.mutable_packed()->mutable_cu_seqlens_q() = CutList(queries, documents);
    *part.shape.mutable_packed()->mutable_cu_seqlens_k() = CutList(keys, documents);
  }
  return parts;
}

// Blocks of the queries of one batch row.
class QueryBlocks {
 public:
  QueryBlocks(const v1::AttentionShape& shape, const v1::AttentionOptions& options)
      : shape_(shape), options_(options) {}

  std::vector<CallPart> Split(uint64_t streams) const {
    const RowSizes sizes(shape_);
    const EvenCutter cutter(shape_.seq_len_q(),
                            [&](const RowSpan& q) { return sizes.Of(q, Keys(q)); });
    std::vector<CallPart> parts;
    for (const RowSpan& q : cutter.Cut(streams)) parts.push_back(Part(q));
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
    const int64_t moved =
        static_cast<int64_t>(part.kv.end) - (static_cast<int64_t>(q.end) + offset());
    const auto shift = [](int64_t side, int64_t by) {
      return side < 0 || side > kMaxWindow ? side : side + by;
    };
    v1::Window* window = part.options.mutable_window();
    window->set_left(shift(window->left(), moved));
    window->set_right(shift(window->right(), -moved));
    return part;
  }

  const v1::AttentionShape& shape_;
  const v1::AttentionOptions& options_;
};

// False for what the server is to judge as one request.
bool IsWorthSplitting(const v1::AttentionShape& shape) {
  if (shape.has_packed()) return DocumentsMakeSense(shape);
  return shape.batch() > 0 && shape.seq_len_q() > 0;
}

// `one_row(shape, options, streams)` splits what has one batch row and is not packed.
template <typename OneRow>
absl::StatusOr<std::vector<CallPart>> Split(const v1::AttentionShape& shape,
                                            const v1::AttentionOptions& options, int streams,
                                            const OneRow& one_row) {
  if (absl::Status status = CheckSplittable(shape, options, streams); !status.ok()) return status;
  const auto count = static_cast<uint64_t>(streams);
  if (streams == 1 || !IsWorthSplitting(shape)) {
    return std::vector<CallPart>{Whole(shape, options)};
  }
  if (shape.has_packed()) return DocumentParts(shape, options, count);
  if (shape.batch() > 1) return BatchParts(shape, options, count);
  return one_row(shape, options, count);
}

}  // namespace

absl::StatusOr<std::vector<CallPart>> SplitForward(const v1::AttentionShape& shape,
                                                   const v1::AttentionOptions& options,
                                                   int streams) {
  return Split(shape, options, streams, [](const auto& shape, const auto& options, uint64_t count) {
    return QueryBlocks(shape, options).Split(count);
  });
}

absl::StatusOr<std::vector<CallPart>> SplitBackward(const v1::AttentionShape& shape,
                                                    const v1::AttentionOptions& options,
                                                    int streams) {
  return Split(shape, options, streams, HeadParts);
}

}  // namespace ringattn::client
