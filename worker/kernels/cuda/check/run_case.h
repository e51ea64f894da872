// Runs one case on the kernels of one device, as the ranks of a ring would, one after another.
// Outputs are filled with NaN first, and inputs are surrounded by NaN. The memory around outputs
// must stay unchanged.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_RUN_CASE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_RUN_CASE_H_

#include <vector>

#include "common/oracle/comparator.h"
#include "worker/kernels/cuda/check/expected_results.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/check/split_counts.h"
#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

struct CaseOutputs {
  std::vector<char> out, dq, dk, dv;  // whole tensors in the case's dtype
  std::vector<char> dbias;            // in the bias's dtype, if its gradient is requested
  std::vector<float> lse;
  std::vector<float> probabilities;  // if some rows' probabilities are requested
  // No guard was overwritten, and delta is the right sum for the kernels' out.
  bool intact = true;

  oracle::Outputs view() const {
    return {.out = out.data(),
            .lse = lse.data(),
            .dq = dq.data(),
            .dk = dk.data(),
            .dv = dv.data(),
            .dbias = dbias.empty() ? nullptr : dbias.data(),
            .probabilities = probabilities.empty() ? nullptr : probabilities.data()};
  }
  // Compares bit for bit.
  bool operator==(const CaseOutputs& other) const;
};

// The backward gets the exact lse and delta, rounded to fp32, so that it is judged separately.
CaseOutputs RunCase(const Case& c, const Expected& expected, const DeviceInfo& device,
                    SplitCounts& splits);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_RUN_CASE_H_
