// What a run of the kernel check has come across: a run in which a kind of call never happened has
// not checked it.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_SPLIT_COUNTS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_SPLIT_COUNTS_H_

#include <map>
#include <string>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/launch/prepared_kernel.h"

namespace ringattn::worker::cuda::check {

// Direction of forwards whose last keys came when they had been launched.
inline constexpr char kLateKeys[] = "forward with late keys";

// Behind a direction: of calls whose bias and mask are cut by keys.
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
  // A launched call, by family and direction ("forward").
  void Count(const PreparedKernel& kernel, const std::string& direction);

  // A forward call whose keys were split, by what else it used.
  void AddSplit(const Case& c, const ForwardCall& call, bool has_empty_rows);

  // A backward that has stored dk and dv: also as one of groups, documents, windows and several
  // blocks of keys, as far as it is.
  void AddStoring(const PreparedKernel& kernel, const Case& c);

  // Of calls by that family in that direction.
  int CallsOf(const std::string& family, const std::string& direction) const;

  // Prints the counts; false if a kind of split call is missing.
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
