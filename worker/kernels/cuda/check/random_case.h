// Random problems of the kernel check: options, sizes, the split into ring shards, and random
// tensors. Host memory; pure.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_RANDOM_CASE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_RANDOM_CASE_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/oracle/oracle.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/check/shards.h"

namespace ringattn::worker::cuda::check {

struct Case {
  AttentionSpec spec;  // several documents also with a batch axis
  int world = 1;
  Layout layout = Layout::kContiguous;
  bool one_call = false;      // all blocks in one call instead of one per ring step
  int key_blocks = 1;         // for a world of one: blocks of its keys, all in one call
  bool small_device = false;  // pretend that the device has little shared memory
  bool few_sms = false;       // pretend that it has one SM: blocks then process several heads
  bool long_keys = false;     // use the kernels for long key ranges, also for short ones
  bool short_shifts = false;  // forward blocks leave after every item
  // Rows that segment ids hide from all others hold NaN: rows of k and v, and of q and dout.
  bool hostile = false;
  bool apart = false;  // a separate kernel computes a bias's gradient, even if the backward could
                       // store it
  // Forwards and backwards get only their block's columns of a bias and a mask
  // (ScoreTerms::by_keys).
  bool by_keys = false;
  float amplitude = 1.0f;  // of q's and k's elements
  std::string family;      // forces this family's kernels, in the directions that it serves
  uint32_t seed = 0;       // of the tensors

  std::string ToString() const;
};

// Draws every option, dtype, head-dim class and layout. `small`: tiny, for compute-sanitizer.
Case RandomCase(std::mt19937& random, bool small);

// The same with score terms, or a backward that must be deterministic, or both.
Case RandomTermCase(std::mt19937& random, bool small);

// Score terms in a problem that sm90's kernels take: 16 bits, head dims up to 128 that the copy
// engine can read, any order of sums. Rows that are hidden from all others hold ordinary numbers.
Case RandomHopperTermCase(std::mt19937& random, bool small);

// A problem that sm90's kernels take whose backward must be deterministic, plain or with score
// terms.
Case RandomDeterministicCase(std::mt19937& random, bool small);
Case RandomDeterministicTermCase(std::mt19937& random, bool small);

// A plain problem in 16 bits with head dims above 256, up to 576 and 512, whose forward sm90
// serves.
Case RandomWideCase(std::mt19937& random, bool small);

// A forward in e4m3. (Its backward uses the inputs without rounding and must not be judged.)
Case RandomFloat8Case(std::mt19937& random, bool small);

// The problem as kernels see it.
AttentionProblem ProblemOf(const AttentionSpec& spec);

// A case's inputs in the spec's dtype, whole (global) tensors.
struct CaseInputs {
  std::vector<char> q, k, v, dout;
  // Present if the spec has them, in the layouts of TensorId.
  std::vector<float> sinks;
  std::vector<char> bias, mask, q_segment_ids, kv_segment_ids;

  oracle::Inputs view() const;
};
CaseInputs InputsOf(const Case& c);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_RANDOM_CASE_H_
