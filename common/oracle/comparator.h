// The comparator: decides whether tensors agree with the oracle.
//
// With e the error, A the magnitude, F the floor (oracle.h) and u = 2^-9 bf16, 2^-12 fp16, 2^-20
// fp32, a tensor passes if
//   norm rule     over all given rows, and over those of each head:
//                 |e| <= 2 |twin's error| + 1e-5 |exact| + |F| + 4 u |A| / rows
//   element rule  for each element:
//                 |e| <= 8 u A + 1e-6 max A of the row + F
//   lse           for each row: |e| <= 4e-6 max(1, S)
// (|.| is the 2-norm.) The last term of the norm rule covers tensors with few rows, for which the
// twin may be unusually exact. `rows` counts rows by the weight of their A: (sum a)^2 / sum a^2
// with a = |A of the row|^2. The term is negligible from a hundred rows on.
//
// For dsinks the term is 8 u |A|. dsinks has one value per head, and its A is a 2-norm of
// independent errors rather than a sum of sizes that errors rarely approach. So 4 u A is only two
// or three standard deviations, and the twin of a single value is often unusually exact.
//
// NaN must appear exactly where the oracle has NaN. -inf must appear exactly where the oracle has
// -inf, and a result beyond the dtype's range must be the same infinity. Norms exclude all of these
// elements.
#ifndef RINGATTN_COMMON_ORACLE_COMPARATOR_H_
#define RINGATTN_COMMON_ORACLE_COMPARATOR_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/tensors.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// An error and its bound. It fails unless error <= bound.
struct Judged {
  double error = 0.0;
  double bound = 0.0;

  bool passed() const { return error <= bound; }
  // Returns error / bound; the limit is 1. 0 / 0 counts as 0, NaN as infinite.
  double ratio() const;
};

struct TensorReport {
  TensorId tensor = TensorId::kOut;
  int64_t rows = 0;        // rows compared
  int64_t total_rows = 0;  // of the tensor
  // Set if all rows were scanned for impossible values (verify_scan.h): the number of suspects.
  // Some of them are among the compared rows.
  std::optional<int64_t> suspects;
  int64_t failed_elements = 0;
  bool passed = true;

  // The worst ratio of the norm rule; head -1 is the whole tensor. Not set for lse.
  Judged norm;
  int64_t norm_head = -1;

  // The element (or lse) with the worst ratio.
  Judged element;
  RowId element_row;
  int64_t element_column = 0;
  double expected = 0.0;
  double actual = 0.0;
};

// A tensor that should have been compared but could not be.
struct Unjudged {
  TensorId tensor = TensorId::kOut;
  std::string reason;
};

struct Report {
  std::vector<TensorReport> tensors;
  std::vector<Unjudged> unjudged;  // see verify.h

  // Returns whether a tensor was compared and is wrong.
  bool mismatch() const;
  // Returns whether every tensor has been compared and is right.
  bool passed() const { return !mismatch() && unjudged.empty(); }
  // Returns one line per tensor, with each error and its bound.
  std::string ToString() const;
};

std::string ToString(const TensorReport& report);

// Compares `actual`, a whole tensor in host memory in the layout of
// common/attention/attention_spec.h, on the rows that `expected` holds.
TensorReport CompareTensor(const AttentionSpec& spec, TensorId tensor, const RowSet& expected,
                           const void* actual);

// Whole tensors to compare; null ones are skipped.
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

// Compares every tensor that is both given and expected. A given tensor without rows passes.
Report Compare(const AttentionSpec& spec, const Result& expected, const Outputs& actual);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_COMPARATOR_H_
