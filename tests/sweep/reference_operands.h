// The operands of one compute call in the interpreter: the second binding of every op, on purpose,
// from the words of common/program/program.h, apart from worker/executor/bind_call. Each operand
// must have exactly the bytes of its shape.
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_OPERANDS_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/attention/attention_spec.h"
#include "common/program/program.h"
#include "tests/sweep/reference_memory.h"
#include "tests/sweep/reference_problems.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

// Objects that kernel calls refer to. Must outlive the last of them.
struct CallStore {
  std::deque<worker::AttentionProblem> some_heads;  // of calls that have not all
  // For gathers and scatters.
  std::deque<std::vector<RowRun>> runs;
  std::deque<std::vector<int32_t>> heads_of;
};

struct Operands {
  // All outlive it, and the store what is bound.
  Operands(const ReferenceProblems& problems, ReferenceMemory& memory, CallStore& store, int rank,
           size_t step, const ComputeCall& call);

  // Return the addresses of operands. A wrong operand becomes the call's error.
  uint8_t* Range(const ByteRange& range);
  uint8_t* Exactly(const ByteRange& range, int64_t bytes);
  uint8_t* Elements(const ByteRange& range, int64_t count);
  uint8_t* Results(const ByteRange& range, int64_t count);
  float* Floats(const ByteRange& range, int64_t count);
  void Fail(const std::string& reason);

  // Returns the problem of the call's heads only.
  const worker::AttentionProblem* Problem();
  std::vector<Piece> QPieces() const;
  std::vector<worker::KvBlock> Blocks(bool backward, bool with_values = true);
  // Sizes of a rank's shard of a bias or a mask: planes, rows, bytes of a row.
  int64_t PlaneBytes(bool per_batch, bool per_head, int64_t row_bytes) const;
  int64_t BiasBytes() const;
  worker::TermOperands Terms();
  const float* Sinks();

  const ReferenceProblems& problems;
  ReferenceMemory& memory;
  CallStore& store;
  const int rank;
  const size_t step;
  const ComputeCall& call;
  const ReferencePart* const part;  // null: of the whole problem
  const AttentionSpec& spec;        // of the call
  const worker::AttentionProblem& whole_problem;
  int64_t kv_heads;  // of the call
  int64_t heads;
  int64_t statistics;  // elements of lse and delta
  int64_t q_elements;
  int64_t out_elements;
  absl::Status error;
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_OPERANDS_H_
