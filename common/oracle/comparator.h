// The comparator: decides whether tensors pass beside what the oracle says.
//
// With e the error, A the magnitude, F the floor (oracle.h) and u = 2^-9 bf16,
// 2^-12 fp16, 2^-20 fp32, a tensor passes if
//   norm rule     over all rows given, and over those of each head:
//                 |e| <= 2 |twin's error| + 1e-5 |exact| + |F| + 4 u |A| / rows
//   element rule  for each element:
//                 |e| <= 8 u A + 1e-6 max A of the row + F
//   lse           for each row: |e| <= 4e-6 max(1, S)
// (|.| is the 2-norm.) The norm rule's last term is for tensors of a few rows,
// where the twin may have been lucky; `rows` counts rows by the weight of their A,
// (sum a)^2 / sum a^2 with a = |A of the row|^2. By a hundred rows it has gone.
// dsinks has 8 u |A| there instead: it is one value a head, and its A no sum of sizes, which
// errors stay far below, but a 2-norm of what independent errors lose, so that 4 u A is two or
// three of their standard deviations, and the twin of a single value is lucky as often as not.
// Everything is written so that a NaN fails; -inf must stand where the oracle
// has -inf, and a result beyond the dtype's range must be the same infinity.
#ifndef RINGATTN_COMMON_ORACLE_COMPARATOR_H_
#define RINGATTN_COMMON_ORACLE_COMPARATOR_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/tensors.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// An error beside the bound it was held to. It failed unless error <= bound.
struct Judged {
  double error = 0.0;
  double bound = 0.0;

  bool passed() const { return error <= bound; }
  // 1 is the limit; 0 / 0 counts as 0, NaN as infinite.
  double ratio() const;
};

struct TensorReport {
  TensorId tensor = TensorId::kOut;
  int64_t rows = 0;        // judged
  int64_t total_rows = 0;  // of the tensor
  // If all rows were looked at for what cannot be right (verify_scan.h): how many were
  // suspect. Some of them are among the judged.
  std::optional<int64_t> suspects;
  int64_t failed_elements = 0;
  bool passed = true;

  // The norm rule where its ratio is worst; head -1 is the whole tensor.
  // Not for lse.
  Judged norm;
  int64_t norm_head = -1;

  // The element (or lse) whose ratio is worst.
  Judged element;
  RowId element_row;
  int64_t element_column = 0;
  double expected = 0.0;
  double actual = 0.0;
};

// A tensor that was to be judged and could not be.
struct Unjudged {
  TensorId tensor = TensorId::kOut;
  std::string reason;
};

struct Report {
  std::vector<TensorReport> tensors;
  std::vector<Unjudged> unjudged;  // see verify.h

  // A tensor was judged and is wrong.
  bool mismatch() const;
  // Everything that was to be judged has been, and is right.
  bool passed() const { return !mismatch() && unjudged.empty(); }
  // One line per tensor: each error beside its bound.
  std::string ToString() const;
};

std::string ToString(const TensorReport& report);

// Judges `actual`, a whole tensor in host memory in the layout of
// common/attention/attention_spec.h, on the rows that `expected` holds.
TensorReport CompareTensor(const AttentionSpec& spec, TensorId tensor, const RowSet& expected,
                           const void* actual);

// Whole tensors to be judged; null ones are left out.
struct Outputs {
  const void* out = nullptr;
  const float* lse = nullptr;
  const void* dq = nullptr;
  const void* dk = nullptr;
  const void* dv = nullptr;
  const float* dsinks = nullptr;
  const void* dbias = nullptr;
  const float* probabilities = nullptr;
};

// Judges every tensor that is given and expected, and passes every given tensor that
// has no rows.
Report Compare(const AttentionSpec& spec, const Result& expected, const Outputs& actual);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_COMPARATOR_H_
