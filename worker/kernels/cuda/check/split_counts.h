// Counts of the calls that a run of the kernel check contained. A run without a call of some kind
// has not checked that kind.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_SPLIT_COUNTS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_SPLIT_COUNTS_H_

#include <map>
#include <string>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/launch/prepared_kernel.h"

namespace ringattn::worker::cuda::check {

// Direction of forwards whose last keys arrived after the launch.
inline constexpr char kLateKeys[] = "forward with late keys";

// Suffix of a direction: calls whose bias and mask are sharded by keys.
inline constexpr char kByKeys[] = " by keys";

// Directions of backwards that store dk and dv (SplitCounts::AddStoring).
inline constexpr char kStoring[] = "backward storing dk and dv";
inline constexpr char kStoringGroups[] = "backward storing dk and dv of groups";
inline constexpr char kStoringDocuments[] = "backward storing dk and dv of documents";
inline constexpr char kStoringWindows[] = "backward storing dk and dv of windows";
inline constexpr char kStoringBlocks[] = "backward storing dk and dv of several blocks";

// Not thread safe.
class SplitCounts {
 public:
  // Counts a launched call, by family and direction ("forward").
  void Count(const PreparedKernel& kernel, const std::string& direction);

  // Counts a forward call whose keys were split, with the options that it used.
  void AddSplit(const Case& c, const ForwardCall& call, bool has_empty_rows);

  // Counts a backward that stored dk and dv, also as one of groups, documents, windows and several
  // blocks of keys, if it has them.
  void AddStoring(const PreparedKernel& kernel, const Case& c);

  // Returns the number of calls by that family in that direction.
  int CallsOf(const std::string& family, const std::string& direction) const;

  // Prints the counts; returns false if a kind of split call is missing.
  bool Complete() const;

 private:
  struct Kind {
    const char* name;
    int count = 0;
  };
  std::vector<Kind> kinds_ = {{"fp32"},           {"16-bit"},   {"causal"},    {"window"},
                              {"softcap"},        {"packed"},   {"strided"},   {"packed heads"},
                              {"separate heads"}, {"Dv != D"},  {"batch"},     {"merged after"},
                              {"merged into"},    {"one call"}, {"empty rows"}};
  std::map<std::string, int> calls_;
};

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_SPLIT_COUNTS_H_
