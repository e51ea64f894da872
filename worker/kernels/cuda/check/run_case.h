// One case through the kernels of one device, as the ranks of a ring would run it, one after
// another. Outputs are poisoned with NaN first, inputs are surrounded by NaN, and the surroundings
// of what is written must stay untouched.
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
  std::vector<char> dbias;            // in the bias's, where its gradient is asked for
  std::vector<float> lse;
  std::vector<float> probabilities;  // where some rows' are asked for
  // No guard was touched, and delta is the sum that it should be of the kernels' own out.
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
  // Bit for bit.
  bool operator==(const CaseOutputs& other) const;
};

// The backward gets the exact lse and delta, rounded to fp32: it is judged alone.
CaseOutputs RunCase(const Case& c, const Expected& expected, const DeviceInfo& device,
                    SplitCounts& splits);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_RUN_CASE_H_
