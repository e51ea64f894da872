#include "worker/kernels/cuda/check/split_counts.h"

#include <cstdio>
#include <iterator>

namespace ringattn::worker::cuda::check {

void SplitCounts::Count(const PreparedKernel& kernel, const std::string& direction) {
  const bool float8 = kernel.name().kernel_class == kFloat8KernelClass;
  ++calls_[std::string(kernel.family()) + (float8 ? "/fp8 " : " ") + direction];
}

void SplitCounts::AddSplit(const Case& c, const ForwardCall& call, bool has_empty_rows) {
  const AttentionShape& shape = c.spec.shape;
  const AttentionOptions& options = c.spec.options;
  const bool grouped = shape.group_size() > 1;
  const bool packed_heads = grouped && call.q_rows * shape.group_size() <= 64;
  const bool used[] = {c.spec.dtype == DType::kFloat32,
                       c.spec.dtype != DType::kFloat32,
                       options.causal,
                       options.window_left >= 0 || options.window_right >= 0,
                       options.softcap > 0,
                       shape.num_documents() > 1,
                       c.layout == Layout::kStriped && c.world > 1,
                       packed_heads,
                       grouped && !packed_heads,
                       shape.head_dim != shape.head_dim_v,
                       shape.batch > 1,
                       !call.final,
                       !call.initial,
                       c.one_call && c.world > 1,
                       has_empty_rows};
  static_assert(std::size(used) == 15);
  for (size_t i = 0; i < kinds_.size(); ++i) kinds_[i].count += used[i];
}

void SplitCounts::AddStoring(const PreparedKernel& kernel, const Case& c) {
  const AttentionShape& shape = c.spec.shape;
  const AttentionOptions& options = c.spec.options;
  Count(kernel, kStoring);
  if (shape.group_size() > 1) Count(kernel, kStoringGroups);
  if (shape.num_documents() > 1) Count(kernel, kStoringDocuments);
  if (options.window_left >= 0 || options.window_right >= 0) Count(kernel, kStoringWindows);
  if (c.key_blocks > 1) Count(kernel, kStoringBlocks);
}

int SplitCounts::CallsOf(const std::string& family, const std::string& direction) const {
  const auto found = calls_.find(family + " " + direction);
  return found == calls_.end() ? 0 : found->second;
}

bool SplitCounts::Complete() const {
  bool complete = true;
  std::printf("keys split:");
  for (const Kind& kind : kinds_) {
    std::printf(" %s %d,", kind.name, kind.count);
    complete = complete && kind.count > 0;
  }
  std::printf("%s\n", complete ? "" : " INCOMPLETE");
  std::printf("calls:");
  for (const auto& [kind, count] : calls_) std::printf(" %s %d,", kind.c_str(), count);
  std::printf("\n");
  return complete;
}

}  // namespace ringattn::worker::cuda::check
