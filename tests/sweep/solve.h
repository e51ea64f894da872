// Helpers of tests of identities between runs: a problem's inputs, its result in both directions,
// and tensors as numbers.
#ifndef RINGATTN_TESTS_SWEEP_SOLVE_H_
#define RINGATTN_TESTS_SWEEP_SOLVE_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "tests/sweep/run_problem.h"

namespace ringattn::tests {

// A tensor of fp32.
inline std::vector<float> Floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

template <typename T = float>
std::vector<uint8_t> Bytes(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Includes the inputs of a backward.
inline TensorMap NormalInputs(const AttentionSpec& spec, uint64_t seed) {
  return ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kNormal, seed, true));
}

// out and lse, and the gradients with out and lse computed again.
inline TensorMap SolveBoth(const AttentionSpec& spec, const TensorMap& inputs,
                           const Placement& placement) {
  TensorMap all;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    auto outputs = RunProblem(spec, placement, direction, direction == Direction::kBackward, inputs,
                              Engine::kExecutor, KernelSet::kCpu);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    if (outputs.ok()) all.merge(*outputs);
  }
  return all;
}

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_SOLVE_H_
