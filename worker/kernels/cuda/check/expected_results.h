// The oracle's results for the cases of a kernel check, computed on the host's cores before the
// device needs them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_EXPECTED_RESULTS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_EXPECTED_RESULTS_H_

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/oracle/oracle.h"
#include "worker/kernels/cuda/check/random_case.h"

namespace ringattn::worker::cuda::check {

// A case with its inputs and all results, forward and backward.
struct Expected {
  CaseInputs inputs;
  oracle::Result result;
};

// Take may be called by one thread only.
class ExpectedResults {
 public:
  // `cases` must outlive the object. Uses one thread per core. At most twice as many results as
  // threads wait to be taken.
  explicit ExpectedResults(const std::vector<Case>& cases);
  // Waits for the cases being evaluated, and drops the others.
  ~ExpectedResults();

  // Returns the results of the next case, in order. REQUIRES: fewer earlier calls than cases.
  std::unique_ptr<const Expected> Take();

 private:
  void Evaluate();

  const std::vector<Case>& cases_;
  const size_t most_ahead_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  size_t next_ = 0;   // next case to evaluate
  size_t taken_ = 0;  // by Take
  bool closing_ = false;
  std::map<size_t, std::unique_ptr<const Expected>> ready_;

  std::vector<std::thread> threads_;
};

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_EXPECTED_RESULTS_H_
